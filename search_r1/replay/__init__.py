"""Reuse of stored trajectories: another reward, log-probs under another checkpoint, a training set."""
