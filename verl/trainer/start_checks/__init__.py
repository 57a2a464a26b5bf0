"""Checks before a model is loaded. `check_inputs` is what the trainer does first; the command does the rest."""
