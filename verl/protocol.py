"""What flows through the trainer: segments, trajectories, and the flat batch that losses are computed on.

A trajectory is one rollout. As a rule the policy sees it as one sequence, to which everything is appended; where a
context was replaced (shortened, rendered anew, a sub-agent's own), a further sequence begins. A sampled token is
trained once, in the sequence in which it was sampled; what a further sequence begins with is context there.

Tensor names end in their shape: `B` rows (sequences), `R` rollouts, `T` tokens of all rows, concatenated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from verl.columns import Columns

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch


class Source(StrEnum):
    """Who wrote a segment. Only `POLICY` tokens are ever trained on.

    A `CONTEXT` segment begins a further sequence: all that the policy sees before its next turn, whoever wrote it.
    """

    PROMPT = "prompt"
    POLICY = "policy"
    ENVIRONMENT = "environment"
    CONTEXT = "context"


class Status(StrEnum):
    """How a trajectory ended. `FAILED` means an infrastructure failure: never rewarded, never trained on."""

    ANSWERED = "answered"
    TURN_LIMIT = "turn_limit"
    LENGTH_LIMIT = "length_limit"
    FAILED = "failed"


_WRITTEN = (Source.POLICY, Source.ENVIRONMENT)


@dataclass(frozen=True)
class Segment:
    """A run of token ids from one source (for the policy, one turn), with the sampler's log-prob of each id.

    `weight_versions` says which weights sampled a turn, as (version, number of ids) in order: one pair, or several if
    the turn was interrupted and resumed under newer weights. Empty if unknown.
    """

    source: Source
    ids: tuple[int, ...]
    log_probs: tuple[float, ...] | None = None
    weight_versions: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if (self.source is Source.POLICY) != (self.log_probs is not None):
            raise ValueError(f"a {self.source} segment {'needs' if self.log_probs is None else 'has no'} log-probs")
        if self.log_probs is not None and len(self.log_probs) != len(self.ids):
            raise ValueError(f"{len(self.ids)} ids but {len(self.log_probs)} log-probs")
        if self.weight_versions and sum(number for _, number in self.weight_versions) != len(self.ids):
            raise ValueError(f"{len(self.ids)} ids but weight versions of {self.weight_versions}")

    def extended(self, further: Segment) -> Segment:
        """This turn followed by `further`, its continuation that was sampled later."""
        log_probs = (*(self.log_probs or ()), *(further.log_probs or ()))
        versions = (*self.weight_versions, *further.weight_versions)
        return Segment(self.source, (*self.ids, *further.ids), log_probs, versions)


@dataclass
class Prompt:
    """One question from a dataset row, ready for sampling.

    `ids` is the tokenised prompt; `row` is the dataset row (plain Python values) that environment and reward may read.
    `index` is its position in its `PromptSource`; `messages` are those that `ids` were made of, if it is known.
    """

    ids: tuple[int, ...]
    data_source: str
    row: dict[str, Any]
    index: int | None = None
    messages: Sequence[Mapping[str, Any]] = ()


@dataclass
class Trajectory:
    """An append-only record of one episode, in one or more sequences.

    What a loss sees is exactly what the policy saw: the ids of each sequence, as sampled. `ids`, `loss_mask` and
    `log_probs` are those of all sequences, one after the other.
    """

    group_id: str
    prompt: Prompt
    segments: list[Segment] = field(default_factory=list)
    status: Status | None = None
    num_turns: int = 0  # policy turns so far, each a segment
    num_valid_actions: int = 0
    num_searches: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)  # what the environment did, one entry a turn
    failure: str | None = None
    reward: float | None = None
    reward_components: dict[str, float] = field(default_factory=dict)
    weight_version: int = 0  # the newest version of the weights that sampled it; `Segment` has them all
    open_turn: str | None = None  # see `verl.agent.episode`; None between two turns and at the end
    episode_key: str | None = None  # of an interrupted episode with state; see `verl.agent.pause`
    turn_rewards: tuple[float, ...] = ()  # the part of `reward` that each turn was given; () if it is all the whole's

    @property
    def sequences(self) -> list[list[Segment]]:
        """The segments of each sequence; the first begins with the prompt, a further one with its `CONTEXT`."""
        sequences: list[list[Segment]] = [[]]
        for segment in self.segments:
            if segment.source is Source.CONTEXT and sequences[-1]:
                sequences.append([])
            sequences[-1].append(segment)
        return sequences

    @property
    def ids(self) -> list[int]:
        return [token for segment in self.segments for token in segment.ids]

    @property
    def loss_mask(self) -> list[bool]:
        """True at policy tokens, False elsewhere."""
        return [segment.source is Source.POLICY for segment in self.segments for _ in segment.ids]

    @property
    def summary_mask(self) -> list[bool]:
        """True at the policy's tokens of summaries, False elsewhere."""
        turns = turns_of_segments([segment.source for segment in self.segments], self.events)
        summaries = [
            segment.source is Source.POLICY and bool(self.events[turn].get(IS_SUMMARY))
            for segment, turn in zip(self.segments, turns, strict=True)
        ]
        return [of_one for segment, of_one in zip(self.segments, summaries, strict=True) for _ in segment.ids]

    @property
    def log_probs(self) -> list[float]:
        """The sampler's log-prob at policy tokens, 0 elsewhere."""
        return [value for segment in self.segments for value in (segment.log_probs or (0.0,) * len(segment.ids))]

    @property
    def weight_versions(self) -> tuple[tuple[int, int], ...]:
        """(version, number of ids) for all policy segments; see `Segment`."""
        return tuple(pair for segment in self.segments for pair in segment.weight_versions)

    @property
    def num_tokens(self) -> int:
        return sum(len(segment.ids) for segment in self.segments)

    @property
    def num_response_tokens(self) -> int:
        """The number of tokens that policy and environment wrote; the context of a further sequence is neither's."""
        return sum(len(segment.ids) for segment in self.segments if segment.source in _WRITTEN)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(segment.ids) for segment in self.segments if segment.source is Source.PROMPT)

    @property
    def num_policy_tokens(self) -> int:
        return sum(len(segment.ids) for segment in self.segments if segment.source is Source.POLICY)


