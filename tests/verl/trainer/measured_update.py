"""The memory that an actor's updates really take: its own process, peak resident memory minus that before loading."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

# What the process that is forked has imported; so that imports are not counted.
PRELOADED = ["verl.engine.policy_engine", "transformers.models.qwen2.modeling_qwen2"]


def measure_update(overrides: list[str], lengths: list[int], vocabulary: int, folder: Path) -> int:
    """Bytes. Two updates of a batch with rows of these lengths, every token but a row's first five trained."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_update, args=(sender, overrides, lengths, vocabulary, folder))
    process.start()
    sender.close()
    peak = receiver.recv()
    process.join()
    assert process.exitcode == 0
    return int(peak)


def resident(field: str) -> int:
    """Bytes of VmRSS (now) or VmHWM (the peak)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def _update(sender: Connection, overrides: list[str], lengths: list[int], vocabulary: int, folder: Path) -> None:
    import torch

    from verl.config import load_config
    from verl.engine.device import init_process_group
    from verl.engine.policy_engine import PolicyEngine
    from verl.protocol import Prompt, Segment, Source, Status, TrainBatch, Trajectory

    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    init_process_group(0, 1, f"file://{folder}/rendezvous-{os.getpid()}", cpu)
    config = load_config("ppo_trainer", overrides)
    ids = torch.randint(0, vocabulary, (max(lengths),)).tolist()
    trajectories = []
    for length in lengths:
        segments = [
            Segment(Source.PROMPT, tuple(ids[:5])),
            Segment(Source.POLICY, tuple(ids[5:length]), (-1.0,) * (length - 5)),
        ]
        trajectory = Trajectory("group", Prompt(tuple(ids[:5]), "test", {}), segments, Status.ANSWERED)
        trajectory.reward = 1.0
        trajectories.append(trajectory)
    batch = TrainBatch.from_trajectories(trajectories)
    for name in ("old_log_probs", "ref_log_probs", "advantages"):
        batch.tokens[name] = torch.randn(len(batch.tokens["ids"]))
    before = resident("VmRSS")
    with_anchor = config.actor_rollout_ref.actor.use_kl_loss
    engine = PolicyEngine(config, cpu, 10, with_anchor)
    for _ in range(2):
        engine.update(batch)
        sender.send(resident("VmHWM") - before)
