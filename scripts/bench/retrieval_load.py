"""Load a retrieval server: C clients, each with one request in flight. Prints a table row and writes JSON.

    python scripts/bench/retrieval_load.py --url http://127.0.0.1:8000/retrieve --questions questions.jsonl \\
      --clients 256 --list_size 1 --seconds 20

Latency is seen by the client, in milliseconds. A question is sent `--repeats` times by different clients (a group of
trajectories asks alike) and not again until the questions are used up.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np


@dataclass
class Seen:
    """What the clients saw between `start` and `end` (seconds)."""

    latencies_s: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    num_queries: int = 0


def read_questions(path: Path, seed: int) -> list[str]:
    """The field `question` of each line, shuffled."""
    questions = [json.loads(line)["question"] for line in path.read_text(encoding="utf-8").splitlines()]
    random.Random(seed).shuffle(questions)
    return questions


def requests_of(questions: list[str], list_size: int, repeats: int) -> Iterator[list[str]]:
    """Endless lists; with `repeats`, equal lists follow each other and so go to different clients."""
    endless = itertools.cycle(questions)
    while True:
        queries = list(itertools.islice(endless, list_size))
        yield from itertools.repeat(queries, repeats)


async def client(
    session: aiohttp.ClientSession, url: str, topk: int, lists: Iterator[list[str]], end: float, seen: Seen
) -> None:
    """Ask, wait, ask again until `end` on the clock of `time.perf_counter`."""
    while (start := time.perf_counter()) < end:
        queries = next(lists)
        try:
            body = {"queries": queries, "topk": topk, "return_scores": True}
            async with session.post(url, json=body) as response:
                await response.read()
                status = str(response.status)
        except (aiohttp.ClientError, TimeoutError) as error:
            status = type(error).__name__
        seen.statuses[status] += 1
        if status == "200":
            seen.latencies_s.append(time.perf_counter() - start)
            seen.num_queries += len(queries)


async def load(arguments: argparse.Namespace) -> dict[str, object]:
    """One run."""
    lists = requests_of(read_questions(arguments.questions, arguments.seed), arguments.list_size, arguments.repeats)
    seen = Seen()
    headers = {"Authorization": f"Bearer {arguments.auth_token}"} if arguments.auth_token else {}
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=arguments.timeout_s)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        start = time.perf_counter()
        asks = (session, arguments.url, arguments.topk, lists, start + arguments.seconds, seen)
        await asyncio.gather(*(client(*asks) for _ in range(arguments.clients)))
        elapsed_s = time.perf_counter() - start
    p50, p99 = np.percentile(seen.latencies_s, [50, 99]) * 1000 if seen.latencies_s else (float("nan"),) * 2
    return {
        "clients": arguments.clients,
        "list_size": arguments.list_size,
        "repeats": arguments.repeats,
        "seconds": round(elapsed_s, 2),
        "requests_per_s": round(len(seen.latencies_s) / elapsed_s, 1),
        "queries_per_s": round(seen.num_queries / elapsed_s, 1),
        "p50_ms": round(float(p50), 2),
        "p99_ms": round(float(p99), 2),
        "statuses": dict(seen.statuses),
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Load a retrieval server.")
    parser.add_argument("--url", default="http://127.0.0.1:8000/retrieve")
    parser.add_argument("--questions", type=Path, required=True, help="JSON lines with a field `question`")
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--list_size", type=int, default=1, help="queries a request")
    parser.add_argument("--repeats", type=int, default=1, help="how many clients send the same list")
    parser.add_argument("--topk", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--timeout_s", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--auth_token")
    parser.add_argument("--output", type=Path, help="append the row to this file of JSON lines")
    return parser.parse_args()


def main() -> None:
    """Run once and print."""
    arguments = parse_arguments()
    row = asyncio.run(load(arguments))
    print("| " + " | ".join(row) + " |")
    print("|" + "---|" * len(row))
    print("| " + " | ".join(str(value) for value in row.values()) + " |")
    if arguments.output:
        with arguments.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
