"""Rewards of trajectories, by the rule that the configuration names.

Scoring has a thread of its own beside sampling: a judge answers about the first groups while others are sampled.
"""

from __future__ import annotations

import copy
import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any, Protocol, runtime_checkable

from verl.agent.text import policy_texts
from verl.config import Config
from verl.config.rules.rewards import expected_address, with_server
from verl.errors import ConfigError, RewardError, RewardUnavailable, RolloutError, VerlError
from verl.process.by_name import dotted_name, in_words, load_by_name
from verl.process.secrets import mask_secrets
from verl.protocol import Prompt, Status, Trajectory
from verl.score import read_number, read_score
from verl.tracking.trajectory_columns import question_of

log = logging.getLogger(__name__)

Handed = tuple[Sequence[Trajectory], Future[None]]


class ScoringAhead:
    """Has `score` work, in a thread, on the trajectories that are handed over: on all that have come meanwhile at once,
    as a judge that is slow or down costs its time per call.
    """

    def __init__(self, score: Callable[[Sequence[Trajectory]], object]) -> None:
        self._score = score
        self._queue: SimpleQueue[Handed] = SimpleQueue()
        self._handed: dict[int, tuple[Trajectory, Future[None]]] = {}  # by the trajectory's `id`
        self._thread: threading.Thread | None = None

    def add(self, trajectories: Sequence[Trajectory]) -> None:
        """Hand trajectories over; until `take` they are the thread's. Those that it has already are left out."""
        new = [trajectory for trajectory in trajectories if id(trajectory) not in self._handed]
        if not new:
            return
        done = Future[None]()
        self._handed |= {id(trajectory): (trajectory, done) for trajectory in new}
        self._queue.put((new, done))
        if self._thread is None:  # a daemon: a judge that hangs does not keep the run from ending
            self._thread = threading.Thread(target=self._work, name="scoring", daemon=True)
            self._thread.start()

    def has_scored(self, wanted: Sequence[Trajectory]) -> bool:
        """Whether `take` need not wait."""
        return all(self._handed[id(one)][1].done() for one in wanted if id(one) in self._handed)

    def take(self, wanted: Sequence[Trajectory]) -> list[Trajectory]:
        """Wait for those of `wanted` that were handed over, and return them. Raises what scoring them has raised."""
        taken = [self._handed.pop(id(one)) for one in wanted if id(one) in self._handed]
        for _, done in taken:
            done.result()
        return [trajectory for trajectory, _ in taken]

    def forget(self, but: Sequence[Trajectory]) -> None:
        """Forget what was handed over, `but` for these: nobody will take it."""
        kept = {id(trajectory) for trajectory in but}
        self._handed = {number: handed for number, handed in self._handed.items() if number in kept}

    def _work(self) -> None:
        while True:
            # Wait for one, then take all that have come meanwhile, so that the rule is called once for all of them.
            batch = [self._queue.get()]
            while True:
                try:
                    batch.append(self._queue.get_nowait())
                except Empty:
                    break
            # The thread must not end by an error: whoever waits for one of these trajectories gets it.
            try:
                self._score([trajectory for trajectories, _ in batch for trajectory in trajectories])
            except BaseException as error:
                for _, done in batch:
                    done.set_exception(error)
            else:
                for _, done in batch:
                    done.set_result(None)


ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


@runtime_checkable
class Reward(Protocol):
    """A rule: the score of a trajectory, in any form that `verl.score.read_score` takes.

    Its class is constructed with `reward.kwargs` as keyword arguments. Two methods are optional. `from_config(config,
    **kwargs)`, a classmethod, is called instead of the constructor. `check()` raises a `VerlError` when a service
    behind the rule does not work. Two attributes are optional, too. With `scores_while_sampling = True`, groups are
    scored in a thread as they are completed, while others are being sampled. With `scores_texts = False`, the rule is
    not tried on made-up turns before a run, since it reads something else.
    """

    def score(self, trajectory: Trajectory, tokenizer: Any) -> Any:
        """The score of a trajectory. Raises `RewardUnavailable` if it cannot be scored now; it is then masked."""
        ...


