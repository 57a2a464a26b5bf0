"""Weights that a sampler reads from the trainer's memory: what can be run without a GPU, between real processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from verl.config import Config, load_config
from verl.errors import NumericalError, WeightSyncError
from verl.rollout import weight_buckets
from verl.rollout.manager import RolloutManager
from verl.rollout.weight_buckets import gathered, plan_buckets
from verl.rollout.weight_file import checksum, publish_weights
from verl.rollout.weight_ipc import (
    ExportedWeights,
    WeightStream,
    bit_sum,
    export_weights,
    merge_exports,
    open_exports,
)
from verl.rollout.weight_sync import WeightSyncExtension
from verl.single_controller import ResourcePool
from verl.workers.actor import ActorWorker

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.bool]


def config_of(model_dir: Path, dtype: str, *overrides: str) -> Config:
    rollout = "actor_rollout_ref.rollout"
    return load_config(
        "ppo_trainer",
        [
            f"actor_rollout_ref.model.path={model_dir}",
            "actor_rollout_ref.actor.num_threads=1",
            "agent.environment=rollout_environments.EchoEnvironment",
            "data.max_prompt_length=200",
            "data.max_start_length=100",
            "data.max_response_length=12",
            "data.max_obs_length=20",
            f"{rollout}.dtype={dtype}",
            f"{rollout}.kv_cache_gib=0.125",
            f"{rollout}.max_num_seqs=64",
            f"{rollout}.num_threads=1",
            "trainer.device=cpu",
            "trainer.step_timeout_s=400",
            *overrides,
        ],
    )


@pytest.fixture(scope="module", autouse=True)
def memory_by_name() -> Iterator[None]:
    """Shared CPU memory that any process can open by its name, as any process on a node can open GPU memory."""
    before = mp.get_sharing_strategy()
    mp.set_sharing_strategy("file_system")
    yield
    mp.set_sharing_strategy(before)


def some_weights() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        "embed.weight": torch.randn(7, 5, generator=draw).bfloat16(),
        "norm.weight": torch.randn(5, generator=draw),
        "steps": torch.tensor(12),
    }


def test_bit_sum_by_hand() -> None:
    # bfloat16 keeps the upper half of a float32: 1.0 is 0x3F80 = 16256, 2.0 is 0x4000 = 16384, and -1.0 is
    # 0xBF80 = 49024, which as a signed 16-bit integer is 49024 - 65536 = -16512.
    assert bit_sum(torch.tensor([1.0, 2.0], dtype=torch.bfloat16)) == 1 * 16256 + 3 * 16384
    rows = torch.tensor([[1.0, 2.0], [-1.0, 1.0]], dtype=torch.bfloat16)
    assert bit_sum(rows) == 1 * (16256 + 16384) + 3 * (-16512 + 16256)
    assert bit_sum(torch.tensor(1.0)) == 0x3F800000
    assert bit_sum(torch.tensor([[1, 2], [3, 4]])) == 1 * (1 + 2) + 3 * (3 + 4)


def test_bit_sum_of_a_tensor_of_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.arange(35, dtype=torch.int32).reshape(7, 5)
    by_hand = sum((2 * row + 1) * sum(range(5 * row, 5 * row + 5)) for row in range(7))
    assert bit_sum(table) == by_hand
    for num_values in (1, 5, 14, 15):
        monkeypatch.setattr("verl.rollout.weight_ipc.VALUES_AT_ONCE", num_values)
        assert bit_sum(table) == by_hand


@given(st.sampled_from(DTYPES[:4]), st.integers(0, 34), st.data())
def test_one_changed_bit_changes_the_checksum(dtype: torch.dtype, position: int, data: st.DataObject) -> None:
    weight = torch.randn(7, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    changed = weight.clone()
    bits = changed.view(-1).view(torch.uint8)
    bits[position * dtype.itemsize + data.draw(st.integers(0, dtype.itemsize - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum([("w", changed)], bit_sum) != checksum([("w", weight)], bit_sum)


@pytest.mark.parametrize("dtype", DTYPES)
def test_checksum_of_moved_values(dtype: torch.dtype) -> None:
    weight = torch.tensor([[0, 1, 1], [1, 0, 0]]).to(dtype)
    original = checksum([("w", weight)], bit_sum)
    assert checksum([("w", weight.t().contiguous().t())], bit_sum) == original  # the same values in another layout
    assert checksum([("w", weight.flip(0))], bit_sum) != original
    assert checksum([("w", weight.reshape(3, 2))], bit_sum) != original
    assert checksum([("v", weight)], bit_sum) != original


def _read(exports: dict[str, bytes]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """In a process of its own: the checksum, the values as lists, and the update info without its handles."""
    tensors, update = open_exports(exports, CPU)
    values = {name: tensor.tolist() for name, tensor in tensors.items()}
    return checksum(tensors.items(), bit_sum), values, {key: update[key] for key in ("names", "dtype_names", "shapes")}


def test_another_process_reads_the_same_weights() -> None:
    weights = some_weights()
    exported = export_weights(weights, 3, CPU)
    with mp.get_context("spawn").Pool(1) as reader:
        found, values, update = reader.apply(_read, (dict(exported.exports),))
    assert exported.version == 3
    assert found == exported.checksum == checksum(some_weights().items(), bit_sum)
    assert values == {name: tensor.tolist() for name, tensor in weights.items()}
    assert update == {
        "names": ["embed.weight", "norm.weight", "steps"],
        "dtype_names": ["bfloat16", "float32", "int64"],
        "shapes": [[7, 5], [5], []],
    }


def test_update_info_is_what_the_engine_takes_and_leads_to_the_same_memory() -> None:
    from torch.multiprocessing.reductions import rebuild_tensor
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine, IPCWeightTransferUpdateInfo

    weights = some_weights()
    _, update = open_exports(export_weights(weights, 3, CPU).exports, CPU)
    info = IPCWeightTransferUpdateInfo(**update)
    assert IPCWeightTransferEngine.update_info_cls is IPCWeightTransferUpdateInfo
    assert isinstance(info.ipc_handles, list)  # what "packed: False" stands for
    for name, handles in zip(info.names, info.ipc_handles, strict=True):
        opened = rebuild_tensor(*handles["cpu"])
        opened.view(-1)[0] = 1  # seen by the trainer: nothing was copied
        assert torch.equal(opened, weights[name])
        assert weights[name].view(-1)[0] == 1


def test_the_engine_s_arguments_choose_the_ipc_backend(tiny_model_dir: Path) -> None:
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferInitInfo
    from vllm.engine.arg_utils import AsyncEngineArgs

    from verl.rollout.engine_settings import device_args

    args = AsyncEngineArgs(model=str(tiny_model_dir), **device_args(False, 1.0, 0.4))
    assert args.weight_transfer_config == WeightTransferConfig(backend="ipc")
    assert args.weight_transfer_config.backend in WeightTransferEngineFactory._registry
    assert args.gpu_memory_utilization == 0.4
    assert IPCWeightTransferInitInfo(**{"packed": False}).packed is False
    assert "weight_transfer_config" not in device_args(True, 1.0, 0.4)


def test_a_worker_of_the_engine_has_what_the_extension_calls() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    from verl.rollout.weight_sync import WeightSyncExtension

    called = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")
    assert all(callable(getattr(Worker, name)) for name in called)
    added = [name for name in dir(WeightSyncExtension) if not name.startswith("__")]
    assert "load_exported_weights" in added
    assert not [name for name in added if hasattr(Worker, name)]


def test_exports_of_all_ranks_are_merged_by_device() -> None:
    first, second = (
        ExportedWeights({"GPU-a": b"1"}, 5, "same"),
        ExportedWeights({"GPU-b": b"2"}, 5, "same"),
    )
    assert merge_exports([first, second]) == ExportedWeights({"GPU-a": b"1", "GPU-b": b"2"}, 5, "same")
    with pytest.raises(WeightSyncError, match="ranks hold different weights.*5: same, 5: other"):
        merge_exports([first, replace(second, checksum="other")])
    with pytest.raises(WeightSyncError, match="ranks hold different weights"):
        merge_exports([first, replace(second, version=4)])


def test_a_device_without_an_export_is_an_error_that_names_it() -> None:
    with pytest.raises(WeightSyncError, match="no weights on the engine's device cpu, only on GPU-a, GPU-b"):
        open_exports({"GPU-a": b"1", "GPU-b": b"2"}, CPU)


@pytest.mark.parametrize(("value", "dtype"), [(float("nan"), torch.bfloat16), (1e5, torch.float16)])
def test_a_weight_that_is_not_finite_is_not_exported(value: float, dtype: torch.dtype) -> None:
    """1e5 is more than float16 can hold, 65504."""
    copies = gathered([("fine", torch.ones(2)), ("norm.weight", torch.tensor([1.0, value]))], dtype)
    with pytest.raises(NumericalError, match=r"norm\.weight"):
        export_weights(copies, 1, CPU)


def test_copies_do_not_follow_the_parameters_and_only_floats_are_cast() -> None:
    parameter, count = torch.nn.Parameter(torch.ones(3)), torch.tensor([300])
    copies = gathered([("w", parameter), ("count", count)], torch.float32)
    with torch.no_grad():
        parameter.add_(1)
    assert copies["w"].tolist() == [1.0, 1.0, 1.0]
    assert not copies["w"].requires_grad
    assert gathered([("count", count)], torch.bfloat16)["count"].dtype is torch.int64


def _export_as_rank(rank: int, config: Config, meeting: str, answers: Any, read: Any) -> None:
    """One of two actor ranks: export a bucket, wait until that was read, then the next; what is held at each time."""
    torch.set_num_threads(1)
    mp.set_sharing_strategy("file_system")
    weight_buckets.MIB = 2**16  # the whole model has less than one
    worker = ActorWorker(config, 10, False, rank, 2)
    worker.start(f"file://{meeting}")
    index, count, held = 0, 1, []
    while index < count:
        bucket = worker.export_weights(4, "policy", index)
        held.append({name: tensor.nbytes for name, tensor in worker.exported.items()})
        answers.put((rank, bucket))
        read.wait(300)
        index, count = index + 1, bucket.count
    worker.release_weights()
    answers.put((rank, (held, len(worker.exported))))


def test_every_rank_of_a_sharded_actor_exports_the_model_bucket_by_bucket_in_the_sampler_s_format(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    context = mp.get_context("spawn")
    answers, read = context.Queue(), context.Barrier(3)
    config = config_of(tiny_model_dir, "bfloat16", "actor_rollout_ref.rollout.weight_sync.bucket_mib=1")
    args = (config, str(tmp_path / "store"), answers, read)
    ranks = [context.Process(target=_export_as_rank, args=(rank, *args)) for rank in range(2)]
    found: list[dict[str, torch.Tensor]] = [{}, {}]
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.bfloat16)
    expected = dict(model.named_parameters())
    try:
        for process in ranks:
            process.start()
        index, count = 0, 1
        while index < count:
            parts = dict(answers.get(timeout=300) for _ in range(2))
            for rank in range(2):
                opened = open_exports(parts[rank].exports, CPU)[0]
                assert not opened.keys() & found[rank].keys()
                found[rank] |= {name: tensor.clone() for name, tensor in opened.items()}
            merged = merge_exports([replace(part, exports={f"GPU-{rank}": b""}) for rank, part in parts.items()])
            assert (merged.version, merged.index) == (4, index)
            assert merged.checksum == checksum([(name, expected[name]) for name in opened], bit_sum)
            del opened
            index, count = index + 1, merged.count
            read.wait(300)
        for tensors in found:
            assert list(tensors) == list(expected)
            assert all(tensors[name].dtype is torch.bfloat16 for name in expected)
            assert all(torch.equal(tensors[name], expected[name]) for name in expected)
        for held, left in dict(answers.get(timeout=300) for _ in range(2)).values():
            assert len(held) == count > 1 and left == 0
            assert all(sum(bucket.values()) <= 2**16 for bucket in held if len(bucket) > 1)
    finally:
        for process in ranks:
            process.kill()
            process.join()


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


def test_the_engine_s_rank_opens_one_update_for_all_buckets() -> None:
    calls: list[str] = []

    class Rank(WeightSyncExtension):
        device = CPU

        def update_weights(self, update_info: dict[str, Any]) -> None:
            calls.append(f"update {' '.join(update_info['names'])}")

    def note(name: str) -> Any:
        return lambda *_: calls.append(name)

    rank = Rank()
    rank.init_weight_transfer_engine = note("init")
    rank.start_weight_update, rank.finish_weight_update = note("start"), note("finish")
    buckets = [
        export_weights({name: tensor}, 3, CPU, index, 3) for index, (name, tensor) in enumerate(some_weights().items())
    ]
    for bucket in buckets:
        found = rank.load_exported_weights(dict(bucket.exports), bucket.checksum, bucket.index, bucket.count)
        assert found == bucket.checksum
    assert calls == ["init", "start", "update embed.weight", "update norm.weight", "update steps", "finish"]


def test_an_engine_that_reads_other_weights_keeps_its_own_and_they_are_released(
    ray_session: Any, tiny_model_dir: Path, weight_dir: Path
) -> None:
    """Through manager, worker and engine to the process of the model, which reads this process' memory."""
    released: list[bool] = []
    tensors = {"model.norm.weight": torch.full((96,), 2.0)}
    exported = replace(export_weights(tensors, 6, CPU), checksum="0" * 64)
    seen_by_the_engine = checksum(tensors.items(), bit_sum)[:16]
    manager = RolloutManager(config_of(tiny_model_dir, "float32"), ResourcePool(1, 1, "cpu"))
    try:
        with pytest.raises(
            WeightSyncError, match=f"version 6 in GPU memory: .* read checksum {seen_by_the_engine}, .* wrote 00000000"
        ):
            manager.load_weights(lambda: WeightStream([exported], lambda: released.append(True)))
        assert released == [True]
        model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
        manager.load_weights(partial(publish_weights, model.named_parameters(), 7, weight_dir))  # it goes on working
    finally:
        manager.shutdown()
