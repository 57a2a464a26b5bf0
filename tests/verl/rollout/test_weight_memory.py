"""Weights in memory that the trainer's ranks write and a sampler reads, between real processes."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import forked, ranks
from memory_by_name import share_by_name
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import AutoModelForCausalLM
from weight_source import some_weights, stream_of

from verl.config import Config, load_config
from verl.engine.device.runtime import device_mesh, init_process_group
from verl.engine.files.checksum import differing, sums_of
from verl.engine.lora import Lora, add_adapters, begin_adapters
from verl.engine.model import Decoder
from verl.errors import NumericalError, WeightSyncError
from verl.rollout.weight_sync import open_weights
from verl.weight_sync import buckets as weight_buckets
from verl.weight_sync import export as weight_export
from verl.weight_sync import memory as weight_memory
from verl.weight_sync.buckets import ExportedWeights, Version, merge_exports, places_of, plan_buckets
from verl.weight_sync.export import WeightExporter, adapters_of
from verl.weight_sync.ipc import DeviceBuckets
from verl.weight_sync.memory import HostBuckets
from verl.workers.actor import ActorWorker

pytestmark = pytest.mark.usefixtures("memory_by_name")

CPU = torch.device("cpu")
SMALL_MIB = 2**16  # whole tiny models have less than a real one


def expected_of(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in weights.items()}


def _write_as_rank(
    rank: int, rendezvous: str, folder: Path, homes: list[Path], fsdp_size: int, alone: bool, answers: Any, read: Any
) -> None:
    weight_memory.SHARED_MEMORY = homes[rank]
    if alone:  # then nothing is gathered
        weight_memory.gathered = None
    init_process_group(rank, len(homes), f"file://{rendezvous}", CPU)
    mesh = device_mesh(CPU, fsdp_size)
    placements = [Replicate(), Shard(0)][-mesh.ndim :]
    named = {name: distribute_tensor(w, mesh, placements) if w.dim() else w for name, w in some_weights().items()}
    memory = HostBuckets(folder, 2**20)
    answers.put((rank, memory.export(Version(named, [list(named)], torch.bfloat16, 3), 0)))
    read.wait(100)
    memory.close()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("hosts", "fsdp_size", "alone"),
    [
        ((0, 0), -1, True),
        ((0, 0, 1), -1, False),
        pytest.param((0, 0, 1, 1), 2, True, id="a copy on each host"),
        pytest.param((0, 1, 0, 1), 2, False, id="copies over both hosts"),
        pytest.param((0, 0, 0, 0), 2, True, id="two copies on one host"),
    ],
)
def test_every_rank_writes_its_rows_and_every_host_has_them_all(
    hosts: tuple[int, ...],
    fsdp_size: int,
    alone: bool,
    weight_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second host has another memory: here another file system. The driver's folder is on the first one."""
    kinds = [weight_dir.parent, tmp_path]
    assert kinds[0].stat().st_dev != kinds[1].stat().st_dev
    context = forked()
    answers, read = context.Queue(), context.Barrier(len(hosts) + 1)
    homes = [kinds[host] for host in hosts]
    args = (str(tmp_path / "store"), weight_dir, homes, fsdp_size, alone, answers, read)
    with ranks(len(hosts), _write_as_rank, *args) as processes:
        parts = dict(answers.get(timeout=100) for _ in processes)
        merged = merge_exports([parts[rank] for rank in range(len(hosts))])
        assert len(merged.exports) == len(set(hosts))
        expected = expected_of(some_weights())
        for host in set(hosts):
            monkeypatch.setattr(weight_memory, "SHARED_MEMORY", kinds[host])
            opened = open_weights(merged.exports, CPU)
            assert differing(sums_of(opened.items()), merged.sums) == []
            assert all(torch.equal(opened[name], tensor) for name, tensor in expected.items())
        read.wait(100)
        for process in processes:
            process.join(100)
        assert not list(tmp_path.glob("verl-weights-*")), "a host without the driver is left as it was"


def config_of(model_dir: Path, lora_rank: int = 0) -> Config:
    rollout = "actor_rollout_ref.rollout"
    settings = [
        f"actor_rollout_ref.model.lora_rank={lora_rank}",
        f"actor_rollout_ref.model.path={model_dir}",
        f"{rollout}.weight_sync.bucket_mib=1",
    ]
    settings += ["actor_rollout_ref.actor.num_threads=1", f"{rollout}.dtype=bfloat16", "trainer.device=cpu"]
    return load_config("ppo_trainer", settings)