@runtime_checkable
class BatchReward(Protocol):
    """A rule that scores many at once."""

    def score_all(self, trajectories: Sequence[Trajectory], tokenizer: Any) -> Any:
        """A score for each trajectory; a `RewardUnavailable` for one that could not be scored."""
        ...


class Scorer:
    """The reward of training and that of validation: the same rule, possibly with other arguments.

    `stats` describes the latest `score`: `reward/unavailable_ratio` is the share that could not be scored.
    """

    def __init__(self, config: Config, tokenizer: Any, server: str | None = None) -> None:
        """`server`: host:port of the server that `reward.launch` has started, if known."""
        reward = config.reward
        address = server or expected_address(reward)
        self.train = make_reward(config, reward.function, with_server(reward.kwargs, address))
        self.validation = self.train
        if reward.val_kwargs is not None:
            self.validation = make_reward(config, reward.function, with_server(reward.val_kwargs, address))
        self.tokenizer = tokenizer
        self._ahead = self._scoring_ahead(config)
        self.max_failed_ratio = config.agent.max_failed_ratio
        self.stats: dict[str, float] = {}
        self._num_requested = self._num_unavailable = 0

    def check(self) -> None:
        """Call the rule's `check` before a run, if it has one. Raises what that raises."""
        for rule in [self.train] if self.validation is self.train else [self.train, self.validation]:
            if hasattr(rule, "check"):
                rule.check()

    def try_on(self, trajectories: Sequence[Trajectory], tokenizer: Any, validate: bool) -> None:
        """Score made-up trajectories, as a test. Raises RewardUnavailable when one could not be scored."""
        score_trajectories(self._rule(validate), trajectories, tokenizer)
        failure = next((t.failure for t in trajectories if t.status is Status.FAILED), None)
        if failure is not None:
            raise RewardUnavailable(f"reward {name_of(self._rule(validate))}: {failure}")

    def score(self, trajectories: Sequence[Trajectory], validate: bool = False) -> list[Trajectory]:
        """Reward every trajectory that did not fail, and return these.

        One whose reward is not available becomes FAILED: masked and counted, never scored 0. Raises RolloutError when
        all have failed, or when more than `agent.max_failed_ratio` could not be scored.
        """
        scored = self.score_some(trajectories, validate)
        self.require_enough(trajectories)
        return scored

    def score_some(self, trajectories: Sequence[Trajectory], validate: bool = False) -> list[Trajectory]:
        """Reward a part of a step's trajectories, as `score` does; `require_enough` checks later whether too much has
        failed.
        """
        ahead = self._ahead.take(trajectories) if self._ahead else []
        known = {id(trajectory) for trajectory in ahead}
        others = [one for one in _unscored(trajectories) if id(one) not in known]
        score_trajectories(self._rule(validate), others, self.tokenizer)
        requested = [*ahead, *others]
        self._num_requested += len(requested)
        self._num_unavailable += sum(trajectory.status is Status.FAILED for trajectory in requested)
        return [trajectory for trajectory in trajectories if trajectory.status is not Status.FAILED]

    def score_ahead(self, trajectories: Sequence[Trajectory]) -> None:
        """Start to score trajectories for training, if the rule can do that while others are sampled; `score` and
        `score_some` wait for it.
        """
        if self._ahead:
            self._ahead.add(_unscored(trajectories))

    def can_score_now(self, trajectories: Sequence[Trajectory]) -> bool:
        """Whether `score_some` need not wait for what `score_ahead` has started."""
        return self._ahead is None or self._ahead.has_scored(trajectories)

    def begin(self, carried: Sequence[Trajectory] = ()) -> None:
        """Start a step, for which `carried` were completed before. Forgets what was scored for an abandoned step."""
        self._num_requested = self._num_unavailable = 0
        if self._ahead:
            self._ahead.forget(but=carried)

    def require_enough_so_far(self, least: int) -> None:
        """Check what was scored of a step that is not complete: raises RolloutError if too many of at least `least`
        trajectories could not be scored.
        """
        unavailable, requested = self._num_unavailable, self._num_requested
        if unavailable > self.max_failed_ratio * max(least, requested):
            raise RolloutError(
                f"{unavailable} of {requested} trajectories could not be scored so far, more than "
                f"agent.max_failed_ratio={self.max_failed_ratio:g} allows for {max(least, requested)}"
            )

    def require_enough(self, trajectories: Sequence[Trajectory]) -> None:
        """Check what was scored since the last call, for `trajectories`. Raises RolloutError as `score` does."""
        requested, unavailable = self._num_requested, self._num_unavailable
        self._num_requested = self._num_unavailable = 0
        self.stats = {"reward/unavailable_ratio": unavailable / max(1, requested)}
        failure = next((trajectory.failure for trajectory in trajectories if trajectory.status is Status.FAILED), None)
        # Without any reward there is nothing to train; if only some are missing, it depends on how many.
        if all(trajectory.status is Status.FAILED for trajectory in trajectories):
            raise RolloutError(f"all {len(trajectories)} trajectories failed: {failure}")
        if unavailable:
            log.warning("%d of %d trajectories could not be scored: %s", unavailable, requested, failure)
        if unavailable > self.max_failed_ratio * requested:
            raise RolloutError(
                f"{unavailable} of {requested} trajectories could not be scored, more than "
                f"agent.max_failed_ratio={self.max_failed_ratio}: {failure}"
            )

    def _scoring_ahead(self, config: Config) -> ScoringAhead | None:
        """The thread that scores beside sampling, if the rule allows it. None in a deterministic run: rules may draw
        random numbers, in the order of the groups.
        """
        if config.trainer.deterministic or not getattr(self.train, "scores_while_sampling", False):
            return None
        tokenizer = copy.deepcopy(self.tokenizer)  # one cannot tokenize prompts and decode in two threads
        return ScoringAhead(lambda trajectories: score_trajectories(self.train, trajectories, tokenizer))

    def _rule(self, validate: bool) -> Reward | BatchReward:
        return self.validation if validate else self.train


