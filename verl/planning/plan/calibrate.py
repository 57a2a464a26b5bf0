"""Measures the devices of this machine: `.venv/bin/python -m verl.planning.plan.calibrate --output machine.json`.

The planner takes the file by `--machine`. Rates are of the kinds of work that the planner counts: products, operations
that go through memory, many small operations, and the collectives of FSDP2 between `--ranks` processes of this machine.
On CPU a device is a core, and time is what a process spends on one, which other load changes less.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from program_end import exit_status
from verl.engine.device.runtime import init_process_group, matmul, resolve_device
from verl.planning.dry_run.machine import Machine, write_machine

MIB = 2**20
TIMES = 5  # each is measured
SMALL_OPERATIONS = 100
CALLS = 8  # of a collective, one after the other


class Sizes(NamedTuple):
    """The sizes of what is measured: `side` of the matrices of a product; bytes of an activation, which on a CPU lies
    partly in its caches; bytes of a layer that is gathered.
    """

    side: int
    activation: int
    gathered: int


ON_DEVICE = {"cpu": Sizes(1024, 4 * MIB, 4 * MIB), "cuda": Sizes(8192, 256 * MIB, 256 * MIB)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m verl.planning.plan.calibrate", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--output", type=Path, required=True, help="the file to write")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--ranks", type=int, default=2, help="number of processes that communicate")
    args = parser.parse_args(argv)

    def measure() -> None:
        machine = calibrated(resolve_device(args.device), args.ranks)
        write_machine(machine, args.output)
        print(f"{args.output}: {rates_in_words(machine)}")

    return exit_status(measure, "nothing was written")


def rates_in_words(machine: Machine) -> str:
    """The rates of a machine in readable units."""
    return (
        f"{machine.name}: {machine.half_flops / 1e12:.3g} TFLOP/s in bfloat16, {machine.float_flops / 1e12:.3g} in "
        f"float32; memory {machine.memory_bytes / 1e9:.3g} GB/s; {machine.launch_s * 1e6:.3g} us an operation; "
        f"collectives {machine.link_bytes / 1e9:.3g} GB/s and {machine.call_s * 1e6:.3g} us each"
    )


def calibrated(device: torch.device, num_ranks: int = 2) -> Machine:
    """Measure this machine for some seconds, with at least 2 ranks."""
    # One machine has no network between nodes to measure: its own links stand for that.
    links = _collectives(device, num_ranks)
    gathered, call_s = links["all-gather"]
    with _one_thread():
        return Machine(
            torch.cuda.get_device_name(device) if device.type == "cuda" else "a core of a CPU",
            half_flops=_product_flops(device, torch.bfloat16),
            float_flops=_product_flops(device, torch.float32),
            memory_bytes=_memory_bytes(device),
            link_bytes=gathered,
            network_bytes=gathered,
            launch_s=_launch_s(device),
            source=f"measured on a machine with {os.cpu_count()} cores, collectives between {num_ranks} ranks of it",
            call_s=call_s,
            overlap=device.type == "cuda",
            rounds={kind: gathered / rate for kind, (rate, _) in links.items()},
        )


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Context in which PyTorch uses one thread: a device is one core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def seconds_per_call(run: Callable[[], object], device: torch.device) -> float:
    """Seconds on the device: the median of some rounds, after a warm-up round."""
    found = []
    for _ in range(TIMES + 1):
        _wait_for(device)
        start = _clock(device)
        run()
        _wait_for(device)
        found.append(_clock(device) - start)
    return statistics.median(found[1:])


def _clock(device: torch.device) -> float:
    return time.perf_counter() if device.type == "cuda" else time.process_time()


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _product_flops(device: torch.device, dtype: torch.dtype) -> float:
    side = ON_DEVICE[device.type].side
    one, other = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / seconds_per_call(lambda: matmul(one, other), device)


def _memory_bytes(device: torch.device) -> float:
    """The bytes a second that go through memory, by the sum of two tensors."""
    num_bytes = ON_DEVICE[device.type].activation
    one, other = (torch.randn(num_bytes // 4, device=device) for _ in range(2))
    return 3 * num_bytes / seconds_per_call(lambda: one + other, device)


class _Counted(TorchDispatchMode):
    """Counts the operations that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        self.number += not func.is_view
        return func(*args, **(kwargs or {}))


def _launch_s(device: torch.device) -> float:
    """The seconds of an operation on a few numbers, in a forward and its backward."""
    weight = torch.ones(8, 8, device=device, requires_grad=True)

    def small() -> None:
        x = torch.ones(1, 8, device=device)
        for _ in range(SMALL_OPERATIONS):
            x = torch.nn.functional.silu(x @ weight) * 0.5 + x
        x.sum().backward()

    with _Counted() as counted:
        small()
    return seconds_per_call(small, device) / counted.number


Collective = Callable[[torch.Tensor, torch.Tensor], None]
Rates = dict[str, tuple[float, float]]
COLLECTIVES: dict[str, Collective] = {
    "all-gather": lambda whole, part: dist.all_gather_single(whole, part),
    "reduce-scatter": lambda whole, part: dist.reduce_scatter_single(part, whole),
    "all-reduce": lambda whole, part: dist.all_reduce(whole),
}


def _collectives(device: torch.device, num_ranks: int) -> Rates:
    """The rates of each kind: bytes a second that a rank sends if a tensor goes round a ring once, and seconds of a
    small one.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (num_ranks, device.type, folder), num_ranks)
        ranks: list[Rates] = [torch.load(Path(folder) / str(rank), weights_only=True) for rank in range(num_ranks)]
    return {
        kind: (statistics.mean(rank[kind][0] for rank in ranks), statistics.mean(rank[kind][1] for rank in ranks))
        for kind in COLLECTIVES
    }


def _rank(rank: int, num_ranks: int, kind: str, folder: str) -> None:
    device = resolve_device(kind, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    init_process_group(rank, num_ranks, f"file://{folder}/rendezvous", device)
    found = {name: _rates(run, num_ranks, device) for name, run in COLLECTIVES.items()}
    torch.save(found, Path(folder) / str(rank))
    dist.barrier()
    dist.destroy_process_group()


def _rates(run: Collective, num_ranks: int, device: torch.device) -> tuple[float, float]:
    values = ON_DEVICE[device.type].gathered // 4 // num_ranks * num_ranks
    small_s, large_s = (_collective_s(run, size, num_ranks, device) for size in (num_ranks, values))
    return 4 * values * (num_ranks - 1) / num_ranks / max(large_s - small_s, 1e-9), small_s


def _collective_s(run: Collective, values: int, num_ranks: int, device: torch.device) -> float:
    whole, part = torch.zeros(values, device=device), torch.zeros(values // num_ranks, device=device)

    def several() -> None:
        for _ in range(CALLS):
            run(whole, part)

    return seconds_per_call(several, device) / CALLS


if __name__ == "__main__":
    sys.exit(main())
