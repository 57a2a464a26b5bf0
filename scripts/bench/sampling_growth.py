"""How the sampling part of a step grows with batch, turns and length: fitted exponents, on CPU.

    .venv/bin/python scripts/bench/sampling_growth.py [--rounds 3] [--longest 4096]

A run's vLLM engine samples with the random Qwen2 of step_growth.py, and the points are those of step_growth.py: a row
has a prompt of 64 tokens, then turns of 64 sampled tokens and 192 appended ones, as from a retriever that answers at
once. All rows of a point are sampled beside each other; every turn continues from the cache that the one before left.
Seconds are the processor's, of the engine's process and of this one: the least of the rounds, each with ids of its own.
An iteration of the engine samples a token of every row, so that more rows cost less than in proportion.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from step_growth import MODEL, NUMBERS, POLICY, PROMPT, Point, arguments, settings, slope, write_model

from verl.agent.environment import Sampling
from verl.rollout.engine import VLLMEngine
from verl.rollout.worker import build_engine

ROWS = (1, 2, 4, 8, 16, 32)


def main() -> None:
    rounds, lengths = arguments(__doc__)
    points = [Point("batch", number, number, 2) for number in ROWS]
    points += [Point("turns", number, 1, number) for number in NUMBERS]
    points += [Point("sampled length", length, 1, 1, length - PROMPT, 0) for length in lengths]
    points += [Point("read length", length, 1, 1, POLICY, length - PROMPT - POLICY) for length in lengths]
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "model")
        report(points, asyncio.run(seconds_of(Path(folder), points, rounds)))


async def seconds_of(folder: Path, points: Sequence[Point], rounds: int) -> list[float]:
    """The processor's, of each point."""
    engine = build_engine(settings(folder / "model", folder), max(point.length for point in points) + 1, "cpu")
    await engine.start()
    try:
        return [min([await sample(engine, point, number) for number in range(rounds + 1)][1:]) for point in points]
    finally:
        engine.shutdown()


async def sample(engine: VLLMEngine, point: Point, number: int) -> float:
    """Seconds of the processor for the point's rows; other `number`s are other ids, which no cache knows."""
    draw = random.Random(f"{point} {number}")
    before = processor_s()

    async def row(seed: int) -> None:
        ids = [draw.randrange(MODEL["vocab_size"]) for _ in range(PROMPT)]
        if point.axis == "read length":  # what is read is there before the only turn
            ids += [draw.randrange(MODEL["vocab_size"]) for _ in range(point.retrieved)]
        for _ in range(point.turns):
            turn = await engine.generate(ids, Sampling(max_tokens=point.policy, ignore_eos=True, seed=seed))
            assert len(turn.ids) == point.policy
            ids += [*turn.ids, *(draw.randrange(MODEL["vocab_size"]) for _ in range(point.retrieved))]

    await asyncio.gather(*(row(seed) for seed in range(point.rows)))
    return processor_s() - before


def processor_s() -> float:
    this = psutil.Process()
    spent = [process.cpu_times() for process in (this, *this.children(recursive=True))]
    return sum(one.user + one.system for one in spent)


def report(points: Sequence[Point], seconds: Sequence[float]) -> None:
    print("| axis | x | tokens | of them sampled | seconds | ms a sampled token |\n|---|---|---|---|---|---|")
    exponents = {}
    for axis in dict.fromkeys(point.axis for point in points):
        along = [(point, spent) for point, spent in zip(points, seconds, strict=True) if point.axis == axis]
        for point, spent in along:
            sampled = point.rows * point.turns * point.policy
            tokens = point.rows * point.length
            print(f"| {axis} | {point.x} | {tokens} | {sampled} | {spent:.3f} | {1000 * spent / sampled:.2f} |")
        exponents[axis] = round(slope([float(point.x) for point, _ in along], [spent for _, spent in along]), 2)
    print("\nexponents\n| axis | |\n|---|---|")
    for axis, exponent in exponents.items():
        print(f"| {axis} | {exponent} |")
    print(json.dumps({"exponents": exponents}))


if __name__ == "__main__":
    main()
