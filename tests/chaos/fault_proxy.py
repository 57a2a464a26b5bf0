"""A proxy in front of a retrieval server that does what networks and broken servers do."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["none", "delay", "silence", "error_500", "busy_503", "reset", "cut", "truncated_json", "garbage"]

MARK = "injected by the proxy"
"""In every text that the proxy makes up."""
PASSING: tuple[Kind, ...] = ("delay", "error_500", "busy_503", "reset", "cut")
"""Asking again helps, and the client does."""
FINAL: tuple[Kind, ...] = ("truncated_json", "garbage")
"""A whole answer with status 200 that is no retrieval reply: the client does not ask again."""


@dataclass(frozen=True)
class Request:
    """`number` counts from 1; `queries` is what its body asks for."""

    number: int
    queries: tuple[str, ...]


Rule = Callable[[Request], Kind]


def healthy(request: Request) -> Kind:
    return "none"


def scripted(*kinds: Kind) -> Rule:
    """The first requests in turn get these, the others nothing."""
    return lambda request: kinds[request.number - 1] if request.number <= len(kinds) else "none"


def seeded(share: float, seed: int, kinds: Sequence[Kind] = PASSING + FINAL) -> Rule:
    """A `share` of requests, each with a fault of its own; the same for the same numbers."""

    def rule(request: Request) -> Kind:
        draw = random.Random(f"{seed}/{request.number}")
        return draw.choice(kinds) if draw.random() < share else "none"

    return rule


class FaultProxy:
    """Listens on a loopback port in a thread of its own. `rule` may be replaced at any time.

    `seen` has every request with what was done to it. A request whose client left unanswered is there too.
    """

    def __init__(self, upstream: str, rule: Rule = healthy, delay_s: float = 0.3, retry_after_s: int = 1) -> None:
        """`upstream` is the server's /retrieve address; `delay_s` is what "delay" adds."""
        address = upstream.removeprefix("http://").partition("/")[0]
        host, _, port = address.partition(":")
        self.upstream = (host, int(port))
        self.rule, self.delay_s, self.retry_after_s = rule, delay_s, retry_after_s
        self.seen: list[tuple[Kind, Request]] = []
        self.died_at: float | None = None  # time.monotonic()
        self._open: set[asyncio.StreamWriter] = set()
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._started.wait(60)

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/retrieve"

    def count(self, *kinds: Kind) -> int:
        return sum(kind in kinds for kind, _ in self.seen)

    def die(self) -> None:
        """For ever: connections are reset and new ones refused."""
        self._loop.call_soon_threadsafe(self._die)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self._started.set()
        await self._stop.wait()
        self._die()

    def _die(self) -> None:
        if self.died_at is None:
            self.died_at = time.monotonic()
            self._server.close()
            for writer in list(self._open):
                _reset(writer)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request a connection: every answer asks for its end."""
        self._open.add(writer)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(_content_length(head))
            request = Request(len(self.seen) + 1, tuple(json.loads(body)["queries"]))
            kind = self.rule(request)
            self.seen.append((kind, request))
            await self._answer(kind, head, body, writer, reader)
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client left
        finally:
            self._open.discard(writer)
            writer.close()

    async def _answer(
        self, kind: Kind, head: bytes, body: bytes, writer: asyncio.StreamWriter, reader: asyncio.StreamReader
    ) -> None:
        detail = json.dumps({"detail": MARK}).encode()
        if kind == "silence":
            await reader.read()  # until the client leaves
        elif kind == "reset":
            _reset(writer)
        elif kind == "error_500":
            writer.write(_response("500 Internal Server Error", detail))
        elif kind == "busy_503":
            writer.write(_response("503 Service Unavailable", detail, f"Retry-After: {self.retry_after_s}\r\n"))
        elif kind == "garbage":
            writer.write(_response("200 OK", f"<html><information>{MARK}</information></html>".encode()))
        else:
            if kind == "delay":
                await asyncio.sleep(self.delay_s)
            writer.write(_spoilt(kind, await self._forward(head, body)))
        if not writer.is_closing():
            await writer.drain()

    async def _forward(self, head: bytes, body: bytes) -> bytes:
        """The server's body."""
        reader, writer = await asyncio.open_connection(*self.upstream)
        try:
            writer.write(head[:-2] + b"Connection: close\r\n\r\n" + body)
            answer = await reader.read()
        finally:
            writer.close()
        found, _, payload = answer.partition(b"\r\n\r\n")
        assert b" 200 " in found.splitlines()[0], answer[:300]
        return payload


def _spoilt(kind: Kind, payload: bytes) -> bytes:
    half = payload[: len(payload) // 2]
    if kind == "truncated_json":
        return _response("200 OK", half)
    whole = _response("200 OK", payload)
    return whole[: len(whole) - len(half)] if kind == "cut" else whole


def _response(status: str, payload: bytes, headers: str = "") -> bytes:
    first = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n{headers}"
    return f"{first}Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n".encode() + payload


def _content_length(head: bytes) -> int:
    return next(int(line.split(b":")[1]) for line in head.lower().splitlines() if line.startswith(b"content-length"))


def _reset(writer: asyncio.StreamWriter) -> None:
    """End the connection with a TCP reset."""
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()
