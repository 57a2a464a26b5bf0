"""What the driver does alone in a step, while all GPUs wait, and what is written beside the next step.

    .venv/bin/python scripts/bench/driver_step.py [--trajectories 2560] [--tokens 2250] [--ranks 8] [--rounds 3]

Trajectories have the shape of searches: prompt, then a thought with a query and passages in turn, then an answer, with
log-probs and events; all seeded. Their tokens are those of the documentation, by a tokenizer trained on it. The ranks
are real Ray actors without a model (data_plane.py): they read what they are sent and answer with random log-probs.
With --sequences 4 the first three replies begin further sequences, of as many tokens: compare with --sequences 1, both
with --searches 3.

A round does what a step of GRPO does, in its order: `batch`, `send` (its columns to the ranks, the advantages later),
`merge` (the ranks' answers, once they are there), `advantages`, `metrics`, `health`, `store` (the hand-over to the
background writer); then it waits until the writer is done (`written`: from the hand-over to the file). `inline` is the
same write as part of the step. Medians over the rounds; the last line is JSON: `seconds` is the critical path, the sum
of all but the last two.
"""

from __future__ import annotations

import argparse
import json
import pickle
import random
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from data_plane import Rank
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from verl.algorithms.advantages import ADVANTAGES, AdvantageInput, AdvantageSettings
from verl.engine.micro_batches import split_rows
from verl.protocol import Prompt, Segment, Source, Status, TrainBatch, Trajectory
from verl.single_controller.cluster import init_patiently
from verl.single_controller.shared_batch import merged, share
from verl.tracking.background_writer import BackgroundWriter
from verl.tracking.spans import Timer
from verl.tracking.trajectory_store import write_trajectories
from verl.trainer.estimates import for_losses, token_rewards
from verl.trainer.metrics.batch import step_metrics
from verl.trainer.metrics.health import health_metrics
from verl.workers.roles import SCORED, ActorGroup

