"""Weights on their way from the trainer to the rollout engines. Needs torch, neither Ray nor vLLM."""
