"""A weighted sum of any components, defined in the config."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import search_r1.rewards.shipped  # noqa: F401
from search_r1.llm_agent.grammar import SEARCH_R1, Grammar
from search_r1.rewards.component import ComponentReward, make_component
from verl.errors import ConfigError


class CompositeReward(ComponentReward):
    """reward = sum of weight x value over the components, then clipped to `clip` = [low, high] if given.

    `weights`: registered names, or dotted names of classes, with their weights. A component of weight 0 is only
    measured and logged; if it cannot be computed, it is left out. `options`: keyword arguments of components, by the
    same names. Raises `ConfigError` for invalid names, options, weights and bounds.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        options: Mapping[str, Mapping[str, Any]] | None = None,
        clip: Sequence[float] | None = None,
        grammar: Grammar = SEARCH_R1,
    ) -> None:
        _check_weights(weights)
        _check_options(options or {}, weights)
        super().__init__({name: make_component(name, (options or {}).get(name)) for name in weights}, grammar)
        self.weights = dict(weights)
        self.clip = _bounds(clip)
        self.logged_only = frozenset(name for name, weight in weights.items() if weight == 0)

    def combine(self, values: Mapping[str, float]) -> float:
        low, high = self.clip
        total = sum(weight * values[name] for name, weight in self.weights.items() if weight)
        return min(high, max(low, float(total)))


def _check_weights(weights: Mapping[str, float]) -> None:
    if not isinstance(weights, Mapping) or not weights:
        raise ConfigError(
            f"weights is {weights!r}: give the weight of one component at least, as in {{exact_match: 1}}"
        )
    for name, weight in weights.items():
        if not isinstance(name, str):
            raise ConfigError(f"weights has the name {name!r}: give the name of a component")
        if not _is_number(weight):
            raise ConfigError(f"the weight of {name} is {weight!r}: give a finite number")


def _check_options(options: Mapping[str, Mapping[str, Any]], weights: Mapping[str, float]) -> None:
    if not isinstance(options, Mapping):
        raise ConfigError(
            f"options is {options!r}: give keyword arguments by component, as in {{f1: {{unicode: true}}}}"
        )
    for name, arguments in options.items():
        if name not in weights:
            raise ConfigError(f"options has {name!r}, which has no weight; those with one are {', '.join(weights)}")
        if not isinstance(arguments, Mapping):
            raise ConfigError(f"the options of {name} are {arguments!r}: give keyword arguments")


def _bounds(clip: Sequence[float] | None) -> tuple[float, float]:
    if clip is None:
        return -math.inf, math.inf
    numbers = list(clip) if isinstance(clip, Sequence) else []
    if len(numbers) != 2 or not all(map(_is_number, numbers)) or numbers[0] >= numbers[1]:
        raise ConfigError(f"clip is {clip!r}: give [low, high], two numbers of which the first is smaller")
    return float(numbers[0]), float(numbers[1])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
