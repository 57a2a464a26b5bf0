"""What the driver pays for rollouts of many turns, whose context is summed up again and again.

    .venv/bin/python scripts/bench/long_rollout.py [--turns 50 100 200 400] [--repeats 3]

A scripted policy says 48 tokens a turn and reads 256, in a window of 4,400, without a model. Timed are the episode
itself, the batch of its sequences for the trainer, and its row in the trajectory file, each in milliseconds a turn:
the median of the repeats, which take the lengths in turn. Memory is the peak of Python's, in KiB a turn. If these stay
the same from row to row, the whole grows with the number of turns and no faster. The last column is the slowest of the
times beside that of the first row.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from search_r1.data.tinywiki.build import train_tokenizer
from verl.agent.environment import Environment, Generation, Outcome, Sampling
from verl.agent.episode import Compaction, EpisodeLimits, run_episode
from verl.agent.text import encode_text
from verl.protocol import Prompt, Status, TrainBatch, Trajectory
from verl.tracking.trajectory_store import write_trajectories

TOKENIZER = train_tokenizer([], vocab_size=300)  # a token is a byte
REPLY = "lorem ipsum dolor sit amet. " * 9
SAID = tuple(encode_text(TOKENIZER, "a query of some words, said by the policy in a turn"))[:48]


class Pages(Environment):
    async def step(self, prompt: Prompt, text: str, tools_allowed: bool) -> Outcome:
        return Outcome("search", True, False, REPLY, {"query": text, "document_ids": ["7"], "observation": REPLY})


class Policy:
    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
        return Generation(SAID, (-0.5,) * len(SAID), "stop")


def played(num_turns: int) -> Trajectory:
    """A rollout of as many searches, with a summary where the context has 4,000 tokens."""
    limits = EpisodeLimits(num_turns, 64, 4336, 4400, compaction=Compaction(4000, num_turns, 64, "Sum up."))
    row = {"question": "q", "reward_model": {"ground_truth": {"target": ["a"]}}}
    prompt = Prompt(encode_text(TOKENIZER, "A question of some words. " * 4), "bench", row)
    among = (Policy(), Pages(), TOKENIZER, Sampling(), limits, None)
    trajectory = asyncio.run(run_episode(prompt, "train-1-0", *among))
    assert trajectory.status is Status.TURN_LIMIT
    trajectory.reward = 0.0
    return trajectory


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Milliseconds, and what `work` returned."""
    started = time.perf_counter()
    result = work()
    return 1000 * (time.perf_counter() - started), result


def one_round(num_turns: int, folder: str) -> tuple[dict[str, float], Trajectory]:
    """Milliseconds a turn of each part, and the rollout."""
    episode_ms, trajectory = timed(lambda: played(num_turns))
    batch_ms, _ = timed(lambda: TrainBatch.from_trajectories([trajectory]))
    file_ms, _ = timed(lambda: write_trajectories(folder, "train", num_turns, [trajectory], TOKENIZER.decode))
    parts = {"episode": episode_ms, "batch": batch_ms, "file": file_ms}
    return {name: value / num_turns for name, value in parts.items()}, trajectory


def peak_kib(num_turns: int) -> float:
    tracemalloc.start()
    TrainBatch.from_trajectories([played(num_turns)])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description="What the driver pays for rollouts of many turns.")
    parser.add_argument("--turns", type=int, nargs="+", default=[50, 100, 200, 400])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    times: dict[int, list[dict[str, float]]] = defaultdict(list)
    rollouts = {}
    with tempfile.TemporaryDirectory() as folder:
        one_round(args.turns[0], folder)  # the first one imports and compiles
        for _ in range(args.repeats):
            for num_turns in args.turns:
                found, rollouts[num_turns] = one_round(num_turns, folder)
                times[num_turns].append(found)
    medians = {
        turns: {name: statistics.median(one[name] for one in found) for name in found[0]}
        for turns, found in times.items()
    }
    first = medians[args.turns[0]]
    print(
        "| turns | tokens | sequences | episode, ms a turn | batch | file | memory, KiB a turn | beside the first row |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for turns, parts in medians.items():
        rollout, slowest = rollouts[turns], max(parts[name] / first[name] for name in parts)
        cells = " | ".join(f"{parts[name]:.3f}" for name in ("episode", "batch", "file"))
        memory = peak_kib(turns) / turns
        print(f"| {turns} | {rollout.num_tokens} | {len(rollout.sequences)} | {cells} | {memory:.1f} | {slowest:.2f} |")


if __name__ == "__main__":
    main()
