"""The runs of a sweep: every combination of the values that overrides have, as in `trainer.seed=0,1,2`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from verl.config.loading.compose import parsed
from verl.errors import ConfigError

QUOTES = "'\""
MAX_NAME = 120  # characters of a folder's name


@dataclass(frozen=True)
class Combination:
    """One run. `values` has those of the swept keys, as text; `name` can be that of a folder."""

    name: str
    values: dict[str, str]
    overrides: tuple[str, ...]


def combinations(overrides: Iterable[str]) -> list[Combination]:
    """The last given key changes fastest, as in Hydra's own sweeps: `a=0,1 b=x,y` is 0 x, 0 y, 1 x, 1 y.

    Values are given as `key=a,b`, `key=choice(a,b)` or `key=range(1,4)`. Raises ConfigError if none has several, and
    for a value without elements, as `interval(0,1)`.
    """
    fixed: list[str] = []
    swept: dict[str, list[str]] = {}
    for text in overrides:
        override = parsed(text)
        key = override.key_or_group
        if not override.is_sweep_override():
            fixed.append(text)
            swept.pop(key, None)  # of several overrides of a key the last one counts
            continue
        if not override.is_discrete_sweep():
            raise ConfigError(f"override '{text}': a sweep needs its values one by one, as in {key}=0.1,0.2")
        fixed = [other for other in fixed if parsed(other).key_or_group != key]
        swept[key] = list(override.sweep_string_iterator())
    if not swept:
        raise ConfigError("-m runs several configurations, so a key needs several values, as in trainer.seed=0,1,2")
    short = _short_names(list(swept))
    found = []
    for chosen in itertools.product(*swept.values()):
        values = dict(zip(swept, chosen, strict=True))
        name = ",".join(
            f"{short[key]}={re.sub(r'[^A-Za-z0-9._+-]+', '_', value.strip(QUOTES))}" for key, value in values.items()
        )
        found.append(Combination(name, values, (*fixed, *(f"{key}={value}" for key, value in values.items()))))
    if len({one.name for one in found}) < len(found) or max(len(one.name) for one in found) > MAX_NAME:
        found = [Combination(f"run_{n}", one.values, one.overrides) for n, one in enumerate(found)]
    return found


def _short_names(keys: list[str]) -> dict[str, str]:
    """The last part of each key, where that tells the keys apart; else the whole key."""
    last = [key.rpartition(".")[2] for key in keys]
    return dict(zip(keys, last if len(set(last)) == len(keys) else keys, strict=True))
