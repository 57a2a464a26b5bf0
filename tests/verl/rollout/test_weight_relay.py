"""Weights laid out on a host where nothing trains, as the trainer's host has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from weight_source import stream_of

from verl.errors import WeightSyncError
from verl.rollout.weight_stream import RelayReceiver
from verl.weight_sync import memory as weight_memory
from verl.weight_sync.memory import Located, memory_of, open_shared

WEIGHTS = [("a", torch.arange(70.0)), ("b", torch.randn(300, 200)), ("c", torch.randn(7, 3)), ("d", torch.randn(90))]


def test_every_bucket_is_there_while_it_is_read(weight_dir: Path) -> None:
    """They differ in size, so that the room has to grow, and lie at different places in the trainer's memory."""
    receiver, found = RelayReceiver(), {}
    for bucket in stream_of(WEIGHTS, 1, weight_dir, bucket_mib=0.1).buckets:
        [packed] = bucket.exports.values()
        located = Located.unpacked(packed)
        sent = memory_of(located)[located.offset :][: located.places[-1].end].numpy()
        answer = receiver.write(sent, dict(bucket.exports))
        assert Located.unpacked(answer).path != located.path
        found |= {name: tensor.clone() for name, tensor in open_shared(answer).items()}
    receiver.close()
    assert found.keys() == dict(WEIGHTS).keys()
    assert all(found[name].equal(tensor) for name, tensor in WEIGHTS)


def test_a_host_without_room(weight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    [bucket, *_] = stream_of(WEIGHTS, 1, weight_dir).buckets
    receiver = RelayReceiver()
    monkeypatch.setattr(weight_memory.os, "posix_fallocate", full)
    with pytest.raises(WeightSyncError, match="no room for .* No space left on device; free it or remount it larger"):
        receiver.write(torch.zeros(300000, dtype=torch.uint8).numpy(), dict(bucket.exports))
    receiver.close()
