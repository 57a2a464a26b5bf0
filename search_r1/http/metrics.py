"""What the server counts, in the text format of Prometheus."""

from __future__ import annotations

from functools import cached_property

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class StageMetrics:
    """Metrics of one batched stage: `stage` is the prefix of their names, `unit` is what they count."""

    def __init__(self, registry: CollectorRegistry, stage: str, unit: str) -> None:
        self.stage, self.unit = stage, unit
        name = unit.capitalize()
        self._batch_size = Histogram(
            f"{stage}_batch_{unit}", f"{name} in a batch.", registry=registry, buckets=_BATCH_SIZES
        )
        self._batch_s = Histogram(f"{stage}_batch_seconds", "Time of a batch.", registry=registry, buckets=_SECONDS)
        self.queue = Gauge(f"{stage}_queue_{unit}", f"{name} that wait for a batch.", registry=registry)
        self.shared = Counter(
            f"{stage}_shared_{unit}", f"{name} that joined an equal one in flight.", registry=registry
        )
        self.cache_bytes = Gauge(f"{stage}_cache_bytes", "Estimated bytes of the cache.", registry=registry)
        self.cache_hits = Counter(f"{stage}_cache_hits", f"{name} answered from the cache.", registry=registry)
        self.cache_misses = Counter(f"{stage}_cache_misses", f"{name} not in the cache.", registry=registry)

    def batch_done(self, size: int, seconds: float) -> None:
        self._batch_size.observe(size)
        self._batch_s.observe(seconds)


class Metrics:
    """The metrics of a server. Each instance has its own registry: two servers in one process stay separate.

    `server` prefixes the names.
    """

    def __init__(self, server: str = "retrieval") -> None:
        registry = self.registry = CollectorRegistry()
        self._requests = Counter(
            f"{server}_requests", "Requests by route and HTTP status.", ["route", "status"], registry=registry
        )
        self._request_s = Histogram(
            f"{server}_request_seconds", "Time to answer a request.", ["route"], registry=registry, buckets=_SECONDS
        )
        self.rejected = Counter(f"{server}_rejected", "Requests refused: the queue was full.", registry=registry)
        self.expired = Counter(f"{server}_expired", "Requests whose deadline passed.", registry=registry)
        self.gone = Counter(f"{server}_gone", "Requests whose client went away.", registry=registry)
        self.errors = Counter(f"{server}_errors", "Requests whose search failed.", registry=registry)
        self.failed_queries = Counter(
            f"{server}_failed_queries", "Queries that failed in requests that were answered.", registry=registry
        )
        ProcessCollector(registry=registry)
        self._by_route: dict[tuple[str, int], tuple[Counter, Histogram]] = {}

    def request_done(self, route: str, status: int, seconds: float) -> None:
        counts = self._by_route.get((route, status))
        if counts is None:  # looking labels up costs more than counting
            counts = self._requests.labels(route, str(status)), self._request_s.labels(route)
            self._by_route[route, status] = counts
        counts[0].inc()
        counts[1].observe(seconds)

    @cached_property
    def search(self) -> StageMetrics:
        """Metrics of the index search."""
        return StageMetrics(self.registry, "retrieval", "queries")

    @cached_property
    def rerank(self) -> StageMetrics:
        """Metrics of the reranker."""
        return StageMetrics(self.registry, "rerank", "pairs")

    async def render(self) -> bytes:
        """The body of `GET /metrics`."""
        return generate_latest(self.registry)
