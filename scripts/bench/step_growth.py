"""How the training part of a step grows with batch, turns, length and ranks: fitted exponents, on CPU.

    .venv/bin/python scripts/bench/step_growth.py [--rounds 3] [--longest 4096]

Scoring (the anchor's log-probs) and update of a GRPO step with a sampled KL, by the real engine with a random Qwen2 of
two layers, one thread a rank. A row has a prompt of 64 tokens, then turns of 64 tokens of the policy and 192 retrieved
ones; where only the length grows, a row is a prompt and one turn of that length. Seconds are the processor's, which
other jobs on the machine change less than the clock's: the least of the rounds, after one for warming up. Attention is
measured apart, forward and backward. An exponent is the slope of the logarithms: 1 grows in proportion, 2 with the
square, and what every step costs however short it is (optimizer, Python) makes it smaller; so what is not attention is
fitted by a line, too. Of ranks, seconds are those of the slowest one: -1 is half the work on two.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.multiprocessing
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from verl.config import load_config
from verl.engine.device.runtime import init_process_group
from verl.engine.policy_engine import PolicyEngine
from verl.protocol import TrainBatch

CPU = torch.device("cpu")
PROMPT, POLICY, RETRIEVED = 64, 64, 192
MODEL = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "vocab_size": 2048}
BASE_ROWS = 8
NUMBERS = (1, 2, 4, 8)
_attend = functional.scaled_dot_product_attention


class Point(NamedTuple):
    """A step of `rows` rows, each of `turns` of `policy` and `retrieved` tokens; `x` is what grows along its axis."""

    axis: str
    x: int
    rows: int
    turns: int
    policy: int = POLICY
    retrieved: int = RETRIEVED

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return PROMPT + self.turns * (self.policy + self.retrieved)

    def batch(self) -> TrainBatch:
        """Random ids; the policy's tokens are trained."""
        generator = torch.Generator().manual_seed(0)
        turn = [True] * self.policy + [False] * self.retrieved
        mask = torch.tensor(([False] * PROMPT + turn * self.turns) * self.rows)
        size = len(mask)
        ids_T = torch.randint(0, MODEL["vocab_size"], (size,), generator=generator)
        tokens = {"ids": ids_T, "loss_mask": mask, "advantages": torch.randn(size, generator=generator)}
        return TrainBatch(torch.full((self.rows,), self.length), tokens)


class TimedAttention(torch.autograd.Function):
    """PyTorch's attention; `seconds` of the processor add up over forward and backward."""

    seconds = 0.0

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        start = time.process_time()
        with torch.enable_grad():
            ctx.inputs = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
            ctx.output = _attend(*ctx.inputs, **options)
        TimedAttention.seconds += time.process_time() - start
        return ctx.output.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        start = time.process_time()
        found = torch.autograd.grad(ctx.output, ctx.inputs, grads[0])
        TimedAttention.seconds += time.process_time() - start
        return (*found, None)