def _export_as_rank(rank: int, on_device: bool, config: Config, folder: Path, orders: list[Any], answers: Any) -> None:
    """One of two actor ranks."""
    torch.set_num_threads(1)
    share_by_name()
    weight_buckets.MIB = weight_export.MIB = SMALL_MIB
    worker = ActorWorker(config, 10, False, rank, 2)
    worker.start(f"file://{folder}/store")
    if on_device:  # the CPU stands for a GPU that both processes see
        worker.exporter = WeightExporter(config, CPU, folder)
        worker.exporter.buckets = DeviceBuckets(CPU)
    while (index := orders[rank].get()) is not None:
        answers.put((rank, worker.export_weights(4, "policy", index, str(folder))))
    memory = worker.exporter.buckets
    worker.release_weights()
    answers.put((rank, len(memory.held) if isinstance(memory, DeviceBuckets) else memory.capacity))


@pytest.mark.parametrize(("on_device", "lora_rank"), [(False, 0), (True, 0), (False, 33), (True, 33)])
def test_a_sharded_actor_exports_the_model_bucket_by_bucket_in_the_sampler_s_format(
    on_device: bool, lora_rank: int, tiny_model_dir: Path, weight_dir: Path
) -> None:
    """Through memory of the host, and through that of a device, of which every rank has one. Of adapters these alone,
    in float32."""
    context = forked()
    answers, orders = context.Queue(), [context.Queue(), context.Queue()]
    config = config_of(tiny_model_dir, lora_rank)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.bfloat16)
    expected, found = dict(model.named_parameters()), list[str]()
    if lora_rank:
        add_adapters(model, Lora(lora_rank, 16, "all-linear"), torch.bfloat16)
        begin_adapters(model, seed=config.trainer.seed)
        expected = adapters_of(Decoder(model))

    def export(index: int) -> list[ExportedWeights]:
        for queue in orders:
            queue.put(index)
        parts = dict(answers.get(timeout=100) for _ in range(2))
        return [parts[0], parts[1]]

    with ranks(2, _export_as_rank, on_device, config, weight_dir, orders, answers):
        index, count = 0, 1
        while index < count:
            parts = export(index)
            merged = merge_exports(parts)
            for exports in [part.exports for part in parts] if on_device else [merged.exports]:
                opened = open_weights(exports, CPU)
                assert differing(sums_of(opened.items()), merged.sums) == []
                assert all(torch.equal(tensor, expected[name]) for name, tensor in opened.items())
            assert (merged.version, merged.index) == (4, index)
            found += list(opened)
            del opened
            index, count = index + 1, merged.count
        assert count > 3 and found == list(expected)
        for queue in orders:
            queue.put(None)
        for _, left in (answers.get(timeout=100) for _ in range(2)):
            assert left == 0 if on_device else SMALL_MIB < left <= 2 * SMALL_MIB


def test_what_is_read_stays_until_the_next_but_one_is_written(weight_dir: Path) -> None:
    weights = {f"layers.{i}.proj.weight": torch.full((64, 256), float(i)) for i in range(5)}
    seen = []
    for bucket in stream_of(weights.items(), 1, weight_dir, bucket_mib=1 / 8).buckets:
        opened = open_weights(bucket.exports, CPU)
        seen += [(name, tensor.unique().tolist()) for name, tensor in opened.items()]
        assert differing(sums_of(opened.items()), bucket.sums) == []
        assert bucket.next_fits == (bucket.index < bucket.count - 1)
    assert seen == [(f"layers.{i}.proj.weight", [float(i)]) for i in range(5)]
    [file] = weight_dir.iterdir()
    assert file.stat().st_size == 2 * 2**17


def test_weights_that_are_not_finite_are_not_exported(weight_dir: Path) -> None:
    weights = [("fine", torch.ones(2)), ("norm.weight", torch.tensor([1.0, 1e5]))]
    [_] = stream_of(weights, 1, weight_dir).buckets
    with pytest.raises(NumericalError, match=r"norm\.weight"):
        next(stream_of(weights, 1, weight_dir, torch.float16).buckets)  # which holds no more than 65504


def test_too_little_memory_is_an_error_that_names_the_setting(weight_dir: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**12, limits[1]))
    try:
        with pytest.raises(WeightSyncError, match=r"no room for 4 MiB .*weight_sync\.bucket_mib"):
            next(stream_of([("w", torch.ones(2**20))], 1, weight_dir).buckets)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_memory_of_another_host_or_of_a_trainer_that_ended_is_an_error(weight_dir: Path) -> None:
    [exported] = stream_of([("w", torch.ones(4))], 1, weight_dir).buckets
    with pytest.raises(WeightSyncError, match="no weights on the engine's device cpu or its host .*, only on GPU-a"):
        open_weights({"GPU-a": b"1"}, CPU)
    [file] = weight_dir.iterdir()
    file.unlink()
    with pytest.raises(WeightSyncError, match="is not there; did the trainer end"):
        open_weights(exported.exports, CPU)


def test_plans_and_places_agree_on_what_fits() -> None:
    named = {f"layers.{i}.proj.weight": torch.empty(3, 7) for i in range(9)}
    for names in plan_buckets(named.items(), torch.bfloat16, 192 / weight_buckets.MIB):  # three of 42 bytes, as of 64
        assert places_of([(name, named[name]) for name in names], torch.bfloat16)[-1].end <= 192
