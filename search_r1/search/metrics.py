"""What the server counts, in the text format of Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """A registry of its own, so that two servers in one process do not mix."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self._requests = Counter(
            "retrieval_requests", "Requests by route and HTTP status.", ["route", "status"], registry=registry
        )
        self._request_s = Histogram(
            "retrieval_request_seconds", "Time to answer a request.", ["route"], registry=registry, buckets=_SECONDS
        )
        self._batch_queries = Histogram(
            "retrieval_batch_queries", "Queries in a batch.", registry=registry, buckets=_BATCH_SIZES
        )
        self._batch_s = Histogram("retrieval_batch_seconds", "Time of a batch.", registry=registry, buckets=_SECONDS)
        self.queue = Gauge("retrieval_queue_queries", "Queries that wait for a batch.", registry=registry)
        self.cache_bytes = Gauge("retrieval_cache_bytes", "Estimated bytes of cached answers.", registry=registry)
        self.cache_hits = Counter("retrieval_cache_hits", "Queries answered from the cache.", registry=registry)
        self.cache_misses = Counter("retrieval_cache_misses", "Queries not in the cache.", registry=registry)
        self.shared_queries = Counter(
            "retrieval_shared_queries", "Queries that joined an equal one in flight.", registry=registry
        )
        self.rejected = Counter("retrieval_rejected", "Requests refused: the queue was full.", registry=registry)
        self.expired = Counter("retrieval_expired", "Requests whose deadline passed.", registry=registry)
        self.gone = Counter("retrieval_gone", "Requests whose client went away.", registry=registry)
        self.errors = Counter("retrieval_errors", "Requests whose search failed.", registry=registry)
        ProcessCollector(registry=registry)
        self._by_route: dict[tuple[str, int], tuple[Counter, Histogram]] = {}

    def request_done(self, route: str, status: int, seconds: float) -> None:
        counts = self._by_route.get((route, status))
        if counts is None:  # looking labels up costs more than counting
            counts = self._requests.labels(route, str(status)), self._request_s.labels(route)
            self._by_route[route, status] = counts
        counts[0].inc()
        counts[1].observe(seconds)

    def batch_done(self, num_queries: int, seconds: float) -> None:
        self._batch_queries.observe(num_queries)
        self._batch_s.observe(seconds)

    def render(self) -> bytes:
        """The body of `GET /metrics`."""
        return generate_latest(self.registry)