def arguments(description: str | None) -> tuple[int, list[int]]:
    """Of the command line: rounds, and the lengths of a row."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--longest", type=int, default=4096, help="tokens of a row, from 256 in powers of two")
    args = parser.parse_args()
    return args.rounds, [2**power for power in range(8, int(math.log2(args.longest)) + 1)]


def main() -> None:
    rounds, lengths = arguments(__doc__)
    points = [Point("batch", number, number, 2) for number in NUMBERS]
    points += [Point("turns", number, 1, number) for number in NUMBERS]
    points += [Point("length", length, 1, 1, POLICY, length - PROMPT - POLICY) for length in lengths]
    shared = [Point("ranks", BASE_ROWS, BASE_ROWS, 2)]
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "model")
        one = seconds_of(Path(folder), points + shared, 1, rounds)
        two = seconds_of(Path(folder), shared, 2, rounds)
    rows = [(p.axis, p.x, int(p.batch().lengths_B.sum()), *s) for p, s in zip(points, one, strict=False)]
    tokens = int(shared[0].batch().lengths_B.sum())
    rows += [("ranks", 1, tokens, *one[-1]), ("ranks", 2, tokens, *two[0])]
    report(rows)


def write_model(path: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192}
    Qwen2ForCausalLM(Qwen2Config(**MODEL, **heads)).save_pretrained(path)


def seconds_of(folder: Path, points: Sequence[Point], num_ranks: int, rounds: int) -> list[tuple[float, float]]:
    """Of each point, on the slowest rank: seconds of all, and of attention."""
    meeting = folder / f"ranks_{num_ranks}"
    meeting.mkdir()
    torch.multiprocessing.spawn(_rank, (num_ranks, folder / "model", meeting, points, rounds), num_ranks)
    ranks = [json.loads((meeting / f"{rank}.json").read_text()) for rank in range(num_ranks)]
    return [max(map(tuple, found)) for found in zip(*ranks, strict=True)]


def _rank(rank: int, num_ranks: int, model: Path, folder: Path, points: Sequence[Point], rounds: int) -> None:
    torch.set_num_threads(1)
    init_process_group(rank, num_ranks, f"file://{folder}/store", CPU)
    functional.scaled_dot_product_attention = (  # type: ignore[assignment]
        lambda q, k, v, **options: TimedAttention.apply(q, k, v, options)
    )
    engine = PolicyEngine(settings(model, folder), CPU, 100, with_anchor=True)
    found = []
    for point in points:
        batch = point.batch()
        measured = [step_seconds(engine, batch) for _ in range(rounds + 1)]
        found.append(min(measured[1:]))
    (folder / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def settings(model: Path, folder: Path) -> Any:
    actor = "actor_rollout_ref.actor"
    return load_config(
        "ppo_trainer",
        [
            "data.train_files=none.parquet",
            "data.val_files=none.parquet",
            f"actor_rollout_ref.model.path={model}",
            f"trainer.default_local_dir={folder}/run",
            "trainer.device=cpu",
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.rollout.n_agent=2",
            f"{actor}.use_kl_loss=true",
            f"{actor}.use_dynamic_bsz=true",
            f"{actor}.ppo_max_token_len_per_gpu=4096",
        ],
    )


def step_seconds(engine: PolicyEngine, batch: TrainBatch) -> tuple[float, float]:
    """The processor's: of all, and of attention."""
    TimedAttention.seconds, start = 0.0, time.process_time()
    engine.log_probs(batch, 1.0, "anchor")
    engine.update_and_score(batch)
    return time.process_time() - start, TimedAttention.seconds


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Of log y over log x, by least squares."""
    log_x, log_y = ([math.log(value) for value in values] for values in (xs, ys))
    mean_x, mean_y = sum(log_x) / len(log_x), sum(log_y) / len(log_y)
    spread = sum((x - mean_x) ** 2 for x in log_x)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(log_x, log_y, strict=True)) / spread


def report(rows: Sequence[tuple[str, int, int, float, float]]) -> None:
    print(
        "| axis | x | tokens | seconds | attention | all else | all else, us a token |\n|---|---|---|---|---|---|---|"
    )
    for axis, x, tokens, total, attention in rows:
        rest = total - attention
        print(f"| {axis} | {x} | {tokens} | {total:.3f} | {attention:.3f} | {rest:.3f} | {1e6 * rest / tokens:.0f} |")
    exponents: dict[str, dict[str, float]] = {}
    for axis in dict.fromkeys(row[0] for row in rows):
        along = [row for row in rows if row[0] == axis]
        xs = [float(row[1] if axis == "ranks" else row[2]) for row in along]
        parts = {
            "all": [row[3] for row in along],
            "attention": [row[4] for row in along],
            "all else": [row[3] - row[4] for row in along],
        }
        exponents[axis] = {name: round(slope(xs, values), 2) for name, values in parts.items()}
    print("\nexponents over tokens (of ranks: over ranks)\n| axis | all | attention | all else |\n|---|---|---|---|")
    for axis, found in exponents.items():
        print(f"| {axis} | {found['all']} | {found['attention']} | {found['all else']} |")
    lines = {axis: line_of(rows, axis) for axis in exponents if axis != "ranks"}
    print(
        "\nall but attention as a line: fixed seconds, us a token, farthest from it\n| axis | | | |\n|---|---|---|---|"
    )
    for axis, (fixed, per_token, farthest) in lines.items():
        print(f"| {axis} | {fixed:.3f} | {1e6 * per_token:.0f} | {farthest:.1%} |")
    print(json.dumps({"exponents": exponents, "lines": lines}))


def line_of(rows: Sequence[tuple[str, int, int, float, float]], axis: str) -> tuple[float, float, float]:
    """Seconds outside attention as fixed + tokens x each, by least squares of relative errors; and the largest one."""
    tokens, seconds = np.array([(row[2], row[3] - row[4]) for row in rows if row[0] == axis]).T
    each, fixed = np.polyfit(tokens, seconds, 1, w=1 / seconds)
    return round(fixed, 4), round(each, 9), round(float(np.abs((fixed + each * tokens) / seconds - 1).max()), 4)


if __name__ == "__main__":
    main()
