"""Weights that a sampler reads on the trainer's own device: what can be run without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from forked import forked
from memory_by_name import PATIENT, TOO_SLOW, patient, share_by_name
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from weight_source import some_weights

from verl.engine.files.checksum import sums_of
from verl.errors import NumericalError
from verl.rollout.weight_sync import open_weights
from verl.weight_sync import ipc
from verl.weight_sync.buckets import Version, gathered
from verl.weight_sync.ipc import DEVICE_ARGUMENT, DeviceBuckets, TensorExport, _on_device

pytestmark = pytest.mark.usefixtures("memory_by_name")

CPU = torch.device("cpu")


def _read(exports: dict[str, bytes]) -> tuple[dict[str, int], dict[str, Any]]:
    """In a process of its own: the sums, and the values as lists."""
    share_by_name()
    tensors = open_weights(exports, CPU)
    return sums_of(tensors.items()), {name: tensor.tolist() for name, tensor in tensors.items()}


def test_a_busy_machine_does_not_fail_these_tests() -> None:
    """PyTorch's memory manager, which only tests use, has a second to answer."""
    answers = [RuntimeError(TOO_SLOW), RuntimeError(TOO_SLOW), None]

    def slow(of: str) -> str:
        if error := answers.pop(0):
            raise error
        return of

    assert patient(slow)("memory") == "memory" and not answers
    for name in ("_share_filename_cpu_", "_new_shared_filename_cpu"):
        assert hasattr(getattr(torch.UntypedStorage, name), PATIENT), name


def test_another_process_reads_the_same_weights() -> None:
    weights = some_weights()
    memory = DeviceBuckets(CPU)
    exported = memory.export(Version(weights, [["norm.weight"], ["embed.weight", "steps"]], torch.bfloat16, 3), 1)
    assert (exported.version, exported.index, exported.count, exported.next_fits) == (3, 1, 2, False)
    with forked().Pool(1) as reader:
        found, values = reader.apply(_read, (dict(exported.exports),))
    assert found == exported.sums
    assert values == {"embed.weight": weights["embed.weight"].bfloat16().tolist(), "steps": 12}
    memory.release()
    assert memory.held == {}


def test_what_is_opened_is_the_trainer_s_memory() -> None:
    memory = DeviceBuckets(CPU)
    exported = memory.export(Version(some_weights(), [["norm.weight"]], torch.float32, 3), 0)
    open_weights(exported.exports, CPU)["norm.weight"][0] = 1  # seen by the trainer: nothing was copied
    assert memory.held["norm.weight"][0] == 1


def test_a_gpu_s_memory_is_opened_under_the_number_that_the_gpu_has_here() -> None:
    arguments = tuple(range(12))
    moved = _on_device(TensorExport("w", rebuild_cuda_tensor, arguments), torch.device("cuda", 3))
    assert moved == [*arguments[:DEVICE_ARGUMENT], 3, *arguments[DEVICE_ARGUMENT + 1 :]]
    assert rebuild_cuda_tensor.__code__.co_varnames[DEVICE_ARGUMENT] == "storage_device"


@pytest.mark.parametrize(
    ("variable", "value", "kind", "expected"),
    [
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:128", "cuda", "expandable_segments:False"),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128,expandable_segments: True", "cuda", "False"),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True", "cpu", None),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:False", "cuda", None),
        ("PYTORCH_ALLOC_CONF", "", "cuda", None),
    ],
)
def test_exported_memory_is_not_in_segments_that_containers_cannot_share(
    variable: str, value: str, kind: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All settings are given each time: PyTorch forgets what is not named. Afterwards they are the user's again."""
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv(variable, value)
    given: list[str] = []
    monkeypatch.setattr(ipc, "set_allocator", given.append)
    with pytest.raises(NumericalError), ipc.plain_segments(torch.device(kind)):
        assert len(given) == (expected is not None)
        raise NumericalError("in the middle")
    if expected is None:
        assert not given
    else:
        assert expected in given[0] and given[1] == value
        assert ("max_split_size_mb:128" in value) and "max_split_size_mb:128" in given[0]


@pytest.mark.parametrize(("value", "dtype"), [(float("nan"), torch.bfloat16), (1e5, torch.float16)])
def test_a_weight_that_is_not_finite_is_not_exported(value: float, dtype: torch.dtype) -> None:
    """1e5 is more than float16 can hold, 65504."""
    named = {"fine": torch.ones(2), "norm.weight": torch.tensor([1.0, value])}
    with pytest.raises(NumericalError, match=r"norm\.weight"):
        DeviceBuckets(CPU).export(Version(named, [list(named)], dtype, 1), 0)


def test_copies_do_not_follow_the_parameters_and_only_floats_are_cast() -> None:
    parameter, count = torch.nn.Parameter(torch.ones(3)), torch.tensor([300])
    copies = gathered([("w", parameter), ("count", count)], torch.float32)
    with torch.no_grad():
        parameter.add_(1)
    assert copies["w"].tolist() == [1.0, 1.0, 1.0]
    assert not copies["w"].requires_grad
    assert gathered([("count", count)], torch.bfloat16)["count"].dtype is torch.int64
