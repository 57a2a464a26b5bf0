"""A run on disk: its folder and lock, checkpoints, the state to resume from, what is removed in time."""