def _unscored(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    return [one for one in trajectories if one.status is not Status.FAILED and one.reward is None]


def make_reward(config: Config, name: str, kwargs: dict[str, Any]) -> Reward | BatchReward:
    """The rule with that dotted name. Raises ConfigError when there is none, or it does not accept the arguments."""
    rule = load_by_name(name, "reward.function")
    try:
        if callable(rule) and not isinstance(rule, type):
            return FunctionReward(rule, kwargs)
        reward: Any = rule.from_config(config, **kwargs) if hasattr(rule, "from_config") else rule(**kwargs)
    except (TypeError, ValueError, ConfigError) as error:
        raise ConfigError(f"reward.function={name} with {mask_secrets(kwargs)}: {error}") from error
    if not isinstance(reward, Reward | BatchReward):
        raise ConfigError(f"reward.function={name}: {dotted_name(reward)} has no method score(trajectory, tokenizer)")
    return reward


def name_of(rule: Reward | BatchReward) -> str:
    """The dotted name by which a config finds the rule."""
    return dotted_name(rule.function if isinstance(rule, FunctionReward) else rule)


def score_trajectories(
    rule: Reward | BatchReward, trajectories: Sequence[Trajectory], tokenizer: Any
) -> list[Trajectory]:
    """Set reward and components of each trajectory; returns those that have them, the others are FAILED.

    Raises RewardError, naming the rule and the row, when the rule raises or returns something that is not a score.
    """
    for trajectory, given in zip(trajectories, _score_each(rule, trajectories, tokenizer), strict=True):
        # A reward that is not available says nothing about the answer: it must not become a score of 0.
        if isinstance(given, RewardUnavailable):
            trajectory.status, trajectory.failure = Status.FAILED, str(given)
            continue
        try:
            score = read_score(given)
            trajectory.turn_rewards = _turn_rewards(trajectory, score.turns)
        except ValueError as error:
            raise RewardError(f"reward {name_of(rule)} {error}; for {_place(trajectory.prompt)}") from error
        trajectory.reward_components = score.components
        trajectory.reward = score.number + sum(trajectory.turn_rewards)
    return [trajectory for trajectory in trajectories if trajectory.status is not Status.FAILED]


def _turn_rewards(trajectory: Trajectory, given: Mapping[int, float]) -> tuple[float, ...]:
    """The reward of each turn: what the rule has `given` it, and the `turn_reward` of the environment's event.

    () if none has any. Raises ValueError for a turn that is not there, and for a value that is no number.
    """
    rewards = [0.0] * trajectory.num_turns
    of_environment = {
        k: read_number(event["turn_reward"]) for k, event in enumerate(trajectory.events) if "turn_reward" in event
    }
    for turns in (given, of_environment):
        for turn, value in turns.items():
            if turn >= len(rewards):
                raise ValueError(f"gave turn {turn} a reward; its {len(rewards)} turns are counted from 0")
            rewards[turn] += value
    return tuple(rewards) if given or of_environment else ()


def _score_each(rule: Reward | BatchReward, trajectories: Sequence[Trajectory], tokenizer: Any) -> list[Any]:
    """The score of each trajectory in some form, or a RewardUnavailable."""
    if not isinstance(rule, BatchReward):
        return [_score_one(rule, trajectory, tokenizer) for trajectory in trajectories]
    if not trajectories:
        return []
    try:
        with _errors_named(rule, f"{len(trajectories)} trajectories, the first of {_place(trajectories[0].prompt)}"):
            given = rule.score_all(trajectories, tokenizer)
    except RewardUnavailable as error:
        return [error] * len(trajectories)
    # A rule may be the user's own code, so what it returns is checked before it is paired with the trajectories.
    try:
        scores = list(given)
    except TypeError as error:
        raise RewardError(f"reward {name_of(rule)} gave {given!r}, which is not a list of scores") from error
    if len(scores) != len(trajectories):
        raise RewardError(f"reward {name_of(rule)} gave {len(scores)} scores for {len(trajectories)} trajectories")
    return scores


def _score_one(rule: Reward, trajectory: Trajectory, tokenizer: Any) -> Any:
    try:
        with _errors_named(rule, _place(trajectory.prompt)):
            return rule.score(trajectory, tokenizer)
    except RewardUnavailable as error:
        return error


@contextmanager
def _errors_named(rule: Reward | BatchReward, of: str) -> Iterator[None]:
    """Context that raises RewardError for an error of the rule's own code, with its name and what it was scoring."""
    try:
        yield
    except VerlError:
        raise
    except Exception as error:
        raise RewardError(
            f"reward {name_of(rule)} raised {in_words(error)}; for {of}. Where a service did not answer, raise "
            "verl.errors.RewardUnavailable, which masks the trajectory"
        ) from error


def _place(prompt: Prompt) -> str:
    """The prompt's row in words, as far as it is known."""
    index, question = (prompt.row.get("extra_info") or {}).get("index"), question_of(prompt.row)
    parts = [f"data_source {prompt.data_source!r}"]
    parts += [] if index is None else [f"index {index}"]
    return ", ".join(parts + ([] if question is None else [f"question {question!r}"]))


# A reward that is a plain function, as users of verl write it.


class FunctionReward:
    """The reward `compute_score(data_source, solution_str, ground_truth, extra_info)`, with `kwargs` by their names.

    `solution_str` is what the policy wrote, its turns one after the other without EOS: no prompt, and nothing that the
    environment answered. The others are the row's `data_source`, `reward_model.ground_truth` and `extra_info`.
    """

    def __init__(self, function: Callable[..., Any], kwargs: dict[str, Any]) -> None:
        """A reward that calls `function`. Raises `ConfigError` for one that cannot be called so."""
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
