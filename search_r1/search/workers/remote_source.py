"""The owner's service as a front end sees it."""

from __future__ import annotations

import asyncio
import itertools
import math
import socket
from collections.abc import Callable
from dataclasses import dataclass

from search_r1.errors import ServiceUnavailable
from search_r1.http.metrics import Metrics
from search_r1.search.server.source_interface import Outcome, ScoredPassage, decode_hits
from search_r1.search.workers.link import Link
from search_r1.search.workers.messages import (
    ASK,
    CANCEL,
    DONE,
    METRICS,
    WARM_UP,
    pack_queries,
    unpack_error,
    unpack_outcomes,
)


@dataclass(frozen=True)
class About:
    """What `Served` says of a source."""

    name: str
    num_passages: int | None
    version: str
    batch_size: int | None


class RemoteSource:
    """A `Source` in another process; a call that is cancelled is cancelled there. Call it from one event loop."""

    def __init__(self, connection: socket.socket, served: About, lost: Callable[[], None] = lambda: None) -> None:
        """`connection` leads to an `OwnerLink`; `lost` is called when the owner has gone, not after `close`.

        `served` is what the owner says of its source.
        """
        self.name, self.num_passages = served.name, served.num_passages
        self.version, self.batch_size = served.version, served.batch_size
        self._connection = connection
        self._connecting: asyncio.Task[object] | None = None
        self._link = Link(self._received, self._fail_waiting)
        self._tell_lost = lost
        self._closed = False
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[memoryview]] = {}

    async def search(self, queries: list[str], k: int) -> list[list[ScoredPassage]]:
        """See `Source.search`."""
        return decode_hits(await self.search_encoded(queries, k))

    async def search_encoded(self, queries: list[str], k: int, wait_s: float = math.inf) -> list[Outcome]:
        """See `EncodedSearch`."""
        return unpack_outcomes(await self._ask(ASK, pack_queries(queries, k, wait_s)))

    async def warm_up(self) -> None:
        """Wait until the owner's warm-up has run. Raises what it raised."""
        await self._ask(WARM_UP, [])

    async def metrics(self) -> bytes:
        """The counts of the whole service."""
        return bytes(await self._ask(METRICS, []))

    def close(self) -> None:
        """Disconnect from the owner, which cancels the pending searches."""
        self._closed = True
        self._link.close()

    async def _ask(self, kind: int, pieces: list[bytes]) -> memoryview:
        """The payload of the answer. Raises the error that came instead, or `ServiceUnavailable`."""
        if self._closed:
            raise _stopping()
        loop = asyncio.get_running_loop()
        if self._connecting is None:
            making = loop.create_unix_connection(lambda: self._link, sock=self._connection)
            self._connecting = loop.create_task(making)
        number, answer = next(self._numbers), loop.create_future()
        self._waiting[number] = answer
        self._link.send(kind, number, pieces)
        try:
            return await answer
        except asyncio.CancelledError:
            self._link.send(CANCEL, number, [])
            raise
        finally:
            self._waiting.pop(number, None)

    def _received(self, kind: int, number: int, payload: memoryview) -> None:
        answer = self._waiting.get(number)
        if answer is None or answer.done():
            return  # cancelled while the answer was on its way
        if kind == DONE:
            answer.set_result(payload)
        else:
            answer.set_exception(unpack_error(payload))

    def _fail_waiting(self) -> None:
        was_closed, self._closed = self._closed, True
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(_stopping())
        if not was_closed:
            self._tell_lost()


class RemoteMetrics(Metrics):
    """Counts here (in the files of `PROMETHEUS_MULTIPROC_DIR`) and shows the counts of the whole service."""

    def __init__(self, source: RemoteSource) -> None:
        super().__init__()
        self._source = source

    async def render(self) -> bytes:
        """The owner's `ServiceMetrics.render`."""
        return await self._source.metrics()


def _stopping() -> ServiceUnavailable:
    return ServiceUnavailable("the server is stopping", retry_after_s=1)
