"""One front end as the owner sees it: its requests become calls of the source."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from search_r1.errors import SearchError, SearchFailed
from search_r1.search.server.source_interface import EncodedSearch
from search_r1.search.workers.link import Link
from search_r1.search.workers.messages import (
    ASK,
    CANCEL,
    DONE,
    FAILED,
    WARM_UP,
    pack_error,
    pack_outcomes,
    unpack_queries,
)

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Offer:
    """What front ends may ask for: a search, the end of the warm-up, the metrics of the service."""

    search: EncodedSearch
    warm_up: Callable[[], Awaitable[None]]
    render_metrics: Callable[[], Awaitable[bytes]]


class OwnerLink:
    """Serves one front end. Its searches are cancelled when it cancels them or disconnects."""

    def __init__(self, offer: Offer) -> None:
        self._offer = offer
        self._running: dict[int, asyncio.Task[None]] = {}
        self.link = Link(self._received, self._cancel_all)

    def _received(self, kind: int, number: int, payload: memoryview) -> None:
        if kind != CANCEL:
            task = asyncio.get_running_loop().create_task(self._answer(kind, number, payload))
            self._running[number] = task
            # not at the end of `_answer`: one that is cancelled before it began runs none of its lines
            task.add_done_callback(lambda _: self._running.pop(number))
        elif running := self._running.get(number):
            running.cancel()

    async def _answer(self, kind: int, number: int, payload: memoryview) -> None:
        try:
            self.link.send(DONE, number, await self._do(kind, payload))
        except SearchError as error:
            self.link.send(FAILED, number, [pack_error(error)])
        except Exception as error:  # the front end must not wait for ever
            _LOG.exception("a request of a front end failed")
            self.link.send(FAILED, number, [pack_error(SearchFailed(f"{type(error).__name__}: {error}"))])

    async def _do(self, kind: int, payload: memoryview) -> list[bytes]:
        """The payload of the answer, in pieces."""
        if kind == ASK:
            return pack_outcomes(await self._offer.search(*unpack_queries(payload)))
        if kind == WARM_UP:
            await self._offer.warm_up()
            return []
        return [await self._offer.render_metrics()]

    def _cancel_all(self) -> None:
        for running in self._running.values():
            running.cancel()
