"""A vLLM engine and the actor on the same GPU, without Ray: sample, sleep, wake for the weights, sync, wake, sample.

The actor's class and the engine's are those of a run. Weights go by CUDA IPC, as in a run on one node; on CPU, where
nothing sleeps, through shared memory. The log-probs of both have to agree before and after the sync, which brings
other weights.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import NamedTuple

import torch

from first_run.child import run_child
from first_run.result import Result, judged
from verl.agent.environment import Generation, Sampling
from verl.config import Config, load_config
from verl.engine.device.memory import device_memory
from verl.engine.model import named_tensors
from verl.phases import Phase
from verl.protocol import TrainBatch
from verl.rollout.engine import VLLMEngine
from verl.rollout.worker import settings_of
from verl.weight_sync.memory import weight_folder
from verl.workers.actor import ActorWorker

GIB = 2**30
WINDOW = 512
REQUESTS = {"cuda": (256, 128), "cpu": (8, 16)}  # how many, and tokens of each
CLOSE = {"cuda": 0.05, "cpu": 1e-3}  # nats: bfloat16, float32
CHANGED = 1.5  # factor of all matrices
PROMPT = tuple(range(5, 25))


class Turn(NamedTuple):
    """What was sampled, and how fast."""

    generations: list[Generation]
    tokens_per_s: float


def check(args: argparse.Namespace) -> Result:
    return asyncio.run(sampled_and_synced(config_of(args.device, args.model)))


def config_of(device: str, model: str) -> Config:
    """The settings of TinyWiki, with the sampler in the format in which the actor computes."""
    role = "actor_rollout_ref"
    overrides = [
        f"{role}.model.path={model}",
        f"{role}.actor.use_kl_loss=false",
        "algorithm.ref_policy_ema_tau=1.0",
        f"{role}.rollout.dtype={'bfloat16' if device == 'cuda' else 'float32'}",
        f"{role}.rollout.tensor_model_parallel_size=1",
        f"{role}.rollout.gpu_memory_utilization=0.3",
        f"{role}.rollout.kv_cache_gib=0.125",
        f"trainer.device={device}",
        "trainer.n_gpus_per_node=1",
    ]
    return load_config("tinywiki", overrides)


async def sampled_and_synced(config: Config) -> Result:
    device = config.trainer.device
    engine = VLLMEngine(settings_of(config, WINDOW, device))
    try:
        await engine.start()
        await sample(engine, *REQUESTS[device])  # the first requests warm up
        before = await sample(engine, *REQUESTS[device])
        actor = ActorWorker(config, 1, False, 0, 1)
        actor.start(actor.rendezvous())
        memory = {"awake": used(actor)}
        await engine.enter(Phase.UPDATE)
        memory["asleep"] = used(actor)
        apart = [mean_difference(actor, before)]
        change(actor)
        changed = mean_difference(actor, before)
        await engine.enter(Phase.SYNC)
        memory["weights awake"] = used(actor)
        seconds = await sync(engine, actor)
        await engine.enter(Phase.SAMPLE)
        memory["awake again"] = used(actor)
        after = await sample(engine, *REQUESTS[device])
        apart.append(mean_difference(actor, after))
    finally:
        engine.shutdown()
    return told(device, memory, apart, changed, seconds, after.tokens_per_s)


def told(
    device: str, memory: dict[str, float], apart: list[float], changed: float, seconds: float, rate: float
) -> Result:
    """Log-probs have to agree, other weights to give other ones, and a sleeping engine to leave its GPU."""
    agree, brought = max(apart) < CLOSE[device], changed > 5 * CLOSE[device]
    freed = device == "cpu" or memory["asleep"] < 0.6 * memory["awake"]
    wrong = [name for name, good in {"log-probs": agree, "new weights": brought, "sleep": freed}.items() if not good]
    lines = ["| moment | GiB in use |", "|---|---|", *(f"| {name} | {gib:.2f} |" for name, gib in memory.items())]
    lines += [
        "",
        f"mean difference of log-probs, sampler to actor: {apart[0]:.1e} nats before the sync, {apart[1]:.1e}",
    ]
    lines += [f"after it; the new weights moved them by {changed:.1e}. Sync: {seconds:.2f} s"]
    figures = f"{rate:.0f} tokens/s; log-probs {max(apart):.1e} nats apart; sync {seconds:.2f} s"
    return judged(not wrong, f"wrong: {', '.join(wrong)}; {figures}" if wrong else figures, "\n".join(lines))


async def sample(engine: VLLMEngine, num_requests: int, num_tokens: int) -> Turn:
    asked = [Sampling(max_tokens=num_tokens, ignore_eos=True, seed=seed) for seed in range(num_requests)]
    start = time.perf_counter()
    generations = await asyncio.gather(*(engine.generate(PROMPT, sampling) for sampling in asked))
    return Turn(list(generations), num_requests * num_tokens / (time.perf_counter() - start))


def mean_difference(actor: ActorWorker, turn: Turn) -> float:
    """In nats, over the sampled tokens."""
    rows = [(*PROMPT, *generation.ids) for generation in turn.generations]
    ids_T = torch.tensor([token for row in rows for token in row])
    mask_T = torch.tensor([place >= len(PROMPT) for row in rows for place in range(len(row))])
    batch = TrainBatch(torch.tensor([len(row) for row in rows]), {"ids": ids_T, "loss_mask": mask_T})
    temperature = actor.config.actor_rollout_ref.rollout.temperature
    answer = actor.engine.log_probs(batch, temperature)  # all rows, in order: this is the only rank
    sampled_N = torch.tensor([value for generation in turn.generations for value in generation.log_probs])
    return float((answer.tokens["log_prob"][mask_T] - sampled_N).abs().mean())


@torch.no_grad()
def change(actor: ActorWorker) -> None:
    for _, tensor in named_tensors(actor.engine.model_of("policy")):
        if tensor.dim() > 1:
            tensor.mul_(CHANGED)


async def sync(engine: VLLMEngine, actor: ActorWorker) -> float:
    """Seconds that it took."""
    start = time.perf_counter()
    folder = weight_folder()
    try:
        index, count = 0, 1
        while index < count:
            bucket = actor.export_weights(1, "policy", index, str(folder.path))
            await engine.load_weights(bucket)
            index, count = index + 1, bucket.count
        actor.release_weights()
    finally:
        folder.remove()
    return time.perf_counter() - start


def used(actor: ActorWorker) -> float:
    """GiB on the actor's GPU, of all processes; on CPU of this process."""
    memory = device_memory(actor.engine.device)
    memory.give_back()
    memory.restart_peak()
    usage = memory.usage()
    return (usage.process if usage.device is None else usage.device) / GIB


if __name__ == "__main__":
    run_child(check, ("--model", str))
