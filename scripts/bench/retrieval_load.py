"""Load a retrieval server: C clients, each with one request in flight. Prints a table row and writes JSON.

    .venv/bin/python scripts/bench/retrieval_load.py --url http://127.0.0.1:8000/retrieve --questions questions.jsonl \\
      --clients 256 --list_size 1 --seconds 20

Several servers (`--url` with commas between) share the clients. Latency is seen by the client, in milliseconds. A
question is sent `--repeats` times by different clients (a group of trajectories asks alike) and not again until the
questions are used up. Several list sizes take turns. After HTTP 503 a client waits as Retry-After says. The clients
write and read bytes themselves: a library's client costs as much as the server it is to load.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np


@dataclass(frozen=True)
class Load:
    """What to send: `list_sizes` queries a request in turn, each list `repeats` times, for `seconds`."""

    url: str
    clients: int = 256
    list_sizes: tuple[int, ...] = (1,)
    repeats: int = 1
    topk: int = 3
    seconds: float = 20.0
    auth_token: str | None = None


@dataclass
class Seen:
    """What the clients saw: seconds of each request by its status, and the queries answered."""

    latencies_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    num_queries: int = 0


class Client(asyncio.Protocol):
    """One connection that asks, waits and asks again until `end` on the clock of `time.perf_counter`."""

    def __init__(self, requests: Iterator[tuple[bytes, int]], end: float, seen: Seen) -> None:
        self.done = asyncio.get_running_loop().create_future()
        self._requests, self._end, self._seen = requests, end, seen
        self._buffer = bytearray()
        self._num_bytes: int | None = None
        self._pause_s = 0
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._ask()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._num_bytes is None:
            split = self._buffer.find(b"\r\n\r\n")
            if split < 0:
                return
            header = bytes(self._buffer[:split]).lower()
            self._num_bytes = split + 4 + _number(header, b"content-length:")
            self._pause_s = _number(header, b"retry-after:")
        if len(self._buffer) < self._num_bytes:
            return
        self._count(self._buffer[9:12].decode())
        self._buffer.clear()
        self._num_bytes = None
        if self._pause_s:
            asyncio.get_running_loop().call_later(self._pause_s, self._ask)
        else:
            self._ask()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self._count("connection lost")
            self.done.set_result(None)

    def _ask(self) -> None:
        self._start = time.perf_counter()
        if self._start >= self._end:
            self.done.set_result(None)
            self._transport.close()
            return
        body, self._num_queries = next(self._requests)
        self._transport.write(body)

    def _count(self, status: str) -> None:
        self._seen.latencies_s[status].append(time.perf_counter() - self._start)
        if status == "200":
            self._seen.num_queries += self._num_queries


def _number(header: bytes, name: bytes) -> int:
    """The value of a field, 0 without it."""
    _, found, rest = header.partition(name)
    return int(rest.split(b"\r\n", 1)[0]) if found else 0


def read_questions(paths: list[Path], seed: int = 0) -> list[str]:
    """The field `question` of each line, without repeats, shuffled."""
    lines = itertools.chain.from_iterable(path.read_text(encoding="utf-8").splitlines() for path in paths)
    questions = list(dict.fromkeys(json.loads(line)["question"] for line in lines))
    random.Random(seed).shuffle(questions)
    return questions


def requests_of(load: Load, questions: list[str]) -> Iterator[tuple[bytes, int]]:
    """Endless requests and their number of queries; equal ones follow each other and so go to different clients."""
    where, endless = urlsplit(load.url.split(",")[0]), itertools.cycle(questions)
    head = f"POST {where.path} HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\n"
    if load.auth_token:
        head += f"Authorization: Bearer {load.auth_token}\r\n"
    for size in itertools.cycle(load.list_sizes):
        queries = list(itertools.islice(endless, size))
        body = json.dumps({"queries": queries, "topk": load.topk, "return_scores": True}).encode()
        request = head.encode() + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        yield from itertools.repeat((request, size), load.repeats)


async def _run(load: Load, questions: list[str]) -> dict[str, Any]:
    servers = itertools.cycle([urlsplit(url) for url in load.url.split(",")])
    seen, loop = Seen(), asyncio.get_running_loop()
    requests, start = requests_of(load, questions), time.perf_counter()
    clients = []
    for where in itertools.islice(servers, load.clients):
        _, client = await loop.create_connection(
            lambda: Client(requests, start + load.seconds, seen), where.hostname, where.port
        )
        clients.append(client)
    await asyncio.gather(*(client.done for client in clients))
    return summary(load, seen, time.perf_counter() - start)


def summary(load: Load, seen: Seen, elapsed_s: float) -> dict[str, Any]:
    """One row: rates of the requests answered by 200, percentiles of their latency, and of all others by status."""
    others = {status: seconds for status, seconds in seen.latencies_s.items() if status != "200"}
    return {
        "clients": load.clients,
        "list_size": "/".join(map(str, load.list_sizes)),
        "repeats": load.repeats,
        "seconds": round(elapsed_s, 2),
        "requests_per_s": round(len(seen.latencies_s["200"]) / elapsed_s, 1),
        "queries_per_s": round(seen.num_queries / elapsed_s, 1),
        **percentiles(seen.latencies_s["200"]),
        "others": {status: {"requests": len(seconds), **percentiles(seconds)} for status, seconds in others.items()},
    }


def percentiles(seconds: list[float]) -> dict[str, float]:
    """p50, p99 and the longest, in milliseconds."""
    if not seconds:
        return {}
    p50, p99, longest = np.percentile(seconds, [50, 99, 100]) * 1000
    return {"p50_ms": round(float(p50), 2), "p99_ms": round(float(p99), 2), "max_ms": round(float(longest), 2)}


def run_load(load: Load, questions: list[str]) -> dict[str, Any]:
    """One run of all clients; see `summary`. Requests that run at the end are waited for and counted."""
    return asyncio.run(_run(load, questions))


def markdown(rows: list[dict[str, Any]]) -> str:
    """A table of rows with equal keys."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(map(str, row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    """Run once and print."""
    parser = argparse.ArgumentParser(description="Load a retrieval server.")
    parser.add_argument("--url", default="http://127.0.0.1:8000/retrieve")
    parser.add_argument("--questions", type=Path, nargs="+", required=True, help="JSON lines with a field `question`")
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--list_size", type=int, nargs="+", default=[1], help="queries a request; several take turns")
    parser.add_argument("--repeats", type=int, default=1, help="how many clients send the same list")
    parser.add_argument("--topk", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--auth_token")
    parser.add_argument("--output", type=Path, help="append the row to this file of JSON lines")
    arguments = parser.parse_args()
    load = Load(
        arguments.url,
        arguments.clients,
        tuple(arguments.list_size),
        arguments.repeats,
        arguments.topk,
        arguments.seconds,
        arguments.auth_token,
    )
    row = run_load(load, read_questions(arguments.questions, arguments.seed))
    print(markdown([row]))
    if arguments.output:
        with arguments.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
