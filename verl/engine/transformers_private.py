"""The private names of transformers that the engine uses: what a model class declares of itself has no public name.

`tests/verl/test_private_names.py` checks that the installed transformers has them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def keeps_state(model: PreTrainedModel) -> bool:
    """Whether a state runs through all tokens of a row, which packed rows would share."""
    return bool(model._is_stateful)


def lets_attention_be_chosen(model: PreTrainedModel) -> bool:
    """Whether `set_attn_implementation` takes effect: it only warns where it does not."""
    return bool(model._supports_attention_backend and model._can_set_attn_implementation())


def attention_implementation(config: PreTrainedConfig) -> str | None:
    """The name of the attention in use; `set_attn_implementation` has no counterpart that reads it."""
    name: str | None = config._attn_implementation
    return name


def layer_class_names(model: PreTrainedModel) -> set[str]:
    """The classes of the repeated blocks, which are never split over devices."""
    return set(model._no_split_modules or ())


def mark_parameters_initialized(model: PreTrainedModel) -> None:
    """Leave only buffers for `initialize_weights` to fill."""
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]


def has_own_code(loaded: Any) -> bool:
    """Whether the code of a model or config came with the files that it was loaded from."""
    return loaded._auto_class is not None
