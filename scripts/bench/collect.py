"""Seconds in which a run collects the trajectories of a step: driver, Ray, engines and retriever, without training.

    .venv/bin/python scripts/bench/collect.py --run runs/tinywiki_default_seed0 \
      --variant one_engine --variant two_engines actor_rollout_ref.rollout.num_engines=2

`--run` is a folder of scripts/quickstart.sh, of which the data and the warm-started policy are read. A `--variant` is a
name and the settings that make it; the variants take turns, each with its own engines, which have the processor to
themselves. Between two steps the engines are given the weights anew, as after an update. `seconds` is what a run logs
as timing_s/gen without sampling ahead; `processor_s` is of all processes of the variant, the driver's included.
`--retriever_ms` puts slow_retriever.py in front of the server. The last line is JSON, with medians of the steps.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from statistics import median

import psutil
import rollouts
import torch
from safetensors.torch import load_file

from verl.agent.environment import make_environment
from verl.config import Config
from verl.data.prompts import PromptSource
from verl.pretrained import load_policy_tokenizer
from verl.rollout.manager import RolloutManager
from verl.rollout.weight_stream import ExportCall, WeightStream, stream_buckets
from verl.single_controller import ResourcePool
from verl.single_controller.cluster import connect
from verl.trainer.sampling.collection import Collector
from verl.trainer.sampling.scoring import Scorer
from verl.weight_sync.buckets import Version, plan_buckets
from verl.weight_sync.memory import HostBuckets, weight_folder

BUCKET_MIB = 64.0
Row = dict[str, float]


def main() -> None:
    options = parser().parse_args()
    variants = options.variant or [["as_configured"]]
    with ExitStack() as stack:
        url = stack.enter_context(rollouts.retriever(options))
        connect(worker_logs=False)
        sides: dict[str, Side] = {}
        for name, *settings in variants:
            options.set = [*options.settings, *settings]
            sides[name] = Side(rollouts.config_of(options, url))
            stack.callback(sides[name].close)
        seen: dict[str, list[Row]] = {name: [] for name in sides}
        for step in range(1, options.steps + options.warm_up + 1):
            for name, side in sides.items():
                row = side.step(step)
                if step > options.warm_up:
                    seen[name].append(row)
    print(json.dumps({name: {key: median(row[key] for row in rows) for key in rows[0]} for name, rows in seen.items()}))


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--run", type=Path, required=True)
    found.add_argument("--config", default="tinywiki")
    found.add_argument("--steps", type=int, default=7)
    found.add_argument("--warm_up", type=int, default=2, help="steps before those, which do not count")
    found.add_argument("--retriever_ms", type=float, default=0.0)
    found.add_argument("--tail_ms", type=float, default=0.0, help="mean of the exponential part")
    found.add_argument("--draw", choices=["query", "request"], default="request", help="see slow_retriever.py")
    found.add_argument("--variant", nargs="+", action="append", metavar=("NAME", "key=value"))
    found.add_argument("--settings", nargs="*", default=[], metavar="key=value", help="of all variants")
    return found


class Side:
    """The engines of one variant, and what a run has beside them."""

    def __init__(self, config: Config) -> None:
        self.config = config
        before = set(_processes())
        self.manager = RolloutManager(config, ResourcePool(1, 1, "cpu"))
        self.weights = Weights(Path(config.actor_rollout_ref.model.path))
        tokenizer = load_policy_tokenizer(config)
        data = config.data
        tags = make_environment(config, tokenizer).tags
        prompts = PromptSource(data.train_files, tokenizer, max_start_length=data.max_start_length, tags=tags)
        self.collector = Collector(config, prompts, self.manager, Scorer(config, tokenizer))
        self.manager.check()
        self.processes = [psutil.Process(), *(set(_processes()) - before)]

    def step(self, step: int) -> Row:
        begun = time.perf_counter()
        self.manager.load_weights(self.weights.publish)
        synced, spent = time.perf_counter(), self._processor_s()
        collected = self.collector.collect(step)
        seconds, spent = time.perf_counter() - synced, self._processor_s() - spent
        sampled = collected.trained
        return {
            "seconds": round(seconds, 3),
            "trajectories_s": round(len(sampled) / seconds, 1),
            "processor_s": round(spent, 2),
            "sync_s": round(synced - begun, 3),
            "turns": round(sum(one.num_turns for one in sampled) / len(sampled), 2),
            "carried": float(len(self.collector.carried)),
        }

    def close(self) -> None:
        self.manager.shutdown()
        self.weights.close()

    def _processor_s(self) -> float:
        spent = [process.cpu_times() for process in self.processes if process.is_running()]
        return sum(one.user + one.system for one in spent)


class Weights:
    """The policy's, as a trainer of one rank gives them to engines."""

    def __init__(self, policy: Path) -> None:
        self._named = load_file(policy / "model.safetensors")
        self._folder = weight_folder()
        self._memory = HostBuckets(self._folder.path, int(BUCKET_MIB * 2**20))
        self._versions = count(1)

    def publish(self) -> WeightStream:
        version, dtype = next(self._versions), torch.float32
        plan = plan_buckets(self._named.items(), dtype, BUCKET_MIB)

        def export(index: int) -> ExportCall:
            exported = self._memory.export(Version(self._named, plan, dtype, version), index)
            return lambda: [exported]

        return WeightStream(stream_buckets(export), self._memory.release)

    def close(self) -> None:
        self._memory.close()
        self._folder.remove()


def _processes() -> Iterator[psutil.Process]:
    """All that belong to this one's Ray, the engines' own included."""
    yield from psutil.Process().children(recursive=True)


if __name__ == "__main__":
    main()
