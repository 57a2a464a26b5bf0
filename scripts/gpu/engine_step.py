"""One training step of the actor on one GPU, pass by pass, with torch and transformers alone: memory and time of each
beside the dry run's, and whether the numbers are those of a CPU.

    .venv/bin/python scripts/gpu/engine_step.py [--shape 3b] [--rounds 3] [--device cuda] [key=value ...]

Random weights, no download, no Ray, no vLLM. The settings are those of train_grpo_ema_pg.sh with a GPU's part of its
micro-batches; key=value changes them. Batches are as large as the settings allow, and every token is trained. A second
process opens the exported weights, as an engine does, and compares their checksums. The exit status is 1 when something
is wrong; memory and time are for reading. `--without_liger` times log-probs and update with and without the fused
layers, in turn. `--device cpu --shape tiny` tries the script itself.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from random_model import write_policy
from shapes import SHAPES

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from verl.config import Config, load_config
from verl.config.rules.predicates import has_anchor
from verl.engine.device.memory import device_memory
from verl.engine.device.runtime import init_process_group
from verl.engine.device.sharding import local, reshard
from verl.engine.files.checksum import sums_of
from verl.engine.hf_model import weights_of
from verl.engine.policy_engine import PolicyEngine
from verl.phases import Phase
from verl.planning.dry_run.passes import LargestPass, LargestPasses
from verl.planning.dry_run.roles import run_role
from verl.protocol import TrainBatch
from verl.rollout.weight_sync import open_weights
from verl.weight_sync.export import WeightExporter

GIB = 2**30
ROLE = "actor_rollout_ref"
SETTINGS = (
    *("data.train_files=-", "data.val_files=-", "trainer.n_gpus_per_node=1", "algorithm.adv_estimator=grpo"),
    *("data.max_prompt_length=4096", "data.max_response_length=500", f"{ROLE}.rollout.n_agent=5"),
    *("data.train_batch_size=512", f"{ROLE}.actor.ppo_mini_batch_size=256", f"{ROLE}.actor.ppo_micro_batch_size=8"),
    *(f"{ROLE}.rollout.log_prob_micro_batch_size=16", f"{ROLE}.ref.log_prob_micro_batch_size=16"),
    *(f"{ROLE}.model.enable_gradient_checkpointing=true", f"{ROLE}.model.use_remove_padding=true"),
    *(f"{ROLE}.actor.use_kl_loss=true", f"{ROLE}.actor.kl_loss_type=full_reverse", f"{ROLE}.actor.kl_topk_tokens=32"),
    *(f"{ROLE}.actor.use_kl_iw=true", f"{ROLE}.actor.kl_loss_coef=0.001", f"{ROLE}.actor.entropy_coeff=0.0"),
    *(
        "algorithm.ref_policy_ema_tau=0.9",
        "algorithm.ref_policy_ema_update_period=10",
        *(f"{ROLE}.rollout.dtype=bfloat16", f"{ROLE}.rollout.tensor_model_parallel_size=1"),
    ),
)
EXACT = (f"{ROLE}.actor.fsdp_config.mixed_precision.param_dtype=float32", f"{ROLE}.actor.optim.lr=1e-3")
CLOSE = 1e-4  # of float32 on two devices: log-probs in nats, and the way of the weights relative to its length
LENGTHS = (300, 17, 120, 256)


class Figures(NamedTuple):
    """Of one pass: median seconds, and the most bytes in tensors and in the allocator's segments (0 on a CPU)."""

    name: str
    seconds: float
    allocated: int
    held: int
    num_tokens: int | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="3b")
    parser.add_argument("--rounds", type=int, default=3, help="after a first one that is not counted")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--without_liger", action="store_true", help="also time passes without the fused layers")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    args = parser.parse_args()
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        init_process_group(0, 1, f"file://{folder}/store", device)
        same = same_as_on_cpu(folder / "tiny", device)
        num_parameters = write_policy(folder / "model", args.shape, device)
        print(f"{args.shape}: {num_parameters / 1e9:.2f} billion random parameters", flush=True)
        config = config_of(folder / "model", device, args.settings)
        figures, synced = step(config, device, folder, args.rounds, args.without_liger)
        dist.destroy_process_group()
        beside_the_dry_run(config, device, figures)
    sys.exit(0 if same and synced else 1)


