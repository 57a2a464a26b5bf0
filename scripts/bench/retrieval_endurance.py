"""A server under load for long, beyond its queue, and left by its clients.

    .venv/bin/python scripts/bench/retrieval_endurance.py --corpus_path passages.jsonl --index_path indexes/bm25 \\
      --retriever_name bm25 --questions questions.jsonl

Three parts: 256 clients with lists of mixed sizes for `--minutes` (errors, and memory after the first minute); 1,000
clients of single queries against a queue of 512 (how fast the excess is refused, and what the others notice); clients
that leave while they wait (what the server still computes for them).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from retrieval_load import Load, read_questions, requests_of, run_load
from servers import Server, add_index_arguments, retrieval_command, server

_SIZES = (1, 1, 1, 4, 16, 64)
_SAMPLES_A_MINUTE = 300


def main() -> None:
    """Run the three parts, print, write JSON."""
    parser = argparse.ArgumentParser(description="A server under load for long, and beyond its queue.")
    add_index_arguments(parser)
    parser.add_argument(
        "--parts", nargs="+", default=["long", "overload", "left"], choices=["long", "overload", "left"]
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--output", type=Path, default=Path("runs/bench/endurance.json"))
    arguments = parser.parse_args()
    questions = read_questions(arguments.questions)
    parts: dict[str, tuple[list[str], Callable[[Server], dict[str, Any]]]] = {
        "long": ([], partial(long_load, questions, arguments.minutes)),
        "overload": (["--max_queue", "512", "--cache_size", "0"], partial(overload, questions)),
        "left": ([], partial(left, questions)),
    }
    results = {name: run(arguments, *parts[name]) for name in arguments.parts}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(results, indent=1) + "\n")


def run(arguments: argparse.Namespace, more: list[str], part: Callable[[Server], dict[str, Any]]) -> dict[str, Any]:
    """One part on a fresh server."""
    command = [*retrieval_command(arguments), *more]
    with tempfile.NamedTemporaryFile(suffix=".log") as log, server(command, [0, 1], Path(log.name)) as running:
        run_load(Load(f"{running.url}/retrieve", 8, seconds=2.0), ["warm"])
        result = part(running)
    print(json.dumps(result), flush=True)
    return result


def long_load(questions: list[str], minutes: float, running: Server) -> dict[str, Any]:
    """All statuses, and the memory of each minute: the median of its samples."""
    first = len(running.rss_mib)
    row = run_load(Load(f"{running.url}/retrieve", 256, _SIZES, seconds=minutes * 60), questions)
    samples = running.rss_mib[first:]
    by_minute = [
        round(statistics.median(samples[start : start + _SAMPLES_A_MINUTE]))
        for start in range(0, len(samples), _SAMPLES_A_MINUTE)
    ]
    return row | {
        "rss_mib_by_minute": by_minute,
        "growth_after_first_minute": round(by_minute[-1] / by_minute[0] - 1, 4),
    }


def overload(questions: list[str], running: Server) -> dict[str, Any]:
    """500 clients, which the queue holds, and then 1,000."""
    url = f"{running.url}/retrieve"
    return {f"{clients} clients": run_load(Load(url, clients, seconds=10.0), questions) for clients in (500, 1000)}


def left(questions: list[str], running: Server) -> dict[str, Any]:
    """Clients that leave after 50 ms, then one that asks: how many queries were searched, and how long it waits."""
    before = searched(running)
    clients = 500
    asyncio.run(_leave(Load(f"{running.url}/retrieve", list_sizes=(4,)), questions, clients))
    start = time.perf_counter()
    body = json.dumps({"queries": ["who painted the river?"]}).encode()
    request = urllib.request.Request(f"{running.url}/retrieve", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request).read()  # nosec B310 # of the server that this script started
    waited = time.perf_counter() - start
    return {
        "queries of clients that left": 4 * clients,
        "queries searched": searched(running) - before - 1,
        "wait of the next client ms": round(waited * 1000, 1),
    }


async def _leave(load: Load, questions: list[str], clients: int) -> None:
    requests = requests_of(load, questions)
    where = re.fullmatch(r"http://([^:/]+):(\d+)/.*", load.url)
    assert where is not None
    connections = [await asyncio.open_connection(where[1], int(where[2])) for _ in range(clients)]
    for _, writer in connections:
        writer.write(next(requests)[0])
    await asyncio.sleep(0.05)
    for _, writer in connections:
        writer.transport.abort()


def searched(running: Server) -> int:
    """Queries in batches so far."""
    with urllib.request.urlopen(f"{running.url}/metrics") as reply:  # nosec B310 # as above
        text = reply.read().decode()
    found = re.search(r"^retrieval_batch_queries_sum (\S+)$", text, re.MULTILINE)
    assert found is not None
    return int(float(found[1]))


if __name__ == "__main__":
    main()
