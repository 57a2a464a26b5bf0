"""Which weights travel together, and where they lie in their bucket."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from verl.errors import WeightSyncError
from verl.rollout.weight_stream import ExportCall, stream_buckets
from verl.weight_sync.buckets import ExportedWeights, merge_exports, places_of, plan_buckets
from verl.weight_sync.memory import room_for


def test_buckets_by_hand() -> None:
    """Of 1 MiB in bfloat16, which is 8 x 256 x 256 values."""
    square, norm = torch.empty(256, 256), torch.empty(256)
    named = {
        "embed.weight": torch.empty(16 * 256, 256),  # larger than a bucket
        "layers.0.norm.weight": norm,
        **{f"layers.0.attn.{part}.weight": square for part in "qkvo"},
        **{f"layers.0.mlp.{part}.weight": torch.empty(2 * 256, 256) for part in ("gate", "up")},  # 4 + 4: one too many
        "layers.1.count": torch.zeros(2**17, dtype=torch.int64),  # 1 MiB, not cast
        **{f"layers.1.mlp.{part}.weight": torch.empty(5 * 256, 256) for part in ("gate", "up")},  # too large for one
        "norm.weight": norm,
    }
    assert plan_buckets(named.items(), torch.bfloat16, 1) == [
        ["embed.weight"],
        ["layers.0.norm.weight", *(f"layers.0.attn.{part}.weight" for part in "qkvo")],
        ["layers.0.mlp.gate.weight", "layers.0.mlp.up.weight"],
        ["layers.1.count"],
        ["layers.1.mlp.gate.weight"],
        ["layers.1.mlp.up.weight", "norm.weight"],
    ]
    assert plan_buckets(named.items(), torch.bfloat16, 512) == [list(named)]


def test_places_by_hand() -> None:
    """Each begins at a multiple of 64 bytes; what is not a floating-point number keeps its format."""
    named = {"odd": torch.empty(7, 5), "count": torch.zeros(3, dtype=torch.int64), "norm": torch.empty(32)}
    places = places_of(named.items(), torch.bfloat16)
    assert [(place.name, place.dtype, tuple(place.shape), place.start) for place in places] == [
        ("odd", torch.bfloat16, (7, 5), 0),  # 70 bytes
        ("count", torch.int64, (3,), 128),
        ("norm", torch.bfloat16, (32,), 192),
    ]
    assert places[-1].end == 256


@pytest.mark.parametrize(
    ("sizes", "room"),
    [([30], 30), ([50, 60], 110), ([100, 100, 100], 200), ([100, 180, 10], 190), ([500, 90, 80, 100], 500)],
)
def test_there_is_room_for_two_buckets_and_for_the_largest_weight(sizes: list[int], room: int) -> None:
    """Buckets of 100. One of a larger weight has what is there to itself, unless its neighbour is small."""
    assert room_for(sizes, 100) == room


def test_what_the_ranks_export_is_one_bucket_of_one_version() -> None:
    """Its checksums are added up. A rank that is a step or a bucket behind is an error, not a mixture of weights."""
    first = ExportedWeights({"a": b"1"}, version=3, sums={"w": 2**64 - 1, "v": 5}, index=1, count=4)
    second = ExportedWeights({"b": b"2"}, version=3, sums={"w": 3}, index=1, count=4)
    merged = merge_exports([first, second])
    assert merged.exports == {"a": b"1", "b": b"2"} and merged.sums == {"w": 2, "v": 5}
    assert (merged.version, merged.index, merged.count) == (3, 1, 4)
    for behind in (replace(second, version=2), replace(second, index=0), replace(second, count=5)):
        with pytest.raises(WeightSyncError, match="version 3 bucket 2 of 4, version . bucket . of ."):
            merge_exports([first, behind])


@pytest.mark.parametrize("next_fits", [True, False])
def test_a_bucket_is_exported_while_the_one_before_it_is_read_if_there_is_room(next_fits: bool) -> None:
    calls: list[str] = []

    def export(index: int) -> ExportCall:
        calls.append(f"begin {index}")
        return lambda: [ExportedWeights({}, 1, {}, index, 3, next_fits and index < 2)]

    for bucket in stream_buckets(export):
        calls.append(f"read {bucket.index}")
    in_turns = ["begin 0", "read 0", "begin 1", "read 1", "begin 2", "read 2"]
    assert calls == (["begin 0", "begin 1", "read 0", "begin 2", "read 1", "read 2"] if next_fits else in_turns)


def test_parts_of_a_bucket_are_one_bucket_with_added_sums() -> None:
    first = ExportedWeights({"GPU-a": b"1"}, 5, {"w": 2**64 - 1, "v": 1}, 0, 2)
    second = ExportedWeights({"GPU-b": b"2"}, 5, {"w": 3, "v": 0}, 0, 2)
    [merged, *_] = stream_buckets(lambda index: lambda: [first, second])
    assert merged == ExportedWeights({"GPU-a": b"1", "GPU-b": b"2"}, 5, {"w": 2, "v": 1}, 0, 2)