def was_search(event: Mapping[str, Any]) -> bool:
    """Whether a turn's event records a search that was executed: it has a `query`, and not `executed: False`."""
    return event.get("query") is not None and event.get("executed") is not False


WAITING = "reply_after_summary"
"""In the event of a turn whose reply was held back for a summary: the reply as text."""
IS_SUMMARY = "is_summary"
"""In the event of a turn that is a summary: True."""


def searches_of(event: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The executed searches of a turn: the events of its tool calls that were one, or without calls, its own event."""
    if event.get("calls"):
        return [call for call in event["calls"] if was_search(call)]
    return [event] if was_search(event) else []


def queries_of(event: Mapping[str, Any]) -> list[str]:
    """The queries of a turn's executed searches: of a tool call, there may be several (`queries`)."""
    return [str(query) for search in searches_of(event) for query in search.get("queries") or [search["query"]]]


def call_status(call: Mapping[str, Any]) -> str:
    """How a tool call of a chat turn's event ended: as it was run, or what was wrong with it as it was written, or
    "not_run" for one that came when no tool could be used any more."""
    written = str(call["parsed"])
    return str(call.get("status") or ("not_run" if written == "ok" else written))


def by_number(data_source: str) -> list[tuple[str, int]]:
    """A key that sorts data sources as people read them: `2hop` before `10hop`."""
    return [(text, int(number or -1)) for text, number in re.findall(r"(\D*)(\d*)", data_source)]


class FlatTokens(NamedTuple):
    """The tokens of several trajectories, concatenated; the fields are those of `Trajectory`.

    `lengths_B` are those of the sequences, `rollout_B` says which trajectory each is of.
    """

    ids_T: npt.NDArray[np.int64]
    loss_mask_T: npt.NDArray[np.bool_]
    log_probs_T: npt.NDArray[np.float32]
    lengths_B: npt.NDArray[np.int64]
    rollout_B: npt.NDArray[np.int64]

    def lengths_R(self) -> npt.NDArray[np.int64]:  # noqa: N802  the shape
        """The number of tokens of each trajectory."""
        import numpy as np

        return np.bincount(self.rollout_B, self.lengths_B).astype(np.int64)


def flat_tokens(trajectories: Sequence[Trajectory]) -> FlatTokens:
    """The tokens of `trajectories`, concatenated. Raises OverflowError for an id that does not fit in 64 bits."""
    import numpy as np

    segments = [segment for trajectory in trajectories for segment in trajectory.segments]
    length_S = np.array([len(segment.ids) for segment in segments], np.int64)
    mask_T = np.array([segment.source is Source.POLICY for segment in segments], np.bool_).repeat(length_S)
    ids = chain.from_iterable(segment.ids for segment in segments)
    # Only the policy's segments have log-probs: they fill the places of the mask, in order.
    sampled = chain.from_iterable(segment.log_probs or () for segment in segments)
    log_probs_T = np.zeros(len(mask_T), np.float32)
    log_probs_T[mask_T] = np.fromiter(sampled, np.float32, int(mask_T.sum()))
    # A batch has a row for each sequence, and a trajectory may have several.
    sequences = [(row, one) for row, trajectory in enumerate(trajectories) for one in trajectory.sequences]
    lengths_B = np.array([sum(len(segment.ids) for segment in one) for _, one in sequences], np.int64)
    rollout_B = np.array([row for row, _ in sequences], np.int64)
    return FlatTokens(np.fromiter(ids, np.int64, len(mask_T)), mask_T, log_probs_T, lengths_B, rollout_B)


@dataclass
class TrainBatch:
    """Rows of different lengths, stored without padding: the sequences of rollouts, those of one next to each other.

    `tokens[name]` is [T] (or [T, ...]): the tokens of all rows, concatenated. `rows[name]` is [B]. `verl.columns`
    defines each column and checks it when it is set. Always present: `tokens["ids"]` int64 and `tokens["loss_mask"]`
    bool. A per-token value at position t belongs to token t (its log-prob given the tokens before it in the same row);
    at a row's first token it is 0 and masked. `rows["rollout"]` says which rows are one rollout; without that column
    each row is one. A column of rows that belongs to rollouts, such as the reward, is the same in all of its rows.

    Its methods import torch when they are called, so programs that only play episodes start without waiting for it.
    """

    lengths_B: torch.Tensor
    tokens: dict[str, torch.Tensor]
    rows: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ValueError for an unknown column, or one with a wrong type or length."""
        self.tokens = Columns("tokens", int(self.lengths_B.sum()), self.tokens)
        self.rows = Columns("rows", len(self.lengths_B), self.rows)

    @classmethod
    def from_trajectories(cls, trajectories: Sequence[Trajectory]) -> TrainBatch:
        """The batch of their sequences, with `rollout_log_probs` [T] float32, `turn` [T] int32, `rollout` [B] and the
        columns of `reward_rows`; if a turn has a reward of its own, also with `turn_rewards` [T] float32, at its last
        token.
        """
        import torch

        flat = flat_tokens(trajectories)
        tokens = {"ids": flat.ids_T, "loss_mask": flat.loss_mask_T, "rollout_log_probs": flat.log_probs_T}
        tokens["turn"] = _turns(trajectories)
        if any(trajectory.turn_rewards for trajectory in trajectories):
            tokens["turn_rewards"] = _turn_rewards(trajectories)
        # What belongs to a trajectory is repeated for each of its sequences.
        rollout_B = torch.from_numpy(flat.rollout_B)
        return cls(
            torch.from_numpy(flat.lengths_B),
            {name: torch.from_numpy(value_T) for name, value_T in tokens.items()},
            {name: value_R[rollout_B] for name, value_R in reward_rows(trajectories).items()} | {"rollout": rollout_B},
        )

    def __len__(self) -> int:
        return len(self.lengths_B)

    @property
    def row_of_token_T(self) -> torch.Tensor:
        """[T] int64: which row a token belongs to."""
        import torch

        return torch.repeat_interleave(torch.arange(len(self)), self.lengths_B)

    @property
    def rollout_B(self) -> torch.Tensor:
        """[B] int64: which rollout a row is a sequence of, from 0, in the order of the column `rollout`."""
        import torch

        if "rollout" not in self.rows:
            return torch.arange(len(self))
        rollout_B: torch.Tensor = self.rows["rollout"].unique(return_inverse=True)[1]
        return rollout_B

    @property
    def num_rollouts(self) -> int:
        return int(self.rollout_B.max()) + 1 if len(self) else 0

    @property
    def rollout_of_token_T(self) -> torch.Tensor:
        """[T] int64: which rollout a token belongs to, as in `rollout_B`."""
        return self.rollout_B.repeat_interleave(self.lengths_B)

    def of_rollouts(self, value_B: torch.Tensor) -> torch.Tensor:
        """[R]: the value of each rollout, from a column of rows that is the same in all rows of a rollout."""
        value_R = value_B.new_zeros(self.num_rollouts)
        value_R[self.rollout_B] = value_B
        return value_R

    @property
    def turn_of_token_T(self) -> torch.Tensor:
        """[T] int64: at policy tokens, which turn of its rollout it belongs to, from 0: the column `turn`, whatever the
        loss mask leaves out. Without that column, which run of the loss mask's tokens; 0 elsewhere.
        """
        import torch

        if "turn" in self.tokens:
            return self.tokens["turn"].long()
        # Without the column a turn starts where a policy token does not follow another one of the same row.
        mask_T = self.tokens["loss_mask"]
        policy_N = mask_T.nonzero().squeeze(-1)
        row_N, rollout_N = self.row_of_token_T[policy_N], self.rollout_of_token_T[policy_N]
        start_N = torch.ones_like(policy_N, dtype=torch.bool)
        start_N[1:] = (policy_N[1:] != policy_N[:-1] + 1) | (row_N[1:] != row_N[:-1])
        # Starts are counted through the whole batch; without those of earlier rollouts, each rollout begins at 0.
        starts_R = torch.bincount(rollout_N[start_N], minlength=self.num_rollouts)
        before_R = starts_R.cumsum(0) - starts_R
        turn_T = torch.zeros(len(mask_T), dtype=torch.int64)
        turn_T[policy_N] = start_N.cumsum(0) - 1 - before_R[rollout_N]
        return turn_T

    def select(self, row_indices: Sequence[int] | torch.Tensor) -> TrainBatch:
        """A batch of the given rows, in the given order."""
        import torch

        index_B = torch.as_tensor(row_indices, dtype=torch.int64)
        index_T = flat_positions(self.lengths_B, index_B)
        return TrainBatch(
            self.lengths_B[index_B],
            {name: value[index_T] for name, value in self.tokens.items()},
            {name: value[index_B] for name, value in self.rows.items()},
        )

    def padded(self, name: str, value: float = 0) -> torch.Tensor:
        """[B, longest] copy of `tokens[name]`, right-padded with `value`."""
        import torch

        return torch.nn.utils.rnn.pad_sequence(
            list(self.tokens[name].split(self.lengths_B.tolist())), batch_first=True, padding_value=value
        )


def flat_positions(lengths_B: torch.Tensor, rows: Sequence[int] | torch.Tensor) -> torch.Tensor:
    """[T'] int64: the positions of the tokens of `rows`, row by row, in the whole concatenated batch."""
    import torch

    index_B = torch.as_tensor(rows, dtype=torch.int64)
    own_lengths_B = lengths_B[index_B]
    shift_B = (lengths_B.cumsum(0) - lengths_B)[index_B] - (own_lengths_B.cumsum(0) - own_lengths_B)
    return torch.arange(int(own_lengths_B.sum())) + shift_B.repeat_interleave(own_lengths_B)


def _turns(trajectories: Sequence[Trajectory]) -> npt.NDArray[np.int32]:
    """[T]: at policy tokens the number of their segment among those of the trajectory that have tokens; 0 elsewhere.

    Segments tell turns apart that no token lies between: the policy may have been answered with nothing.
    """
    import numpy as np

    lengths, numbers = list[int](), list[int]()
    for trajectory in trajectories:
        num_turns = 0
        for segment in trajectory.segments:
            is_turn = segment.source is Source.POLICY and len(segment.ids) > 0
            lengths.append(len(segment.ids))
            numbers.append(num_turns if is_turn else 0)
            num_turns += is_turn
    return np.array(numbers, np.int32).repeat(np.array(lengths, np.int64))


def _turn_rewards(trajectories: Sequence[Trajectory]) -> npt.NDArray[np.float32]:
    import numpy as np

    parts = []
    for trajectory in trajectories:
        turns = turns_of_segments([segment.source for segment in trajectory.segments], trajectory.events)
        for segment, turn in zip(trajectory.segments, turns, strict=True):
            value_T = np.zeros(len(segment.ids), np.float32)
            if segment.source is Source.POLICY and turn < len(trajectory.turn_rewards):
                value_T[-1:] = trajectory.turn_rewards[turn]
            parts.append(value_T)
    return np.concatenate(parts)


def turns_of_segments(sources: Iterable[Source | str], events: Sequence[Mapping[str, Any]]) -> Iterator[int]:
    """For each segment the turn that it is of, from 0; -1 before the first one. `events` are those of the turns.

    A turn in which no token was sampled has no segment, but may have a reply, or if it is a summary, the context that
    follows it. A context is part of no turn, and what follows it answers none before it.
    """
    turn, answered = -1, True
    for source in sources:
        if source == Source.POLICY or (source == Source.ENVIRONMENT and answered):
            turn += 1
        elif source == Source.CONTEXT and answered and 0 <= turn < len(events) and WAITING in events[turn]:
            turn += 1  # an empty summary
        answered = source in (Source.ENVIRONMENT, Source.CONTEXT) or (answered and source == Source.PROMPT)
        yield turn


def reward_rows(trajectories: Sequence[Trajectory]) -> dict[str, torch.Tensor]:
    """Of each trajectory: `reward` [R] float32, `group` [R] int64 (0.. in order of first use)."""
    import torch

    groups: dict[str, int] = {}
    group_R = [groups.setdefault(trajectory.group_id, len(groups)) for trajectory in trajectories]
    return {
        "reward": torch.tensor([trajectory.reward for trajectory in trajectories], dtype=torch.float32),
        "group": torch.tensor(group_R, dtype=torch.int64),
    }
