"""Whether a run fits: the report of the estimate."""

from __future__ import annotations

from collections.abc import Iterator

from verl.config import Config
from verl.config.counts import trajectories_per_step
from verl.trainer.preflight.advice import peak, three_settings
from verl.trainer.preflight.finding import Finding, judge
from verl.trainer.preflight.memory import estimate
from verl.trainer.preflight.models import Models
from verl.trainer.preflight.quantities import GIB, Place, window_of
from verl.trainer.preflight.sampler import kv_cache_tokens
from verl.trainer.preflight.step_time import step_time

# Of a device, to be left over by an estimate: where it was measured it was off by up to 9% (docs/preflight.md).
SMALLEST_MARGIN = 0.05


def fits(config: Config, models: Models, place: Place) -> Iterator[Finding]:
    """Whether the largest phase fits, with three settings to change when it does not for sure; the sampler's cache."""
    worst = peak(estimate(config, models, place))
    # Workers on CPU share the machine's memory.
    workers = 1 if place.on_gpu else place.workers
    needed, there = worst.total * workers / GIB, place.device_bytes / GIB
    found = f"{needed:.1f} of {there:.1f} GiB at the peak, in the phase {worst.name} (an estimate)"
    if there * (1 - SMALLEST_MARGIN) < needed <= there:
        found += f"; with less than {SMALLEST_MARGIN:.0%} left it can run out of memory, as no estimate is that exact"
    gains = [f"{change} (-{gain / GIB:.1f} GiB)" for change, gain in three_settings(config, models, place)]
    todo = "change " + ", ".join(gains) if gains else "take more or larger devices"
    if needed > there:
        yield Finding("FAIL", "memory does not fit", found, todo)
    else:
        good = needed <= there * (1 - SMALLEST_MARGIN)
        yield judge(good, "memory fits" if good else "memory may not fit", found, todo, "warn")
    tokens, window = kv_cache_tokens(config, models.policy, place), window_of(config)
    found = f"room for {max(tokens, 0)} tokens, a sequence has at most {window}"
    key = "gpu_memory_utilization or tensor_model_parallel_size" if place.on_gpu else "kv_cache_gib"
    yield judge(tokens >= window, "KV cache", found, f"raise actor_rollout_ref.rollout.{key}")


def table(config: Config, models: Models, place: Place) -> str:
    """Every part of every phase in GiB a device, and the tokens and the time of a step."""
    shape = models.policy
    lines = [f"policy: {shape.num_params / 1e9:.2f} billion parameters in {shape.num_layers} layers"]
    for phase in estimate(config, models, place):
        lines.append(f"{phase.name}: {phase.total / GIB:.2f} GiB a {'GPU' if place.on_gpu else 'worker'}")
        lines += [f"  {size / GIB:8.2f}  {name}" for name, size in phase.parts.items() if size >= GIB / 200]
    time = step_time(config, models, place)
    lines.append(f"a step: {trajectories_per_step(config)} trajectories, about {time.tokens} tokens")
    lines.append(f"  rollout {time.rollout_s:.0f} s, log-probs and updates {time.training_s:.0f} s: rough estimates")
    return "\n".join([*lines, f"  assumed: {time.assumed}"])