def config_of(model: Path, device: torch.device, settings: Sequence[str]) -> Config:
    places = [
        f"{ROLE}.model.path={model}",
        f"trainer.default_local_dir={model.parent}",
        f"trainer.device={device.type}",
    ]
    return load_config("ppo_trainer", [*SETTINGS, *places, *settings])


def same_as_on_cpu(folder: Path, device: torch.device) -> bool:
    """Two updates of a tiny policy in float32 and its anchor's step: log-probs, and where the weights went."""
    write_policy(folder, "tiny", torch.device("cpu"))
    few = [f"{ROLE}.actor.ppo_micro_batch_size=2", f"{ROLE}.actor.ppo_mini_batch_size={len(LENGTHS)}"]
    found = []
    for where in (torch.device("cpu"), device):
        config = config_of(folder, where, [*EXACT, *few, "algorithm.ref_policy_ema_update_period=1"])
        engine = PolicyEngine(config, where, 2, with_anchor=True)
        before = parameters_of(engine, "policy")
        for seed in (0, 1):
            engine.update_and_score(random_batch(seed))
        engine.follow_anchor(0.5)
        moved = [parameters_of(engine, which) - before for which in ("policy", "anchor")]
        found.append((*moved, engine.log_probs(random_batch(2), 1.0).tokens["log_prob"].double()))
    away = [float((there - here).norm() / here.norm()) for here, there in zip(*found, strict=True)]
    largest = float((found[1][2] - found[0][2]).abs().max())
    passed = max(away[:2]) < CLOSE and largest < CLOSE
    print(
        f"{'PASS' if passed else 'FAIL'}  float32 on {device.type} and on the CPU: the policy's way {away[0]:.1e} "
        f"apart, the anchor's {away[1]:.1e}, log-probs {largest:.1e} nats at most",
        flush=True,
    )
    return passed


def parameters_of(engine: PolicyEngine, which: str) -> torch.Tensor:
    """All of one model in a float64 vector on the CPU."""
    model = engine.policy if which == "policy" else engine.anchor
    assert model is not None
    reshard(model)
    return torch.cat([local(tensor).double().flatten().cpu() for tensor in model.parameters()])


def random_batch(seed: int) -> TrainBatch:
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(LENGTHS)
    ids_T = torch.randint(0, SHAPES["tiny"]["vocab_size"], (num_tokens,), generator=generator)
    mask_T = torch.rand(num_tokens, generator=generator) < 0.6
    tokens = {"ids": ids_T, "loss_mask": mask_T, "advantages": torch.randn(num_tokens, generator=generator)}
    return TrainBatch(torch.tensor(LENGTHS), tokens)


def step(
    config: Config, device: torch.device, folder: Path, rounds: int, without_liger: bool
) -> tuple[list[Figures], bool]:
    """Every pass `rounds` times after a first one; and whether the weights arrived."""
    largest = LargestPasses("actor", config, 1)
    started = time.perf_counter()
    engine = PolicyEngine(largest.config, device, 2, has_anchor(config))
    print(f"loaded in {time.perf_counter() - started:.0f} s", flush=True)
    largest.first_update(engine)
    if without_liger:
        in_turn(engine, list(largest.of_actor(engine)), device, rounds)
    arrived: list[bool] = []
    with Reader(device) as reader:
        sync = LargestPass(Phase.SYNC, "weight sync", lambda: arrived.append(synced(engine, config, folder, reader)))
        figures = [measured(one, device, rounds) for one in [*largest.of_actor(engine), sync]]
    print(f"{'PASS' if all(arrived) else 'FAIL'}  the second process read the exported weights", flush=True)
    return figures, all(arrived)


