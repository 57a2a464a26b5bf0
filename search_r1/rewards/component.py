"""Rewards are built from components: numbers measured on a trajectory, each logged separately."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from search_r1.llm_agent.grammar import SEARCH_R1, Grammar
from search_r1.llm_agent.templates import template_of
from search_r1.rewards.reading import Reading, read_trajectory
from verl.errors import ConfigError, RewardError, RewardUnavailable, VerlError
from verl.process.by_name import in_words, load_by_name
from verl.process.event_loop import run_to_end
from verl.protocol import Trajectory
from verl.score import Score, read_number

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.config import Config

Value = float | RewardUnavailable
C = TypeVar("C", bound=Callable[..., Any])

COMPONENTS: dict[str, Callable[..., Component | BatchedComponent]] = {}


class Component(Protocol):
    """A pure function of a trajectory's text; by convention its value is in [0, 1].

    With the attribute `reads_search_tags = True` it is not for chat models, whose searches have none.
    """

    def __call__(self, reading: Reading) -> float: ...


@runtime_checkable
class BatchedComponent(Protocol):
    """Measures many trajectories at once, because it calls a model or a service.

    A value that could not be computed is a `RewardUnavailable`: that trajectory is masked, never scored 0.
    """

    async def measure(self, readings: Sequence[Reading]) -> list[Value]: ...


@runtime_checkable
class CheckedComponent(Protocol):
    """Can be checked before a run: `check` raises `ConfigError` or `RewardUnavailable` if it would not work."""

    async def check(self) -> None: ...


def component(name: str) -> Callable[[C], C]:
    """Register a class (its constructor takes keyword options) under the short name that configs use."""

    def register(made_by: C) -> C:
        if name in COMPONENTS:
            raise ValueError(f"there is a reward component {name!r} already")
        COMPONENTS[name] = made_by
        return made_by

    return register


def make_component(name: str, options: Mapping[str, Any] | None = None) -> Component | BatchedComponent:
    """A registered component, or the class at a dotted name. Raises `ConfigError` for a bad name or option."""
    if "." in name:
        made_by = load_by_name(name, "reward component")
    elif name in COMPONENTS:
        made_by = COMPONENTS[name]
    else:
        known = ", ".join(sorted(COMPONENTS))
        raise ConfigError(f"no reward component {name!r}: give the dotted name of a class, or one of {known}")
    try:
        # An option that the class does not have gives a TypeError, a value that it refuses a ValueError.
        made: Component | BatchedComponent = made_by(**(options or {}))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward component {name}: {error}") from error
    if not callable(made) and not isinstance(made, BatchedComponent):
        raise ConfigError(
            f"reward component {name} can neither be called with a reading nor has it a measure(readings)"
        )
    return made


class ComponentReward(ABC):
    """A reward of trajectories: its `components` are measured, and `combine` turns their values into one number.

    Components in `logged_only` are not part of the reward: one that cannot be computed is left out.
    """

    logged_only: frozenset[str] = frozenset()

    def __init__(self, components: Mapping[str, Component | BatchedComponent], grammar: Grammar = SEARCH_R1) -> None:
        self.components = components
        self.grammar = grammar

    @classmethod
    def from_config(cls, config: Config, **kwargs: Any) -> ComponentReward:
        """The reward as the trainer constructs it: with the grammar of `agent.template` and with `reward.kwargs`.

        Raises `ConfigError` for one that would punish each search of a chat model.
        """
        reward = cls(grammar=template_of(config.agent).grammar, **kwargs)
        if config.agent.format == "chat":
            counted = (name for name in reward.components if name not in reward.logged_only)
            if tagged := [name for name in counted if getattr(reward.components[name], "reads_search_tags", False)]:
                raise ConfigError(
                    f"{', '.join(tagged)} reads the tags of searches, and with agent.format=chat a search is a call of "
                    "a tool: choose another reward, or a weight of 0"
                )
        return reward

    @property
    def scores_while_sampling(self) -> bool:
        """Whether to score episodes while others are still sampled, because a component says so of itself."""
        return any(getattr(part, "scores_while_sampling", False) for part in self.components.values())

    @abstractmethod
    def combine(self, values: Mapping[str, float]) -> float:
        """The reward, from one value for each component."""

    def check(self) -> None:
        """Check the models and services behind the components. Raises `ConfigError` or `RewardUnavailable`."""
        checked = [part for part in self.components.values() if isinstance(part, CheckedComponent)]

        async def check_all() -> None:
            await asyncio.gather(*(part.check() for part in checked))

        if checked:
            run_to_end(check_all())

    def score(self, trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> Score:
        """(reward, components). Raises `DataError` without gold answers, `RewardUnavailable` without a value."""
        score = self.score_all([trajectory], tokenizer)[0]
        if isinstance(score, RewardUnavailable):
            raise score
        return score

    def score_all(
        self, trajectories: Sequence[Trajectory], tokenizer: PreTrainedTokenizerBase
    ) -> list[Score | RewardUnavailable]:
        """`score` of each trajectory, with batched components called once. Also works inside a running event loop."""
        readings = [read_trajectory(trajectory, tokenizer, self.grammar) for trajectory in trajectories]
        return self.score_readings(readings)

    def score_readings(self, readings: Sequence[Reading]) -> list[Score | RewardUnavailable]:
        """`score_all` from readings. Raises `RewardError` if a component raises or does not return a finite number."""
        batched = {name: part for name, part in self.components.items() if isinstance(part, BatchedComponent)}
        columns: dict[str, Sequence[Value]] = {
            name: [_call(name, part, reading) for reading in readings]
            for name, part in self.components.items()
            if not isinstance(part, BatchedComponent)
        }
        if batched and readings:
            columns |= run_to_end(_measure(batched, readings))
        rows = [{name: columns[name][i] for name in self.components} for i in range(len(readings))]
        return [self._score(row, reading) for row, reading in zip(rows, readings, strict=True)]

    def _score(self, values: Mapping[str, Value], reading: Reading) -> Score | RewardUnavailable:
        numbers: dict[str, float] = {}
        for name, value in values.items():
            if not isinstance(value, RewardUnavailable):
                numbers[name] = _finite(name, value, reading)
            elif name not in self.logged_only:
                return value
        return self.combine(numbers), numbers


def _call(name: str, part: Component, reading: Reading) -> Value:
    try:
        return part(reading)
    except RewardUnavailable as error:
        return error
    except VerlError:
        raise
    except Exception as error:
        raise RewardError(
            f"reward component {name} raised {in_words(error)}; for question {reading.question!r}"
        ) from error


def _finite(name: str, value: Any, reading: Reading) -> float:
    try:
        return read_number(value)
    except ValueError as error:
        raise RewardError(f"reward component {name} {error}; for question {reading.question!r}") from error


async def _measure(parts: Mapping[str, BatchedComponent], readings: Sequence[Reading]) -> dict[str, Sequence[Value]]:
    columns = await asyncio.gather(*(part.measure(readings) for part in parts.values()))
    for name, column in zip(parts, columns, strict=True):
        if len(column) != len(readings):
            raise ConfigError(f"reward component {name} gave {len(column)} values for {len(readings)} trajectories")
    return dict(zip(parts, columns, strict=True))


def check_shares(**scores: float) -> None:
    """Raises `ValueError` unless each is in [0, 1]."""
    for name, value in scores.items():
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name} is {value}: give a number from 0 to 1, the reward of a correct answer")
