"""What PyTorch's CPU allocator really gave an engine, as its own profiler saw it: an independent measure."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from run_config import run_config
from torch.profiler import ProfilerActivity, profile

from verl.config import Config
from verl.config.rules.predicates import has_anchor, needs_ref_log_probs, policy_topk, scores_in_update
from verl.engine.device.runtime import init_process_group
from verl.engine.policy_engine import PolicyEngine
from verl.engine.value_engine import ValueEngine
from verl.planning.dry_run.passes import for_update
from verl.protocol import TrainBatch

CPU = torch.device("cpu")
WAIT = dist.Work.wait


def measure(overrides: list[str], batch: TrainBatch, num_ranks: int, folder: Path) -> dict[str, int]:
    """Bytes on rank 0 of `num_ranks` real processes: the peak of each pass, after a first update, and at rest."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    others = [
        context.Process(target=_rank, args=(sender, overrides, batch, rank, num_ranks, folder))
        for rank in range(num_ranks)
    ]
    for process in others:
        process.start()
    sender.close()
    found: dict[str, int] = receiver.recv()
    for process in others:
        process.join()
    assert [process.exitcode for process in others] == [0] * num_ranks
    return found


def _rank(sender: Connection, overrides: list[str], batch: TrainBatch, rank: int, num_ranks: int, folder: Path) -> None:
    found = measure_rank(overrides, batch, rank, num_ranks, folder)
    if rank == 0:
        sender.send(found)


def measure_rank(overrides: list[str], batch: TrainBatch, rank: int, num_ranks: int, folder: Path) -> dict[str, int]:
    """Joins a process group, and leaves it."""
    torch.set_num_threads(1)
    if num_ranks > 1:
        dist.Work.wait = _wait_until_let_go  # type: ignore[method-assign]
    init_process_group(rank, num_ranks, f"file://{folder}/rendezvous", CPU)
    config = run_config(overrides, "tinywiki")
    found = _actor(config, batch)
    if config.algorithm.adv_estimator == "gae":
        found |= _critic(config, batch)
    dist.destroy_process_group()
    return found


def _wait_until_let_go(work: dist.Work, *timeout: object) -> bool:
    """gloo's threads say that a message is through before they let go of it, and what they free the profiler misses."""
    done = WAIT(work, *timeout)
    time.sleep(0.005)
    return done


def _actor(config: Config, batch: TrainBatch) -> dict[str, int]:
    made: list[PolicyEngine] = []
    read, in_update = for_update(batch, config), scores_in_update(config)

    def update() -> None:
        (made[0].update_and_score if in_update else made[0].update)(read)

    def start() -> None:
        made.append(PolicyEngine(config, CPU, 2, has_anchor(config)))
        update()

    rest = allocated(start)[-1]
    found = {"actor": rest, "update": rest + max(allocated(update))}
    if not in_update:
        top_k = policy_topk(config.actor_rollout_ref.actor)
        found["log-probs"] = rest + max(allocated(lambda: made[0].log_probs(batch, 1.0, top_k=top_k)))
    if needs_ref_log_probs(config):
        found["anchor's log-probs"] = rest + max(allocated(lambda: made[0].log_probs(batch, 1.0, "anchor")))
    return found


def _critic(config: Config, batch: TrainBatch) -> dict[str, int]:
    made: list[ValueEngine] = []

    def start() -> None:
        made.append(ValueEngine(config, CPU, 2))
        made[0].update(batch)

    rest = allocated(start)[-1]
    [engine] = made
    return {
        "critic": rest,
        "values": rest + max(allocated(lambda: engine.values(batch))),
        "critic's update": rest + max(allocated(lambda: engine.update(batch))),
    }


def allocated(run: Callable[[], object]) -> list[int]:
    """Bytes that are allocated more than before `run`, after each event of the allocator."""
    gc.collect()  # what an engine before this one leaves is not freed on this one's account
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
        gc.collect()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    sizes, total = [0], 0
    for event in events:
        total += event.nbytes()
        sizes.append(total)
    return sizes
