"""Prompts into scored rollouts: the source of a step's batch, sampling ahead, selection of groups."""
