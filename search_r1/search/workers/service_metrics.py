"""The counts of the owner and of all front ends, also of those that have ended, as one."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector


class ServiceMetrics(Collector):
    """Adds the files that front ends count in to the registry of the owner.

    Only the owner has `process_*`: its memory is that of the index.
    """

    def __init__(self, own: CollectorRegistry, folder: Path) -> None:
        self._own = own
        self._front_ends = MultiProcessCollector(None, path=str(folder))
        self._registry = CollectorRegistry()
        self._registry.register(self)

    async def render(self) -> bytes:
        """The body of `GET /metrics`."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering it does not read the files."""
        return []

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        for family in chain(self._own.collect(), self._front_ends.collect()):
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            totals = values.setdefault(family.name, {})
            for sample in family.samples:
                key = sample.name, tuple(sorted(sample.labels.items()))
                totals[key] = totals.get(key, 0.0) + sample.value
        for name, family in families.items():
            for (sample_name, labels), value in values[name].items():
                family.add_sample(sample_name, dict(labels), value)
        return families.values()
