"""Weight sync, bucket by bucket: how fast, and what is held beside the shards.

    .venv/bin/python scripts/bench/weight_sync.py --gib 2 --ranks 2

Random float32 weights of `--gib` in decoder layers, sharded over the ranks by rows, go to a reader as bfloat16 through
the same export, memory and checksums as in a run. `--device cuda`: one rank a GPU, and a reader for each. In turns:

    export    the ranks cast, write and sum, and nobody reads
    sync      the same, and the reader, which stands for an engine, checks every bucket and copies every weight into
              memory of its own; what vLLM does to weights beyond that is not in it
    copy      one process copies as many bytes from its own into shared memory (`--device cuda`: on the GPU)
    copies    all ranks do so at once: if together they are hardly faster than one, the memory is the limit. A copy
              reads and writes each byte once. For a byte of bfloat16 a sync reads two and writes one, and the reader
              reads it twice and writes it once: three times as much

"processor" counts the time that all processes together spent on cores, which other load on the machine changes less.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor, Shard

from verl.config import load_config
from verl.engine.device.runtime import device_mesh, init_process_group, resolve_device
from verl.engine.files.checksum import differing, sums_of
from verl.rollout.weight_stream import stream_buckets
from verl.rollout.weight_sync import open_weights
from verl.weight_sync.buckets import ExportedWeights
from verl.weight_sync.export import WeightExporter
from verl.weight_sync.memory import HostBuckets, weight_folder

HIDDEN, MLP = 2048, 8192
SQUARE, WIDE = (HIDDEN, HIDDEN), (MLP, HIDDEN)
LAYER = {
    **{f"self_attn.{part}_proj": SQUARE for part in "qkvo"},
    **{f"mlp.{part}_proj": WIDE for part in ("gate", "up")},
}
LAYER_VALUES = sum(rows * columns for rows, columns in LAYER.values())
GIB, MIB = 2**30, 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="float32 weights of the whole model, GiB")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bucket_mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options = parser.parse_args()
    folder = weight_folder()
    try:
        with tempfile.TemporaryDirectory() as store:
            report(options, Processes(options, folder.path, Path(store)))
    finally:
        folder.remove()


def report(options: argparse.Namespace, processes: Processes) -> None:
    num_bytes = num_layers(options) * LAYER_VALUES * 2
    sides = {
        "export": processes.export,
        "sync": processes.sync,
        "copy": processes.copy,
        "copies": processes.copies,
    }
    speeds: dict[str, list[Sequence[float]]] = {side: [] for side in sides}
    for turn in range(options.rounds + 1):
        for side, measure in sides.items():
            costs = measure(num_bytes)
            if turn:  # in the first one memory is new to the processes
                speeds[side].append([num_bytes / 1e9 / seconds for seconds in costs])
    print(f"{num_bytes / GIB:.2f} GiB in bfloat16 from {options.ranks} ranks, in buckets of {options.bucket_mib} MiB")
    found = {side: np.median(rounds, axis=0) for side, rounds in speeds.items()}
    for side, speed in found.items():
        share = "; of a copy {:.2f}, processor {:.2f}".format(*speed / found["copy"])
        print("{}: {:.2f} GB/s, processor {:.2f} GB/s".format(side, *speed) + share * (side != "copy"))
    whole = 2 * found["sync"][0]  # its float32 weights have twice the bytes
    print(f"the model as it is stored: {whole:.2f} GB/s, {whole / found['copy'][0]:.2f} of a copy of it")
    shared, private = (found / options.bucket_mib / MIB for found in processes.peaks())
    print(f"most beside the shards: {shared:.2f} buckets that all share, {private:.3f} in memory of one rank's own")


class Processes:
    """Ranks and readers, each with a line by which it is told what to do."""

    def __init__(self, options: argparse.Namespace, folder: Path, store: Path) -> None:
        num_readers = options.ranks if options.device == "cuda" else 1
        self.ranks = [started(Rank, number, options, str(folder), str(store)) for number in range(options.ranks)]
        self.readers = [started(Reader, number, options) for number in range(num_readers)]
        ask([*self.ranks, *self.readers], "ready")()

    def export(self, num_bytes: int) -> list[float]:
        """What the ranks do, alone: seconds by the clock, and of all cores together."""
        return self._run(read=False)

    def sync(self, num_bytes: int) -> list[float]:
        """The same with what the readers do."""
        return self._run(read=True)

    def _run(self, read: bool) -> list[float]:
        everyone = [*self.ranks, *self.readers]
        begun, used = time.perf_counter(), sum(ask(everyone, "seconds_of_cores")())
        for bucket in stream_buckets(lambda index: ask(self.ranks, "export", index)):
            wrong = ask(self.readers, "load", bucket)() if read else []
            assert not any(wrong), wrong
        return [time.perf_counter() - begun, sum(ask(everyone, "seconds_of_cores")()) - used]

    def copy(self, num_bytes: int) -> list[float]:
        """The same of a copy by one rank."""
        [seconds] = ask(self.ranks[:1], "copy", num_bytes)()
        return seconds

    def copies(self, num_bytes: int) -> list[float]:
        """The same of copies by all ranks, each of its share of the bytes."""
        seconds = ask(self.ranks, "copy", num_bytes // len(self.ranks))()
        return [max(clock for clock, _ in seconds), sum(cores for _, cores in seconds)]

    def peaks(self) -> tuple[float, float]:
        """Bytes of the memory for buckets, and the most that a rank took besides."""
        ask(self.ranks, "watch")()
        self.sync(0)
        shared, private = zip(*ask(self.ranks, "peaks")(), strict=True)
        return max(shared), max(private)


def started(role: type, *args: Any) -> Connection:
    here, there = mp.get_context("spawn").Pipe()
    mp.get_context("spawn").Process(target=serve, args=(role, there, *args), daemon=True).start()
    return here


def serve(role: type, line: Connection, *args: Any) -> None:
    torch.set_num_threads(1)
    served = role(*args)
    with contextlib.suppress(EOFError):  # the other end is done
        while True:
            method, given = line.recv()
            line.send(getattr(served, method)(*given))


def ask(lines: Sequence[Connection], method: str, *args: Any) -> Callable[[], list[Any]]:
    """Returns the wait for the answers."""
    for line in lines:
        line.send((method, args))
    return lambda: [line.recv() for line in lines]


class Process:
    def ready(self) -> None:
        """Answers when it was started."""

    def seconds_of_cores(self) -> float:
        return time.process_time()


class Rank(Process):
    """One rank of the trainer."""

    def __init__(self, number: int, options: argparse.Namespace, folder: str, store: str) -> None:
        self.device = resolve_device(options.device, number)
        init_process_group(number, options.ranks, f"file://{store}/store", self.device)
        self.weights = make_weights(options, self.device)
        self.bucket_bytes = options.bucket_mib * MIB
        settings = ["actor_rollout_ref.rollout.dtype=bfloat16"]
        settings += [f"actor_rollout_ref.rollout.weight_sync.bucket_mib={options.bucket_mib}"]
        self.exporter = WeightExporter(load_config("ppo_trainer", settings), self.device, Path(folder))

    def export(self, index: int) -> ExportedWeights:
        return self.exporter.export(self.weights.items(), 1, index)

    def copy(self, num_bytes: int) -> list[float]:
        """Part by part, into memory whose pages are there."""
        memory = self.exporter.buckets
        source = torch.ones(min(num_bytes, self.bucket_bytes), dtype=torch.uint8, device=self.device)
        target = memory.room[: len(source)] if isinstance(memory, HostBuckets) else torch.empty_like(source)
        source = source[: len(target)]
        target.copy_(source)
        used, begun = time.process_time(), time.perf_counter()
        for _ in range(num_bytes // len(source)):
            target.copy_(source)
        synchronize(self.device)
        scale = num_bytes / (num_bytes // len(source) * len(source))
        return [scale * (time.perf_counter() - begun), scale * (time.process_time() - used)]

    def watch(self) -> None:
        """Of what a rank takes for itself until `peaks`."""
        self.most, self.done = 0.0, threading.Event()
        before = private_memory(self.device)

        def look() -> None:
            while not self.done.wait(0.002):
                self.most = max(self.most, private_memory(self.device) - before)

        self.watcher = threading.Thread(target=look)
        self.watcher.start()

    def peaks(self) -> tuple[float, float]:
        self.done.set()
        self.watcher.join()
        memory = self.exporter.buckets
        return memory.capacity if isinstance(memory, HostBuckets) else 0.0, self.most


class Reader(Process):
    """Stands for an engine on the same host, or GPU."""

    def __init__(self, number: int, options: argparse.Namespace) -> None:
        self.device = resolve_device(options.device, number)
        self.own: dict[str, torch.Tensor] = {}

    def load(self, bucket: ExportedWeights) -> list[str]:
        """What is wrong with it."""
        tensors = open_weights(bucket.exports, self.device)
        if wrong := differing(sums_of(tensors.items()), bucket.sums):
            return wrong
        for name, tensor in tensors.items():
            self.own.setdefault(name, torch.empty_like(tensor)).copy_(tensor)
        synchronize(self.device)
        return []


def make_weights(options: argparse.Namespace, device: torch.device) -> dict[str, torch.Tensor]:
    """This rank's rows of every weight."""
    mesh = device_mesh(device)
    named = {}
    for layer in range(num_layers(options)):
        for part, (rows, columns) in LAYER.items():
            own = torch.randn(rows // options.ranks, columns, device=device)
            named[f"model.layers.{layer}.{part}.weight"] = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
    return dict(named)


def num_layers(options: argparse.Namespace) -> int:
    return max(1, round(options.gib * GIB / LAYER_VALUES / 4))


def private_memory(device: torch.device) -> float:
    """Bytes in use that no other process sees."""
    if device.type == "cuda":
        return float(torch.cuda.memory_allocated(device))
    resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    return 4096.0 * (int(resident) - int(shared))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
