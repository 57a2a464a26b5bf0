"""The real client of the retrieval server, and small servers that it meets."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response

from search_r1.search.client import RetrievalClient

Act = Callable[[RetrievalClient], Awaitable[Any]]


def with_client(url: str | Sequence[str], act: Act, **options: Any) -> Any:
    """What `act(client)` gives."""

    async def main() -> Any:
        client = RetrievalClient(url, **options)
        try:
            return await act(client)
        finally:
            await client.close()

    return asyncio.run(main())


def search(url: str | Sequence[str], query: str = "q", **options: Any) -> list[dict[str, Any]]:
    return with_client(url, lambda client: client.search(query), **options)


async def until(holds: Callable[[], bool]) -> None:
    """Waits while other tasks of the loop run."""
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.005)


class Peer:
    """A small retrieval server: a passage about each query, after a script of troubles (answers, or seconds to hang).

    `times`, `headers` and `requests` are those of what it was sent. While `door` is not set nothing is answered.
    """

    signature = ""  # ends the passages

    def __init__(self, *script: Response | float, forever: bool = False) -> None:
        self.script, self.forever = list(script), forever
        self.door = threading.Event()
        self.door.set()
        self.times: list[float] = []
        self.headers: list[Mapping[str, str]] = []
        self.requests: list[dict[str, Any]] = []
        self.app = FastAPI()
        self.app.post("/retrieve")(self._retrieve)

    def step(self, queries: list[str]) -> Response | float:
        """What to do about this list: the next of the script."""
        if not self.script:
            return 0.0
        return self.script[0] if self.forever else self.script.pop(0)

    async def _retrieve(self, request: Request) -> Response:
        self.times.append(time.monotonic())  # also where the client has left by now
        self.headers.append(request.headers)
        self.requests.append(json.loads(await request.body()))
        queries = self.requests[-1]["queries"]
        while not self.door.is_set():
            await asyncio.sleep(0.005)
        step = self.step(queries)
        if isinstance(step, Response):
            return step
        await asyncio.sleep(step)
        result = [[{"document": {"contents": f"about {query}{self.signature}"}, "score": 1.5}] for query in queries]
        return Response(json.dumps({"result": result}), media_type="application/json")

    @property
    def asked(self) -> list[str]:
        return [query for body in self.requests for query in body["queries"]]
