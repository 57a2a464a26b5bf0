"""How well a step used its time and its devices: `perf/*`, under the names that veRL gives them where it has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from verl.config import Config
from verl.config.rules.placement import devices_of_nodes, num_ranks
from verl.engine.files.loading import ModelShape
from verl.planning.dry_run.place import GPUS
from verl.protocol import TrainBatch, Trajectory
from verl.rollout.episode_queue import Group
from verl.rollout.manager import RolloutManager
from verl.tracking.spans import Span, Timer, covered_s, write_timeline
from verl.workers.roles import ActorGroup, CriticGroup, spans_of

Spans = Mapping[str, Sequence[Span]]
GENERATE, ROLLOUTS = "generate", "rollouts"


class Performance:
    """Performance metrics of the steps of a run."""

    def __init__(
        self,
        config: Config,
        policy: ModelShape,
        rollouts: RolloutManager,
        actor: ActorGroup,
        critic: CriticGroup | None,
        run_dir: Path,
    ) -> None:
        self.rollouts, self.roles, self.run_dir = rollouts, (actor, critic), run_dir
        self.num_devices = sum(devices_of_nodes(config))
        self.saves = config.trainer.save_timeline
        self.utilisation = Utilisation.of(config, policy, actor.device_name(), num_ranks(config, "actor"))
        self._spans: dict[str, list[Span]] = {}

    def metrics(self, timer: Timer, work: SampledWork, trained: TrainBatch) -> dict[str, float]:
        """The metrics of a step that has ended, in which `work` was sampled."""
        engines, ranks = self.rollouts.take_spans(), spans_of(self.roles)
        self._spans = engines | ranks
        metrics = throughput_metrics(work.num_tokens, timer.seconds["step"], self.num_devices)
        metrics |= retriever_metrics(work.search_ms, timer.seconds["step"])
        if self.utilisation and (seconds := timer.seconds.get("update_actor")):
            metrics |= self.utilisation.metrics(trained.lengths_B, seconds)
        return metrics | idle_metrics([span for span in timer.spans if span.name == "step"], engines, ranks)

    def write_timeline(self, step: int, timer: Timer) -> None:
        """Write the step's timeline, with what came after the step, such as a validation. Raises StorageError."""
        for name, spans in (self.rollouts.take_spans() | spans_of(self.roles)).items():
            self._spans.setdefault(name, []).extend(spans)
        if self.saves:
            write_timeline(self.run_dir, step, {"driver": timer.spans} | self._spans)
        self._spans = {}


class SampledWork(NamedTuple):
    """The tokens and searches that were added to trajectories."""

    num_tokens: int  # with prompts, retrieved text and contexts
    num_policy_tokens: int
    search_ms: Sequence[float]  # how long each search took that was answered


class WorkOfStep:
    """The work of one step, on groups that it takes over from earlier steps and on new ones."""

    def __init__(self, begun: Sequence[Group]) -> None:
        """`begun`: the former, as they are when the step begins."""
        self._before = {key: (_sequence_ids(trajectory), _work_on(trajectory)) for key, trajectory in _numbered(begun)}

    def on(self, groups: Sequence[Group]) -> SampledWork:
        """The work that has been added to `groups` since. A trajectory that is sampled anew, after a failure or because
        the state of its episode was lost, is new from its first token.
        """
        num_tokens, num_policy_tokens, search_ms = 0, 0, list[float]()
        for key, trajectory in _numbered(groups):
            now, before = _work_on(trajectory), SampledWork(0, 0, ())
            if key in self._before and _begins_like(_sequence_ids(trajectory), self._before[key][0]):
                before = self._before[key][1]
            num_tokens += now.num_tokens - before.num_tokens
            num_policy_tokens += now.num_policy_tokens - before.num_policy_tokens
            search_ms += now.search_ms[len(before.search_ms) :]
        return SampledWork(num_tokens, num_policy_tokens, search_ms)


def _numbered(groups: Sequence[Group]) -> Iterator[tuple[tuple[Group, int, int], Trajectory]]:
    """The trajectories of the groups as far as they were sampled, each by its group, its number there, its attempt."""
    for group in groups:
        for index, trajectory in (group.begun | group.results).items():
            yield (group, index, group.attempts.get(index, 0)), trajectory


def _sequence_ids(trajectory: Trajectory) -> list[list[int]]:
    return [[token for segment in one for token in segment.ids] for one in trajectory.sequences]


def _begins_like(sequences: Sequence[list[int]], begun: Sequence[list[int]]) -> bool:
    """Whether each sequence of `begun` is there and only longer; a program may continue any of them."""
    pairs = zip(sequences, begun, strict=False)
    return len(sequences) >= len(begun) and all(ids[: len(before)] == before for ids, before in pairs)


def _work_on(trajectory: Trajectory) -> SampledWork:
    times = [event.get("milliseconds") for event in trajectory.events]
    search_ms = [float(ms) for ms in times if isinstance(ms, int | float)]
    return SampledWork(trajectory.num_tokens, trajectory.num_policy_tokens, search_ms)


