"""What can be done with stored trajectories: a new reward, another checkpoint's view, a training set."""