ROOT = Path(__file__).resolve().parents[2]
PROMPT_TOKENS = 200
POLICY_SHARE = 0.35  # of the tokens after the prompt
GROUP = 5
CRITICAL = ("batch", "send", "merge", "advantages", "metrics", "health", "store")
BESIDE = ("written", "inline")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=2560)
    parser.add_argument("--tokens", type=int, default=2250, help="mean tokens of a trajectory, its prompt included")
    parser.add_argument("--searches", type=int, help="of each trajectory (1 to 4, by chance)")
    parser.add_argument("--sequences", type=int, default=1, help="of each trajectory that has so many turns")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write (a temporary folder, removed at the end)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = train_tokenizer()
    trajectories = searches(tokenizer, args.trajectories, args.tokens, args.searches, args.sequences)
    num_tokens = sum(len(trajectory.ids) for trajectory in trajectories)
    init_patiently(num_cpus=1, log_to_driver=False, configure_logging=False)
    ranks = [Rank.remote(rank, args.ranks) for rank in range(args.ranks)]
    ray.get([rank.memory.remote() for rank in ranks])
    timers = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for number in range(args.rounds):
            timers.append(one_round(trajectories, tokenizer, ranks, Path(folder), number))
        num_bytes = max(path.stat().st_size for path in Path(folder).rglob("*.parquet"))
    parts = {part: statistics.median(timer.seconds[part] for timer in timers) for part in CRITICAL + BESIDE}
    show(parts, f"{len(trajectories)} trajectories, {num_tokens} tokens, a file of {num_bytes / 2**20:.1f} MiB")


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE on the documentation of this checkout."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train([str(path) for path in sorted((ROOT / "docs").glob("*.md"))], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def searches(
    tokenizer: PreTrainedTokenizerFast, number: int, mean_tokens: int, searches_of_each: int | None, num_sequences: int
) -> list[Trajectory]:
    """Groups of `GROUP` with one prompt each; lengths spread by a fifth around the mean."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
    words = tokenizer("\n".join(texts))["input_ids"]
    rng = random.Random(0)

    def draw(size: int) -> tuple[int, ...]:
        start = rng.randrange(len(words) - size)
        return tuple(words[start : start + size])

    trajectories = []
    for row in range(number):
        if row % GROUP == 0:
            truth = {"reward_model": {"ground_truth": {"target": ["Lune"]}}, "question": f"Question {row}?"}
            prompt = Prompt(draw(PROMPT_TOKENS), "nq", truth)
        trajectory = Trajectory(f"group-{row // GROUP}", prompt, [Segment(Source.PROMPT, prompt.ids)])
        num_response = int(max(20, mean_tokens - PROMPT_TOKENS) * rng.uniform(0.8, 1.2))
        num_searches = searches_of_each or rng.randint(1, 4)
        num_thought = max(4, int(num_response * POLICY_SHARE) // (num_searches + 1))
        num_passages = max(4, int(num_response * (1 - POLICY_SHARE)) // num_searches)
        for turn in range(num_searches):
            said, found = draw(num_thought), draw(num_passages)
            source = Source.CONTEXT if turn + 1 < num_sequences else Source.ENVIRONMENT
            trajectory.segments += [policy(said, rng), Segment(source, found)]
            trajectory.events.append(
                {
                    "turn": turn,
                    "text": tokenizer.decode(said),
                    "query": f"query {row} {turn}",
                    "executed": True,
                    "document_ids": [str(rng.randrange(21_000_000)) for _ in range(3)],
                    "num_found": 3,
                    "milliseconds": rng.uniform(5, 50),
                    "observation": tokenizer.decode(found),
                    "action": "search",
                    "valid": True,
                    "empty_think": False,
                }
            )
        answer = draw(num_thought)
        trajectory.segments.append(policy(answer, rng))
        trajectory.events.append({"turn": num_searches, "text": tokenizer.decode(answer), "action": "answer"})
        trajectory.status = Status.ANSWERED
        trajectory.num_searches, trajectory.num_turns = num_searches, num_searches + 1
        trajectory.num_valid_actions = num_searches + 1
        trajectory.reward = float(rng.random() < 0.4)
        trajectory.reward_components = {"exact_match": trajectory.reward}
        trajectories.append(pickle.loads(pickle.dumps(trajectory)))  # as from a worker: an object of its own a token
    return trajectories


def policy(ids: tuple[int, ...], rng: random.Random) -> Segment:
    return Segment(Source.POLICY, ids, tuple(-rng.expovariate(3.0) for _ in ids))


def one_round(
    trajectories: list[Trajectory], tokenizer: PreTrainedTokenizerFast, ranks: list[Any], folder: Path, number: int
) -> Timer:
    timed, writer = Timer(), BackgroundWriter()
    with timed("batch"):
        batch = TrainBatch.from_trajectories(trajectories)
    estimate(batch, ranks, timed)
    report(trajectories, batch, len(ranks), timed)
    write = partial(write_trajectories, folder, "train", number, trajectories, tokenizer.decode)
    with timed("written"):
        with timed("store"):
            writer.hand_over(write)
        writer.drain()
    writer.close()
    with timed("inline"):
        write()
    return timed


def estimate(batch: TrainBatch, ranks: list[Any], timed: Timer) -> None:
    """Log-probs from the ranks, advantages, and both back to the ranks."""
    with timed("send"):
        sent = share(batch, SCORED)
        asked = [rank.log_probs.remote(sent) for rank in ranks]
    ray.wait(asked, num_returns=len(asked))
    with timed("merge"):
        found = merged(batch, ray.get(asked))
        batch.tokens |= {"old_log_probs": found["log_prob"], "entropy": found["entropy"]}
    with timed("advantages"):
        reward_T, mask_T = token_rewards(batch), batch.tokens["loss_mask"]
        group_R = batch.of_rollouts(batch.rows["group"])
        given = AdvantageInput(reward_T, mask_T, batch.rollout_of_token_T, group_R, None, None, None)
        advantage_T = ADVANTAGES["grpo"](given, AdvantageSettings(1.0, 1.0, "group_std")).advantage_T
        batch.tokens |= {"rewards": reward_T, "advantages": advantage_T}
    with timed("send"):
        sent = share(for_losses(batch), ActorGroup.learns_from, ActorGroup.learns_from_rows)
        updated = [rank.update.remote(sent) for rank in ranks]
    ray.get(updated)


def report(trajectories: list[Trajectory], batch: TrainBatch, num_ranks: int, timed: Timer) -> None:
    partitions = split_rows(batch.lengths_B, num_ranks)
    with timed("metrics"):
        step_metrics(trajectories, batch, seconds={"gen": 1.0}, partitions=partitions, max_prompt_length=PROMPT_TOKENS)
    with timed("health"):
        health_metrics(trajectories, batch)


def show(parts: dict[str, float], what: str) -> None:
    print(f"\n{what}")
    for part, seconds in parts.items():
        print(f"{part:12}{seconds:10.3f} s{'' if part in CRITICAL else '   beside the critical path'}")
    seconds = sum(parts[part] for part in CRITICAL)
    print(f"{'in all':12}{seconds:10.3f} s")
    print(json.dumps({"seconds": round(seconds, 4)} | {part: round(value, 4) for part, value in parts.items()}))


if __name__ == "__main__":
    main()
