"""Rollouts of several sequences, made from those of one."""

from __future__ import annotations

import copy

from verl.protocol import Segment, Source, Trajectory


def in_sequences(whole: Trajectory, *begins: int, moves_replies: bool = False) -> Trajectory:
    """`whole` cut before the segments with the numbers `begins`: a further sequence repeats all before it as context.

    `moves_replies`: the environment's reply before a cut is in that context alone.
    """
    cut, segments = copy.deepcopy(whole), whole.segments
    cut.segments = []
    for number, segment in enumerate(segments):
        if number in begins:
            if moves_replies and segments[number - 1].source is Source.ENVIRONMENT:
                cut.segments.pop()
            cut.segments.append(Segment(Source.CONTEXT, tuple(token for one in segments[:number] for token in one.ids)))
        cut.segments.append(segment)
    return cut
