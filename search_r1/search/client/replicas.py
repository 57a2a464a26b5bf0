"""Several retrieval servers with the same index: which one to send the next request to.

Every replica has a circuit breaker. Closed: it gets requests. Open, after a few failures in a row: it gets none. Half
open, when its pause is over: one request probes it, and its outcome closes the circuit or starts a longer pause.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Collection, Sequence

from url_text import without_credentials

_LOG = logging.getLogger(__name__)
_FAILURES_TO_OPEN = 3
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0
_PROBE_PENDING_S = 0.1  # how soon to look again for the outcome of another request's probe


class Replica:
    """One server and its health, judged by past requests. Times are monotonic seconds."""

    def __init__(self, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.url = url
        self.name = without_credentials(url)
        self.running = 0
        self.last_used = 0
        self._clock = clock
        self._failures = 0
        self._pause_s = _FIRST_PAUSE_S
        self._half_open_at = 0.0
        self._rests_until = 0.0
        self._probed = False

    @property
    def is_open(self) -> bool:
        """Whether the circuit is open or half open."""
        return self._failures >= _FAILURES_TO_OPEN

    def rest_s(self) -> float:
        """Seconds left of the pause that the server asked for (Retry-After)."""
        return max(0.0, self._rests_until - self._clock())

    def wait_s(self) -> float:
        """Seconds until the replica may get a request, as far as known; 0: now."""
        if not self.is_open:
            return self.rest_s()
        return _PROBE_PENDING_S if self._probed else max(self.rest_s(), self._half_open_at - self._clock())

    def begin(self) -> bool:
        """A request starts. True if it is the probe of a half open circuit. Must be followed by `end`."""
        self.running += 1
        is_probe = self.is_open
        self._probed = self._probed or is_probe
        return is_probe

    def end(self, is_probe: bool) -> None:
        """The request is over, after `record_success`, `record_failure` or `pause`, or after a cancellation."""
        self.running -= 1
        if is_probe:
            self._probed = False

    def record_success(self) -> None:
        """The replica answered: close the circuit."""
        if self.is_open:
            _LOG.info("retrieval server %s answers again", self.name)
        self._failures, self._pause_s = 0, _FIRST_PAUSE_S

    def record_failure(self, is_probe: bool) -> None:
        """The replica did not answer, or answered with an error of its own: count it; the third opens the circuit.

        Requests sent before the circuit opened change nothing.
        """
        if self.is_open and not is_probe:
            return
        self._failures += 1
        if not self.is_open:
            return
        # jitter, so that many clients do not probe in step
        self._half_open_at = self._clock() + self._pause_s * random.uniform(0.5, 1.0)
        if not is_probe:
            _LOG.warning("retrieval server %s failed %d times in a row; pausing requests", self.name, self._failures)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def pause(self, seconds: float) -> None:
        """The replica works, but asked for a pause (Retry-After)."""
        self.record_success()
        # jitter, so that many clients do not come back in step
        self._rests_until = max(self._rests_until, self._clock() + seconds * random.uniform(1.0, 1.1))


class ReplicaPool:
    """Chooses among the replicas at `urls`; `clock` returns monotonic seconds."""

    def __init__(self, urls: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self.replicas = [Replica(url, clock) for url in urls]
        self._num_chosen = 0

    def choose(self, avoid: Collection[Replica] = ()) -> Replica | None:
        """The replica for the next request; None if none outside `avoid` is available.

        It has the fewest running requests, round-robin among equals. So a half open one, with none, is soon probed.
        """
        ready = [replica for replica in self.replicas if replica not in avoid and replica.wait_s() <= 0]
        if not ready:
            return None
        replica = min(ready, key=lambda each: (each.running, each.last_used))
        self._num_chosen += 1
        replica.last_used = self._num_chosen
        return replica

    def wait_s(self) -> float:
        """Seconds until a replica may get a request, as far as known; 0: now."""
        return max(0.0, min(replica.wait_s() for replica in self.replicas))

    def rest_s(self) -> float:
        """Seconds left of the shortest pause that a server asked for; 0 if any server asked for none."""
        return min(replica.rest_s() for replica in self.replicas)
