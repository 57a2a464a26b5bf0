"""Runs of main_ppo on hosts of namespaces: their retriever, a run that is watched, what two of them have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from e2e_world import ROOT, metrics_by_step
from hosts import Host, wait_for_port
from safetensors.torch import load_file
from watched_run import WatchedRun

PYTHON = str(ROOT / ".venv/bin/python")
NOT_LEARNED = ("timing", "perf", "memory_gib", "time", "rollout/num_engines")  # of the clock, the machine, the layout


@contextlib.contextmanager
def retriever_on(host: Host, corpus: Path) -> Iterator[str]:
    """The URL by which the other hosts reach it, too."""
    server = host.start("bash", "retrieval_launch.sh", HOST="0.0.0.0", PORT="8000", CORPUS_PATH=str(corpus))
    try:
        wait_for_port(host, f"{host.address}:8000", timeout_s=600)
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

    def metrics(self) -> dict[int, dict[str, float]]:
        """By step, those that tell what was learned."""
        steps = metrics_by_step(self.folder)
        return {
            step: {name: row[name] for name in row if not name.startswith(NOT_LEARNED)} for step, row in steps.items()
        }


def assert_same(one: HostRun, other: HostRun, step: int) -> None:
    """Every metric but those of the clock and the machine, and every weight after `step`, to the last bit."""
    assert one.metrics() == other.metrics() and len(one.metrics()[step]) > 50
    models = sorted(one.folder.glob(f"*/global_step_{step}/model.safetensors"))
    assert {path.parts[-3] for path in models} >= {"actor", "ref"}
    for path in models:
        weights, others = load_file(path), load_file(other.folder / path.relative_to(one.folder))
        assert weights.keys() == others.keys()
        assert all(weights[name].equal(others[name]) for name in weights), path