def throughput_metrics(num_tokens: int, seconds: float, num_devices: int) -> dict[str, float]:
    """The metrics of throughput. `num_tokens`: those that the step added to trajectories, with prompts, retrieved
    text and the contexts of further sequences.

    `perf/throughput` is per second and device (GPUs, or processes on CPU).
    """
    return {
        "perf/total_num_tokens": float(num_tokens),
        "perf/time_per_step": seconds,
        "perf/throughput": num_tokens / seconds / num_devices,
    }


def retriever_metrics(search_ms: Sequence[float], seconds: float) -> dict[str, float]:
    """The metrics `perf/retriever/...` of a step that took `seconds`, from the time in which each of its searches was
    answered; {} where there was none. Retries and the waiting in the retriever's queue are part of that time.

    - `queries_per_s`: searches over the whole step, not over the time in which there were any.
    - `p50_ms`, `p99_ms`: percentiles by nearest rank, the smallest time that so many percent do not exceed.
    """
    times = sorted(search_ms)
    if not times:
        return {}
    ranks = {f"p{percent}_ms": times[-(-percent * len(times) // 100) - 1] for percent in (50, 99)}
    return {
        f"perf/retriever/{name}": value for name, value in ({"queries_per_s": len(times) / seconds} | ranks).items()
    }


def idle_metrics(step: Sequence[Span], engines: Spans, ranks: Spans) -> dict[str, float]:
    """Shares of time, each 0 to 1, within the spans `step` of the driver; means over engines.

    - `perf/engine_idle_share`: the engine had no request.
    - `perf/rollout_idle_share`: the same, of the time in which it had episodes: all of them waited for the environment.
    - `perf/driver_share`: no engine had an episode and no rank worked, so only the driver, or communication with it,
      was active.
    """
    seconds = sum(span.seconds for span in step)
    # What no span of these covers is the driver's own time.
    at_work = [span for row in ranks.values() for span in row]
    shares: dict[str, list[float]] = {"engine_idle_share": [], "rollout_idle_share": []}
    for row in engines.values():
        busy = [span for span in row if span.name == GENERATE]
        episodes = [span for span in row if span.name == ROLLOUTS]
        at_work += episodes
        shares["engine_idle_share"].append(1 - covered_s(busy, step) / seconds)
        # An engine without episodes in this step has no such share.
        if playing := sum(span.seconds for span in episodes):
            shares["rollout_idle_share"].append(1 - covered_s(busy, episodes) / playing)
    metrics = {f"perf/{name}": sum(row) / len(row) for name, row in shares.items() if row}
    return metrics | {"perf/driver_share": 1 - covered_s(at_work, step) / seconds}


@dataclass(frozen=True)
class Utilisation:
    """Model FLOPs of the actor's update over what its GPUs promise (dense bfloat16, by data sheet)."""

    shape: ModelShape
    epochs: int
    promised_flops: float  # of all GPUs together, a second

    @classmethod
    def of(cls, config: Config, policy: ModelShape, device_name: str, num_devices: int) -> Utilisation | None:
        """The utilisation of `num_devices` GPUs of that name; None without a known data sheet, as for a CPU."""
        named = device_name.replace("-", " ").split()
        gpu = next((gpu for gpu in GPUS if gpu.name.partition("-")[0] in named), None)
        if gpu is None:
            return None
        return cls(policy, config.actor_rollout_ref.actor.ppo_epochs, num_devices * gpu.bf16_flops)

    def flops(self, lengths_B: torch.Tensor) -> float:
        """The FLOPs of forward and backward over rows of `lengths_B` [B] tokens, once an epoch.

        6 for each parameter in a product and each token (4 for a frozen one, 2 for one that the backward pass does not
        reach), of experts those that are chosen for it, and 12 layers heads head_size for each pair of tokens that
        attention may look at, a third of that where no backward pass comes (PaLM, https://arxiv.org/abs/2204.02311,
        appendix B, with half of its pairs since attention is causal). Recomputed activations do not count.
        """
        shape, length_B = self.shape, lengths_B.double()
        in_products = shape.num_params - shape.num_looked_up - shape.num_unused
        reached = in_products - shape.num_below
        # With layers that are trained, the head behind them is frozen.
        trained = shape.num_adapted or reached - (shape.num_embeddings * shape.hidden if shape.num_frozen else 0)
        dense = (2.0 * (in_products + reached + trained)) * float(length_B.sum())
        passes = shape.num_layers + 2.0 * (shape.num_layers - shape.num_layers_below)
        attention = 2.0 * passes * shape.query_width * float((length_B * length_B).sum())
        return self.epochs * (dense + attention)

    def metrics(self, lengths_B: torch.Tensor, seconds: float) -> dict[str, float]:
        """The metric `perf/mfu/actor` of an update that took `seconds`."""
        return {"perf/mfu/actor": self.flops(lengths_B) / seconds / self.promised_flops}
