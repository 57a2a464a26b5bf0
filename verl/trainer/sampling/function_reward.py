"""A reward that is a plain function, as users of verl write it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from verl.agent.text import policy_texts
from verl.errors import ConfigError
from verl.process.by_name import dotted_name
from verl.protocol import Trajectory

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


class FunctionReward:
    """`compute_score(data_source, solution_str, ground_truth, extra_info)`, and `kwargs` by their names.

    `solution_str` is what the policy wrote, its turns one after the other without EOS: no prompt, and nothing that the
    environment answered. The others are the row's `data_source`, `reward_model.ground_truth` and `extra_info`.
    """

    def __init__(self, function: Callable[..., Any], kwargs: dict[str, Any]) -> None:
        """Raises `ConfigError` for a function that cannot be called so."""
        self.function, self.kwargs = function, kwargs
        try:
            inspect.signature(function).bind(**dict.fromkeys(ARGUMENTS), **kwargs)
        except TypeError as error:
            raise ConfigError(
                f"{dotted_name(function)}: {error}; it is called with the keyword arguments {', '.join(ARGUMENTS)}"
                f"{''.join(f', {name}' for name in kwargs)}"
            ) from error

    def score(self, trajectory: Trajectory, tokenizer: Any) -> Any:
        row = trajectory.prompt.row
        return self.function(
            data_source=trajectory.prompt.data_source,
            solution_str="\n".join(policy_texts(trajectory, tokenizer)),
            ground_truth=(row.get("reward_model") or {}).get("ground_truth"),
            extra_info=row.get("extra_info") or {},
            **self.kwargs,
        )
