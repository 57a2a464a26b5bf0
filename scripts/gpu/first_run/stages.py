"""The eleven stages: what each needs, and in what order they run."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from processes import retrieval_server

from first_run import node, published, training
from first_run.result import Outcome, Result, judged, skipped
from first_run.site import ROOT, Site, StageError, checked

SIZES = ("tiny", "3b", "7b")
SHORT_S, LONG_S = 900.0, 1800.0
ENGINE_CHECKS = ("packed gradients", "bfloat16 log-probs", "head", "offload", "model FLOP utilisation")


@dataclass(frozen=True)
class Stage:
    """`needs` are numbers of stages whose failure makes this one pointless. `size` is that of its model."""

    number: int
    name: str
    run: Callable[[Site], Result]
    needs: tuple[int, ...] = ()
    least_devices: int = 1
    needs_cuda: str = ""  # why, when it does
    size: str = "tiny"
    several_nodes: bool = False


def look_at_node(site: Site) -> Result:
    return node.look(site)


def see_gpus(site: Site) -> Result:
    return site.child("check_torch", limit_s=SHORT_S)


def all_reduce(site: Site) -> Result:
    return site.child("check_all_reduce", "--ranks", str(site.num_devices), limit_s=SHORT_S)


def all_reduce_between_nodes(site: Site) -> Result:
    options = {"--ranks": site.num_devices, "--nodes": site.num_nodes, "--min_gbs": site.min_gbs}
    words = [str(word) for option in options.items() for word in option]
    cluster = {"RAY_ADDRESS": os.environ.get("RAY_ADDRESS", "auto")}  # other stages start a Ray of their own
    return site.child("check_nodes", *words, limit_s=SHORT_S, variables=cluster)


def check_engine(site: Site) -> Result:
    options = [] if site.on_gpu else ["--device", "cpu", "--shape", "tiny", "--tokens", "256"]
    command = [sys.executable, str(ROOT / "scripts" / "gpu" / "engine_check.py"), *options]
    return checked(site.run("engine_check", command, LONG_S, accepted=(0, 1)), ENGINE_CHECKS)


def check_sampler(site: Site) -> Result:
    return site.child("check_sampler", "--model", str(site.world() / "policy_init"), limit_s=LONG_S)


def train_tinywiki(site: Site, num_devices: int, tensor_parallel: int = 1) -> Result:
    with retrieval_server(site.world() / "corpus.jsonl", site.log("retrieval")) as url:
        return training.tinywiki(site, num_devices, tensor_parallel, url)


def train_shape(site: Site, shape: str) -> Result:
    """On CPU the tiny shape takes its place, which tries the way and not the size."""
    with retrieval_server(site.world() / "corpus.jsonl", site.log("retrieval")) as url:
        if site.on_gpu:
            return published.train(site, shape, url)
        tried = published.train(site, "tiny", url)
        return replace(tried, figures=f"with the tiny shape in place of {shape}: {tried.figures}")


ONE_PROCESS = "on CPU an engine is one process"

STAGES = (
    Stage(1, "node", look_at_node, least_devices=0),
    Stage(2, "torch", see_gpus, least_devices=0),
    Stage(3, "all-reduce", all_reduce, (2,), least_devices=2),
    Stage(4, "engine check", check_engine, (2,)),
    Stage(5, "sampler and sync", check_sampler, (2,)),
    Stage(6, "TinyWiki, 1 GPU", partial(train_tinywiki, num_devices=1), (5,)),
    Stage(7, "TinyWiki, 2 GPUs", partial(train_tinywiki, num_devices=2), (3, 6), least_devices=2),
    Stage(8, "TinyWiki, TP 2", partial(train_tinywiki, num_devices=2, tensor_parallel=2), (7,), 2, ONE_PROCESS),
    Stage(9, "train_grpo.sh, 3B shape", partial(train_shape, shape="3b"), (6, 7), size="3b"),
    Stage(10, "train_grpo.sh, 7B shape", partial(train_shape, shape="7b"), (9,), 1, "too large for a CPU", "7b"),
    Stage(11, "all-reduce between nodes", all_reduce_between_nodes, (2,), several_nodes=True),
)


def run_stages(site: Site, numbers: Sequence[int]) -> Iterator[tuple[Stage, Result]]:
    """Each with its result; a stage whose needs have failed is skipped, the others run."""
    results: dict[int, Result] = {}
    for stage in STAGES:
        reason = why_not(stage, site, numbers) or blocked(stage, results)
        if reason is None:
            print(f"[{stage.number:2d}/{len(STAGES)}] {stage.name} ...", flush=True)
        results[stage.number] = result = reason or timed(stage, site)
        print(f"[{stage.number:2d}/{len(STAGES)}] {result.outcome} {stage.name}: {result.figures}", flush=True)
        yield stage, result


def why_not(stage: Stage, site: Site, numbers: Sequence[int]) -> Result | None:
    """Not asked for, or not possible here; what needs it may still run."""
    if stage.number not in numbers:
        return skipped("not asked for (--stages)")
    if not site.on_gpu and stage.needs_cuda:
        return skipped(f"needs CUDA: {stage.needs_cuda}")
    if site.on_gpu and SIZES.index(stage.size) > SIZES.index(site.max_size):
        return skipped(f"not asked for (--max_size {site.max_size})")
    if stage.several_nodes and site.num_nodes < 2:
        return skipped("needs a Ray cluster: --nodes 2 or more, with RAY_ADDRESS")
    if site.num_devices < stage.least_devices:
        return skipped(f"needs {stage.least_devices} GPUs, this node shows {site.num_devices}")
    return None


def blocked(stage: Stage, results: Mapping[int, Result]) -> Result | None:
    failed = [number for number in stage.needs if results[number].outcome is Outcome.FAIL or results[number].blocked]
    if not failed:
        return None
    words = "failed" if results[failed[0]].outcome is Outcome.FAIL else "did not run"
    return skipped(f"stage {failed[0]}, which it needs, {words}", blocked=True)


def timed(stage: Stage, site: Site) -> Result:
    """A stage that raises has failed."""
    site.stage = f"{stage.number:02d}"
    started = time.monotonic()
    try:
        result = stage.run(site)
    except (StageError, OSError, RuntimeError, ValueError, KeyError) as error:
        result = judged(False, f"{error}" if isinstance(error, StageError) else f"{type(error).__name__}: {error}")
    return replace(result, seconds=time.monotonic() - started)
