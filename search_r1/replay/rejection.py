"""Rejection sampling: which trajectories are good enough to train on, and their rows for `verl.trainer.sft`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from search_r1.replay.rescoring import Stored
from verl.protocol import Source, Status, Trajectory

_Text = tuple[str, tuple[tuple[int, ...], ...]]  # a response, and the ids of the contexts of its further sequences


@dataclass(frozen=True)
class Criteria:
    """Which trajectories are kept. `per_prompt`: most trajectories of a prompt, with distinct texts.

    `dedupe`: distinct texts only.
    """

    min_reward: float = 1.0
    per_prompt: int | None = None
    dedupe: bool = False


@dataclass(frozen=True)
class Choice:
    """`kept`: row numbers by prompt, the best of a prompt first. `dropped`: the number dropped for each reason."""

    kept: list[int]
    dropped: Counter[str]


def choose(stored: Stored, criteria: Criteria) -> Choice:
    """The trajectories that ended with an answer and have the required reward, within the limits per prompt.

    A prompt is identified by data source and prompt ids, so a question sampled in several steps counts as one. The best
    trajectory has the highest reward, then the fewest searches, then the fewest tokens, then comes first.
    """
    # Group the good ones by prompt.
    dropped: Counter[str] = Counter()
    prompts: dict[Any, list[int]] = {}
    for row, trajectory in enumerate(stored.trajectories):
        reason = _not_good_enough(trajectory, criteria.min_reward)
        if reason is not None:
            dropped[reason] += 1
            continue
        prompts.setdefault((trajectory.prompt.data_source, trajectory.prompt.ids), []).append(row)
    # Keep the best of each prompt, within the limits.
    contexts = [tuple(s.ids for s in one.segments if s.source is Source.CONTEXT) for one in stored.trajectories]
    texts = list(zip(stored.table["response_text"].to_pylist(), contexts, strict=True))
    kept: list[int] = []
    for rows in prompts.values():
        best_first = sorted(rows, key=lambda row: _rank(stored.trajectories[row]))
        kept += _within_limits(best_first, texts, criteria, dropped)
    return Choice(kept, dropped)


def sft_table(stored: Stored, rows: Sequence[int], text_only: bool) -> pa.Table:
    """Rows of `segments` list<struct<source, text, ids>> (no ids with `text_only`), `data_source` and `reward`.

    The ids are the sampled ones; the text is the stored one. A row is a sequence: a trajectory has one for each of its
    sequences in which the policy wrote something, so each sampled token is in one row.
    """
    fields = [("source", pa.string()), ("text", pa.string())]
    if not text_only:
        fields.append(("ids", pa.list_(pa.int32())))
    texts = stored.segment_texts()
    segments, trajectories = [], []
    for row in rows:
        # Of several sequences, one in which the policy wrote nothing has nothing to train on. Its texts are read
        # all the same, as `own_texts` goes through all sequences of the trajectory.
        trajectory, own_texts = stored.trajectories[row], iter(texts[row])
        sequences = trajectory.sequences
        for sequence in sequences:
            values = [{"source": one.source.value, "text": next(own_texts), "ids": one.ids} for one in sequence]
            if len(sequences) == 1 or any(one.source is Source.POLICY and one.ids for one in sequence):
                segments.append(values)
                trajectories.append(trajectory)
    # With `text_only`, the type has no field for the ids, and pyarrow leaves them out.
    columns = {
        "segments": pa.array(segments, pa.list_(pa.struct(fields))),
        "data_source": pa.array([one.prompt.data_source for one in trajectories], pa.string()),
        "reward": pa.array([one.reward for one in trajectories], pa.float64()),
    }
    return pa.table(columns)


def _not_good_enough(trajectory: Trajectory, min_reward: float) -> str | None:
    if trajectory.status is not Status.ANSWERED:
        return f"status {trajectory.status or 'unknown'}"
    if trajectory.reward is None:
        return "no reward"
    return None if trajectory.reward >= min_reward else f"reward below {min_reward:g}"


def _rank(trajectory: Trajectory) -> tuple[float, int, int]:
    assert trajectory.reward is not None
    return -trajectory.reward, trajectory.num_searches, trajectory.num_response_tokens


def _within_limits(rows: list[int], texts: list[_Text], criteria: Criteria, dropped: Counter[str]) -> list[int]:
    kept: list[int] = []
    seen: set[_Text] = set()
    for row in rows:
        if (criteria.dedupe or criteria.per_prompt is not None) and texts[row] in seen:
            dropped["same text as a kept one of its prompt"] += 1
        elif criteria.per_prompt is not None and len(kept) == criteria.per_prompt:
            dropped[f"more than {criteria.per_prompt} of its prompt"] += 1
        else:
            kept.append(row)
            seen.add(texts[row])
    return kept