def in_turn(engine: PolicyEngine, passes: Sequence[LargestPass], device: torch.device, rounds: int) -> None:
    """Time the passes through the models with and without fused layers, one after the other in every round."""
    models = [engine.policy] if engine.anchor is None else [engine.policy, engine.anchor]
    fused = {
        module: vars(module)["forward"] for model in models for module in model.modules() if "forward" in vars(module)
    }
    if not fused:
        print("SKIP  no layer is fused: that needs CUDA and the package liger-kernel")
        return
    memory = device_memory(device)
    for one in (one for one in passes if one.num_tokens):
        seconds: dict[bool, list[float]] = {True: [], False: []}
        peak = {}
        for number in range(2 * (rounds + 1)):
            for module, forward in fused.items():
                vars(module).pop("forward", None)
                if number % 2:
                    module.forward = forward
            memory.restart_peak()
            memory.wait()
            started = time.perf_counter()
            one.run()
            memory.wait()
            seconds[bool(number % 2)].append(time.perf_counter() - started)
            peak[bool(number % 2)] = torch.cuda.max_memory_allocated(device) / GIB
        without, with_liger = (statistics.median(seconds[on][1:]) for on in (False, True))
        print(
            f"{one.name}, {one.num_tokens} tokens: {without:.3f} s without Liger, {with_liger:.3f} s with it "
            f"({1 - with_liger / without:.1%} less); {peak[False]:.2f} and {peak[True]:.2f} GiB of tensors; all: "
            + "; ".join(" ".join(f"{second:.3f}" for second in seconds[on][1:]) for on in (False, True)),
            flush=True,
        )


def measured(one: LargestPass, device: torch.device, rounds: int) -> Figures:
    memory, seconds = device_memory(device), []
    for _ in range(rounds + 1):
        memory.restart_peak()
        memory.wait()
        started = time.perf_counter()
        one.run()
        memory.wait()
        seconds.append(time.perf_counter() - started)
    on_gpu = device.type == "cuda"
    peaks = (torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)) if on_gpu else (0, 0)
    found = Figures(one.name, statistics.median(seconds[1:]), *peaks, one.num_tokens)
    print(
        f"{found.name}: {found.seconds:.2f} s, {found.allocated / GIB:.2f} GiB of tensors, {found.held / GIB:.2f} held",
        flush=True,
    )
    return found


class Reader:
    """A second process that opens what is exported, and says whether its checksums are the trainer's."""

    def __init__(self, device: torch.device) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=read_exports, args=(other, str(device)))

    def __enter__(self) -> Callable[..., bool]:
        self.process.start()
        return self.read

    def read(self, exported: object) -> bool:
        self.connection.send(exported)
        if not self.connection.poll(120):
            raise RuntimeError("the process that reads the exported weights does not answer")
        return bool(self.connection.recv())

    def __exit__(self, *_: object) -> None:
        self.connection.close()
        self.process.join(10)
        self.process.kill()


def read_exports(connection: Connection, device: str) -> None:
    while True:
        try:
            exported = connection.recv()
        except EOFError:
            return
        weights = open_weights(exported.exports, torch.device(device))
        same = sums_of(weights.items()) == exported.sums
        weights.clear()
        connection.send(same)


def synced(engine: PolicyEngine, config: Config, folder: Path, read: Callable[..., bool]) -> bool:
    """All buckets, one after the other."""
    reshard(engine.policy)
    exporter = WeightExporter(config, engine.device, folder)
    same, index, count = True, 0, 1
    while index < count:
        exported = exporter.export(weights_of(engine.policy.model), 1, index)
        same &= read(exported)
        index, count = index + 1, exported.count
    exporter.close()
    return same


def beside_the_dry_run(config: Config, device: torch.device, figures: Sequence[Figures]) -> None:
    """A table of what was measured and what the dry run says of the same passes."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"\ntorch {torch.__version__}, {name}; GiB of tensors and of the allocator's segments, measured and dry run")
    estimates = {one.name: one for one in run_role("actor", copy.deepcopy(config), device.type).passes}
    print(f"{'':20}{'s':>8}{'tokens/s':>10}{'TFLOP/s':>9}{'tensors':>9}{'dry run':>9}{'held':>8}{'dry run':>9}")
    for found in figures:
        estimate = estimates[found.name]
        rate = f"{found.num_tokens / found.seconds:.0f}" if found.num_tokens else ""
        print(
            f"{found.name:20}{found.seconds:8.2f}{rate:>10}{estimate.work.flops / found.seconds / 1e12:9.1f}"
            f"{found.allocated / GIB:9.2f}{estimate.peak.allocated / GIB:9.2f}"
            f"{found.held / GIB:8.2f}{estimate.peak.held / GIB:9.2f}"
        )


if __name__ == "__main__":
    main()
