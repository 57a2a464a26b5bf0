"""Runs of main_ppo on hosts of namespaces: their retriever, a run that is watched, what two of them have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from e2e_world import ROOT, metrics_by_step, run_here, small_run
from hosts import Host, wait_for_port
from same_runs import assert_same_weights, learned
from watched_run import WatchedRun

PYTHON = str(ROOT / ".venv/bin/python")
STEPS = 6
SETTINGS = (
    *(f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1", f"trainer.test_freq={STEPS}"),
    *("+trainer.val_before_train=false", "trainer.resume_mode=auto", "trainer.deterministic=true", "trainer.logger=[]"),
    "actor_rollout_ref.rollout.kv_cache_gib=0.25",  # a run has several engines
)
SHORT_STEPS = 2  # the second one samples with what the first has learned
SHORT = (f"trainer.total_training_steps={SHORT_STEPS}", f"trainer.test_freq={SHORT_STEPS}", "trainer.seed=1")


@contextlib.contextmanager
def retriever_on(host: Host, corpus: Path) -> Iterator[str]:
    """The URL by which the other hosts reach it, too."""
    log = host.folder / f"{host.name}.retriever.log"
    server = host.start("bash", "retrieval_launch.sh", log=log, HOST="0.0.0.0", PORT="8000", CORPUS_PATH=str(corpus))
    try:
        wait_for_port(host, f"{host.address}:8000", timeout_s=600, of=server, log=log)
        yield f"http://{host.address}:8000/retrieve"
    finally:
        server.terminate()
        server.communicate(timeout=120)


class HostRun(WatchedRun):
    """A run in `folder`, led from `host`, on the cluster at `ray_address` ("local": on that host alone)."""

    def __init__(self, host: Host, folder: Path, command: tuple[str, ...], ray_address: str) -> None:
        super().__init__(folder.with_suffix(".log"))
        self.folder = folder
        self.process = host.start(PYTHON, *command, log=self.log, RAY_ADDRESS=ray_address, RAY_AUTH_MODE="token")

    def wait_for_step(self, step: int) -> None:
        """Until it is in the run's metrics."""
        metrics = self.folder / "metrics.jsonl"
        self.wait_until(lambda: metrics.is_file() and step in metrics_by_step(self.folder))

    def end(self, timeout_s: float = 1800) -> int:
        """Its exit status."""
        try:
            return self.process.wait(timeout_s)
        finally:
            self.process.kill()

    def finish(self) -> None:
        assert self.end() == 0, self.said[-6000:]


@dataclass(frozen=True)
class OneHost:
    """What runs on several hosts are compared with: runs on this machine alone, in this process, on its Ray."""

    tinywiki: Path
    policy: Path
    url: str
    built_once: Callable[[str, Callable[[Path], None]], Path]

    def run_with(self, num_ranks: int, *overrides: str, name: str = "grpo") -> Path:
        """The folder of a run with so many ranks, the same for all tests that name it."""

        def train(folder: Path) -> None:
            layout = (*SETTINGS, f"trainer.n_gpus_per_node={num_ranks}", *overrides)
            assert run_here(*small_run(self.tinywiki, self.policy, self.url, folder / "run", *layout)) == 0

        return self.built_once(f"one_host_{name}_{num_ranks}", train) / "run"

    def short_run_with(self, num: int, *overrides: str, name: str = "grpo") -> Path:
        """Of `SHORT_STEPS` steps, with so many ranks and engines."""
        engines = f"actor_rollout_ref.rollout.num_engines={num}"
        return self.run_with(num, *SHORT, engines, *overrides, name=f"short_{name}")


def assert_same(one: Path, other: Path, step: int = STEPS) -> None:
    """Of two run folders: every metric until `step` but those of the machine and the number of engines, and every
    weight after it, to the last bit.
    """
    besides = ("rollout/num_engines",)
    metrics, others = ({n: row for n, row in learned(f, besides).items() if n <= step} for f in (one, other))
    assert metrics == others and sorted(metrics) == list(range(1, step + 1)) and len(metrics[step]) > 50
    assert_same_weights(one, other, step, {"actor", "ref"})
