"""Rollouts as one sequence and as several: cut behind a reply, the next sequence repeating all before it as context."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from verl.protocol import Prompt, Segment, Source, Status, TrainBatch, Trajectory

VOCABULARY = 61
RANDOM_COLUMNS = ("old_log_probs", "ref_log_probs", "values", "returns", "advantages", "correction")


def rollouts(turns: Sequence[int], group_size: int = 2, seed: int = 0) -> list[Trajectory]:
    """A rollout for each of `turns`, its number of policy turns with a reply between two; groups share a prompt."""
    draw = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int) -> tuple[int, ...]:
        length = int(torch.randint(low, high, (1,), generator=draw))
        return tuple(torch.randint(0, VOCABULARY, (length,), generator=draw).tolist())

    made: list[Trajectory] = []
    prompt: tuple[int, ...] = ()
    for number, num_turns in enumerate(turns):
        prompt = prompt if number % group_size else ids(3, 8)
        segments = [Segment(Source.PROMPT, prompt)]
        for turn in range(num_turns):
            sampled = ids(1, 6)
            log_probs = (-4.0 + torch.randn(len(sampled), generator=draw)).tolist()
            segments += [Segment(Source.ENVIRONMENT, ids(2, 6))] * (turn > 0)
            segments += [Segment(Source.POLICY, sampled, tuple(log_probs), ((0, len(sampled)),))]
        one = Trajectory(str(number // group_size), Prompt(prompt, "test", {}), segments, Status.ANSWERED, num_turns)
        one.reward = float(torch.randint(0, 4, (1,), generator=draw)) / 4
        if number % 3 == 0:  # a part of it is that of turns
            one.turn_rewards = tuple((turn % 3 - 1) / 8 for turn in range(num_turns))
        made.append(one)
    return made


def cut(whole: Trajectory, behind: Collection[int]) -> Trajectory:
    """`whole` with a further sequence behind each reply whose number, from 0, is in `behind`."""
    segments: list[Segment] = []
    seen: tuple[int, ...] = ()
    reply = 0
    for segment in whole.segments:
        segments.append(segment)
        seen += segment.ids
        if segment.source is Source.ENVIRONMENT:
            segments += [Segment(Source.CONTEXT, seen)] * (reply in behind)
            reply += 1
    return replace(whole, segments=segments)


def written(trajectories: Sequence[Trajectory]) -> torch.Tensor:
    """[T] bool: the tokens that are no context, which both forms have in the same order."""
    segments = [segment for one in trajectories for segment in one.segments]
    return torch.tensor([segment.source is not Source.CONTEXT for segment in segments for _ in segment.ids])


def batch_of(trajectories: Sequence[Trajectory], seed: int = 0) -> TrainBatch:
    """Their batch, with the values that passes before an update give: the same numbers for the same written tokens,
    NaN at context.
    """
    batch, written_T = TrainBatch.from_trajectories(trajectories), written(trajectories)
    draw = torch.Generator().manual_seed(seed)
    for name in RANDOM_COLUMNS:
        value_T = torch.full((len(written_T),), torch.nan)
        value_T[written_T] = torch.randn(int(written_T.sum()), generator=draw) - (4.0 if "log_probs" in name else 0.0)
        batch.tokens[name] = value_T
    batch.tokens["correction"] = batch.tokens["correction"].exp()
    return batch
