"""What goes between the driver and the ranks in a step of GRPO with a Top-k KL: bytes, seconds, and memory of a rank.

    python scripts/bench/data_plane.py --trajectories 2560 --tokens 2250 --ranks 8

Real Ray actors take the calls of a step (log-probs of the policy, then the update) without a model: they read what they
are sent and answer with as many numbers. The baseline sends the whole batch, as tensors, with every call, and has the
most likely tokens come and go. Both sides in turn, medians of `--rounds`. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import psutil
import ray
import torch

from verl.engine.batching import RankValues, flat_positions, merge_rows
from verl.engine.micro_batches import split_rows
from verl.protocol import TrainBatch
from verl.single_controller.cluster import init_patiently
from verl.single_controller.shared_batch import SharedBatch, SharedValues, merged, share
from verl.workers.roles import SCORED, ActorGroup

TOP_K = 32
MIB = 2**20


@ray.remote(num_cpus=0)
class Rank:
    """Reads what a rank of the actor is sent, and answers for its rows."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks

    def log_probs(self, sent: SharedBatch | TrainBatch) -> SharedValues | RankValues:
        batch = sent.fetch() if isinstance(sent, SharedBatch) else sent
        rows = split_rows(batch.lengths_B, self.num_ranks)[self.rank]
        num_tokens = len(flat_positions(batch.lengths_B, rows))
        found = RankValues(rows, {"log_prob": torch.rand(num_tokens), "entropy": torch.rand(num_tokens)})
        if isinstance(sent, SharedBatch):
            return SharedValues.of(found)
        found.tokens["top_index"] = torch.zeros(num_tokens, TOP_K, dtype=torch.int32)
        return found

    def update(self, sent: SharedBatch | TrainBatch) -> tuple[float, int]:
        """The sum of the advantages, and the bytes that are this process's own while it has the batch."""
        batch = sent.fetch() if isinstance(sent, SharedBatch) else sent
        own = psutil.Process().memory_full_info().uss
        return float(batch.tokens["advantages"].sum()), own

    def memory(self) -> int:
        return int(psutil.Process().memory_full_info().uss)


def make(num_rows: int, num_tokens: int) -> TrainBatch:
    lengths_B = torch.randint(num_tokens // 2, num_tokens * 3 // 2, (num_rows,))
    total = int(lengths_B.sum())
    tokens = {
        "ids": torch.randint(0, 150_000, (total,)),
        "loss_mask": torch.rand(total) < 0.6,
        "rollout_log_probs": torch.rand(total),
    }
    return TrainBatch(lengths_B, tokens, {"reward": torch.rand(num_rows), "group": torch.arange(num_rows) // 5})


def now(ranks: list[Any], batch: TrainBatch) -> dict[str, float]:
    """A step as the trainer does it."""
    begun = time.perf_counter()
    sent = share(batch, SCORED)
    answers = ray.get([rank.log_probs.remote(sent) for rank in ranks])
    found = merged(batch, answers)
    batch.tokens |= {"old_log_probs": found["log_prob"], "advantages": torch.rand(len(found["log_prob"]))}
    learnt_from = share(batch, ActorGroup.learns_from, ActorGroup.learns_from_rows)
    held = max(own for _, own in ray.get([rank.update.remote(learnt_from) for rank in ranks]))
    columns = {**learnt_from.tokens, **learnt_from.rows}
    going = sum(batch.tokens[name].nbytes for name in columns) + batch.lengths_B.nbytes
    coming = sum(array.nbytes for answer in answers for array in answer.tokens.values())
    return _figures(begun, going + coming, held)


def before(ranks: list[Any], batch: TrainBatch) -> dict[str, float]:
    """The whole batch with every call."""
    begun = time.perf_counter()
    parts = ray.get([rank.log_probs.remote(sent) for sent in [ray.put(batch)] for rank in ranks])
    found = {
        name: merge_rows(batch.lengths_B, [(one.rows, one.tokens[name]) for one in parts]) for name in parts[0].tokens
    }
    going = _size(batch)
    batch.tokens |= {"old_log_probs": found["log_prob"], "entropy": found["entropy"], "top_index": found["top_index"]}
    batch.tokens["advantages"] = torch.rand(len(found["log_prob"]))
    held = max(own for _, own in ray.get([rank.update.remote(sent) for sent in [ray.put(batch)] for rank in ranks]))
    coming = sum(value_T.nbytes for one in parts for value_T in one.tokens.values())
    return _figures(begun, going + _size(batch) + coming, held)


def _size(batch: TrainBatch) -> int:
    return sum(column.nbytes for column in (batch.lengths_B, *batch.tokens.values(), *batch.rows.values()))


def _figures(begun: float, num_bytes: int, held: int) -> dict[str, float]:
    seconds = time.perf_counter() - begun
    return {"seconds": seconds, "mib": num_bytes / MIB, "rank_mib": held / MIB}


def main() -> None:
    """Print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--trajectories", type=int, default=2560)
    parser.add_argument("--tokens", type=int, default=2250, help="of a trajectory, on average")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(0)
    init_patiently(num_cpus=1, log_to_driver=False, configure_logging=False)
    ranks = [Rank.remote(number, args.ranks) for number in range(args.ranks)]
    idle = max(ray.get([rank.memory.remote() for rank in ranks])) / MIB
    sides: dict[str, Callable[[list[Any], TrainBatch], dict[str, float]]] = {"before": before, "now": now}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, side in sides.items():
            batch = make(args.trajectories, args.tokens)
            rounds[name].append(side(ranks, batch))
    result: dict[str, Any] = {
        name: {key: statistics.median(one[key] for one in found) for key in found[0]} for name, found in rounds.items()
    }
    batch_mib = (_size(batch) + 2 * batch.tokens["advantages"].nbytes) / MIB  # without the two columns that came back
    print(
        f"{args.trajectories} trajectories of {args.tokens} tokens, {args.ranks} ranks; an idle rank has {idle:.0f} MiB"
    )
    print(f"{'':8}{'step s':>10}{'MiB sent':>10}{'rank MiB':>10}")
    for name in sides:
        one = result[name]
        print(f"{name:8}{one['seconds']:10.2f}{one['mib']:10.0f}{one['rank_mib']:10.0f}")
    result |= {"batch_mib": batch_mib, "idle_rank_mib": idle, "seconds": result["now"]["seconds"]}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
