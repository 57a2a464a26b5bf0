"""`/metrics` of a run for Prometheus: the latest value of every metric, as gauges. Its port is checked first."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator, Mapping
from threading import Lock

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from verl.errors import ConfigError
from verl.tracking.backend import RunInfo

PREFIX = "verl_"
STEP, LOGGED = f"{PREFIX}step", f"{PREFIX}last_logged_seconds"


class PrometheusBackend:
    """Serves `http://{host}:{port}/metrics` until `finish`; port 0 picks a free one, see `port`.

    Raises ConfigError when the port is not available.
    """

    def __init__(self, run: RunInfo, host: str, port: int) -> None:
        self._latest = LatestMetrics(run)
        registry = CollectorRegistry()
        registry.register(self._latest)
        ProcessCollector(registry=registry)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise ConfigError(port_not_served(port, host, error)) from error
        self.port: int = self._server.server_port

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._latest.update(metrics, step)

    def finish(self, failed: bool = False) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class LatestMetrics(Collector):
    """Keeps the latest value of each metric; those of a validation stay until the next one.

    Metrics whose names differ only in punctuation share a family; the label `metric` has the full name.
    """

    def __init__(self, run: RunInfo) -> None:
        self._labels = (run.project, run.experiment)
        self._values: dict[str, float] = {}
        self._step, self._logged = 0, 0.0
        self._lock = Lock()  # Prometheus asks from a thread of the server

    def update(self, metrics: Mapping[str, float], step: int) -> None:
        with self._lock:
            self._values |= metrics
            self._step, self._logged = step, time.time()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        with self._lock:
            # A copy, since the training may log the next step in between.
            values, step, logged = dict(self._values), self._step, self._logged
        own = ["project", "experiment"]
        for name, meaning, value in (
            (STEP, "The step logged last.", float(step)),
            (LOGGED, "When that was, in seconds since the epoch; 0 before the first.", logged),
        ):
            family = GaugeMetricFamily(name, meaning, labels=own)
            family.add_metric(self._labels, value)
            yield family
        # The format has each name once, so that metrics with equal names are one family.
        families: dict[str, GaugeMetricFamily] = {}
        for metric, value in values.items():
            name = prometheus_name(metric)
            family = families.setdefault(name, GaugeMetricFamily(name, f"Latest {metric}.", labels=[*own, "metric"]))
            family.add_metric((*self._labels, metric), value)
        yield from families.values()


def prometheus_name(metric: str) -> str:
    """`critic/score/mean` is `verl_critic_score_mean`: what Prometheus does not allow in a name becomes `_`."""
    return PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", metric)


def check_metrics_port(port: int | None, host: str) -> None:
    """Raise ConfigError when `trainer.metrics_port` could not be served on this machine now. Fast."""
    if port is None:
        return
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except (OSError, OverflowError) as error:
        raise ConfigError(port_not_served(port, host, error)) from error


def port_not_served(port: int, host: str, error: Exception) -> str:
    """Why there are no metrics at `trainer.metrics_port`, in words."""
    return (
        f"trainer.metrics_port={port} on trainer.metrics_host={host} cannot be served ({error}); choose another port, "
        "or null for none"
    )
