"""One end of the connection between a front end and the owner: messages in, messages out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from search_r1.search.workers.messages import HEADER

Received = Callable[[int, int, memoryview], None]


class Link(asyncio.Protocol):
    """Messages of one iteration of the event loop go out in one write. Use it from one event loop."""

    def __init__(self, received: Received, lost: Callable[[], None]) -> None:
        """`received(kind, number, payload)` is called for each message, `lost` when the other side has gone."""
        self._received = received
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        self._outgoing: list[bytes] = []
        self._incoming: list[bytes] = []  # the start of a message
        self._missing = HEADER.size  # bytes until the message, or at least its header, is whole

    def send(self, kind: int, number: int, pieces: list[bytes]) -> None:
        """Send a message whose payload is `pieces` in a row; it waits until the connection is made."""
        if not self._outgoing and self._transport:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(HEADER.pack(sum(map(len, pieces)), kind, number))
        self._outgoing += pieces

    def close(self) -> None:
        """Send what is there, then close. `lost` is called."""
        self._flush()
        if self._transport:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._flush()

    def data_received(self, data: bytes) -> None:
        self._incoming.append(data)
        self._missing -= len(data)
        if self._missing > 0:
            return
        data = b"".join(self._incoming)
        view, start = memoryview(data), 0
        while True:
            if len(data) - start < HEADER.size:
                end = start + HEADER.size
                break
            size, kind, number = HEADER.unpack_from(data, start)
            end = start + HEADER.size + size
            if end > len(data):
                break
            self._received(kind, number, view[start + HEADER.size : end])
            start = end
        self._incoming = [data[start:]]
        self._missing = end - len(data)

    def connection_lost(self, _: Exception | None) -> None:
        self._transport = None
        self._lost()

    def _flush(self) -> None:
        if self._outgoing and self._transport:
            self._transport.write(b"".join(self._outgoing))
            self._outgoing.clear()
