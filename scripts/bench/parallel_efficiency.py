"""How much of a rank's work is left for learning when there are more of them: measured, and as the planner says.

    .venv/bin/python scripts/bench/parallel_efficiency.py [--ranks 1 2 4] [--hidden 512] [--layers 6] [--rows 16]

The same batch of full rows is scored and learned from (log-probs of policy and anchor, then one update) by 1, 2 and 4
ranks of FSDP2 over gloo, in turns. Ranks may be more than cores: what counts is the time that all of them spend on
cores, the median over the rounds. The efficiency is that of one rank divided by that of all. The planner's is worked
out from a dry run of each number of ranks and what `verl.planning.plan.calibrate` measures here before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.multiprocessing as mp
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl.config import Config, load_config
from verl.engine.device.runtime import init_process_group
from verl.engine.policy_engine import PolicyEngine
from verl.phases import Phase
from verl.planning.dry_run.machine import Cost, Machine
from verl.planning.dry_run.roles import run_role
from verl.planning.dry_run.run import no_warnings
from verl.planning.plan.calibrate import calibrated, rates_in_words
from verl.protocol import TrainBatch

CPU = torch.device("cpu")
VOCABULARY, WINDOW = 2048, 512  # of the latter, half is prompt
PASSES = ("log-probs", "anchor's log-probs", "update")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rows", type=int, default=16, help="of a step, each of 512 tokens")
    parser.add_argument("--rows_at_once", type=int, default=2, help="of a rank")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder), options)
        machine = calibrated(CPU)
        print(rates_in_words(machine))
        groups = {number: Ranks(number, model, options) for number in options.ranks}
        measured: dict[int, list[float]] = {number: [] for number in options.ranks}
        for turn in range(options.rounds + 1):
            for number, group in groups.items():
                seconds = group.step()
                if turn:  # the first is for warming up
                    measured[number].append(seconds)
        report({number: statistics.median(of) for number, of in measured.items()}, model, options, machine)


def report(measured: dict[int, float], model: Path, options: argparse.Namespace, machine: Machine) -> None:
    planned = {number: cost_of(config_of(model, number, options), machine) for number in measured}
    one = min(measured)
    print(f"{'ranks':>5}{'core s':>9}{'planned':>9}{'efficiency':>12}{'planned':>9}{'ratio':>7}  planned, of all ranks")
    worst = 1.0
    for number, seconds in measured.items():
        found, said = measured[one] / seconds, planned[one].seconds * one / (planned[number].seconds * number)
        worst = max(worst, said / found, found / said)
        parts = ", ".join(f"{name} {part * number:.1f}" for name, part in planned[number].parts.items() if part)
        total = planned[number].seconds * number
        print(f"{number:>5}{seconds:9.1f}{total:9.1f}{found:12.2f}{said:9.2f}{said / found:7.2f}  {parts}")
    print(json.dumps({"largest_ratio": round(worst, 3), "at_most": 1.2}))


def cost_of(config: Config, machine: Machine) -> Cost:
    """Of one rank, all rows at their limit."""
    with no_warnings():
        role = run_role("actor", config, "cpu", (Phase.SCORE, Phase.UPDATE))
    costs = [
        machine.cost(one.work, role.groups).times(max(1.0, one.times)) for one in role.passes if one.name in PASSES
    ]
    return sum(costs, Cost())


def config_of(model: Path, num_ranks: int, options: argparse.Namespace) -> Config:
    actor = "actor_rollout_ref.actor"
    return load_config(
        "tinywiki",
        [
            *("data.train_files=none", "data.val_files=none", f"data.train_batch_size={options.rows}"),
            *(f"data.max_prompt_length={WINDOW // 2}", f"actor_rollout_ref.rollout.response_length={WINDOW // 2}"),
            *(f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.rollout.n_agent=1"),
            *(
                "algorithm.adv_estimator=reinforce",
                f"{actor}.kl_loss_type=low_var_kl",
                f"{actor}.ppo_mini_batch_size={options.rows}",
            ),
            *(
                f"{actor}.use_rollout_log_probs=false",
                f"{actor}.old_log_probs=score",  # each pass by itself, as `Ranks` runs them
                "actor_rollout_ref.ref.log_probs=score",
                f"{actor}.ppo_max_token_len_per_gpu={WINDOW * options.rows_at_once}",
            ),
            *(f"actor_rollout_ref.{part}.log_prob_use_dynamic_bsz=true" for part in ("rollout", "ref")),
            *(
                f"actor_rollout_ref.{part}.log_prob_max_token_len_per_gpu={WINDOW * options.rows_at_once}"
                for part in ("rollout", "ref")
            ),
            f"trainer.n_gpus_per_node={num_ranks}",
        ],
    )


def save_model(folder: Path, options: argparse.Namespace) -> Path:
    heads = max(1, options.hidden // 64)
    sizes = {"hidden_size": options.hidden, "intermediate_size": 4 * options.hidden, "vocab_size": VOCABULARY}
    config = Qwen2Config(
        **sizes, num_hidden_layers=options.layers, num_attention_heads=heads, num_key_value_heads=heads
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    return folder / "model"


def full_rows(rows: int) -> TrainBatch:
    """Every token is trained."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = rows * WINDOW
    names = ("advantages", "old_log_probs", "ref_log_probs", "rollout_log_probs")
    tokens = {name: torch.randn(num_tokens, generator=generator) for name in names}
    tokens |= {
        "ids": torch.randint(0, VOCABULARY, (num_tokens,), generator=generator),
        "loss_mask": torch.ones(num_tokens, dtype=torch.bool),
    }
    return TrainBatch(torch.full((rows,), WINDOW), tokens)


class Ranks:
    """Processes that wait for a step."""

    def __init__(self, number: int, model: Path, options: argparse.Namespace) -> None:
        context = mp.get_context("spawn")
        self._lines: list[Connection] = []
        for rank in range(number):
            here, there = context.Pipe()
            context.Process(target=serve, args=(there, rank, number, model, options), daemon=True).start()
            self._lines.append(here)
        for line in self._lines:
            line.recv()

    def step(self) -> float:
        """Seconds that all of them were on cores."""
        for line in self._lines:
            line.send(None)
        return sum(line.recv() for line in self._lines)


def serve(line: Connection, rank: int, num_ranks: int, model: Path, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    init_process_group(rank, num_ranks, f"file://{model.parent}/rendezvous-{num_ranks}", CPU)
    config = config_of(model, num_ranks, options)
    with no_warnings():
        engine = PolicyEngine(config, CPU, 1000, with_anchor=True)
    batch = full_rows(options.rows)
    line.send(None)
    with contextlib.suppress(EOFError):  # the other end is done
        while True:
            line.recv()
            start = time.process_time()
            learn(engine, batch)
            line.send(time.process_time() - start)


def learn(engine: PolicyEngine, batch: TrainBatch) -> Sequence[object]:
    return [engine.log_probs(batch, 1.0), engine.log_probs(batch, 1.0, "anchor"), engine.update(batch)]


if __name__ == "__main__":
    main()
