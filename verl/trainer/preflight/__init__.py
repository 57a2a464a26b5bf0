"""What is known before a model is loaded. `check_inputs` is what the trainer does first; the command does the rest."""

from verl.trainer.preflight.inputs import check_inputs

__all__ = ["check_inputs"]
