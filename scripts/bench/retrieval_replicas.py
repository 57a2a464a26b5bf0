"""One server, and two replicas of it, on the same two cores: what each makes of the same load.

    .venv/bin/python scripts/bench/retrieval_replicas.py --corpus_path passages.jsonl --index_path indexes/bm25 \\
      --retriever_name bm25 --questions questions.jsonl

All servers of a side share two cores with the clients; a side of two servers gives each one thread and half of the
clients, as the client of the environment does with several addresses. The sides take turns in every round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from retrieval_load import Load, markdown, read_questions, run_load
from servers import (
    Server,
    add_index_arguments,
    cpu_s,
    process_tree,
    proportional_mib,
    retrieval_command,
    server,
)

SIDES: dict[str, list[list[str]]] = {
    "one process": [["--num_threads", "2"]],
    "two replicas": [["--num_threads", "1"]] * 2,
}
LOADS = {
    "256 clients x 1": (Load("", 256), ["--cache_size", "0"]),
    "32 clients x lists of 64": (Load("", 32, (64,)), ["--cache_size", "0"]),
    "256 clients x 1, all cached": (Load("", 256), []),
    "1000 clients x 1, queue of 512": (Load("", 1000), ["--cache_size", "0", "--max_queue", "512"]),
}


@contextmanager
def running(arguments: argparse.Namespace, side: list[list[str]], more: list[str]) -> Iterator[list[Server]]:
    """The servers of a side, warm."""
    with ExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        yield [
            stack.enter_context(server([*retrieval_command(arguments), *own, *more], [0, 1], log / f"{number}.log"))
            for number, own in enumerate(side)
        ]


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each round of each load and side."""
    rows = []
    questions = read_questions(arguments.questions)
    for scenario in arguments.scenarios:
        load, more = LOADS[scenario]
        asked = questions[:500] if "cached" in scenario else questions
        for number in range(arguments.rounds):
            for name, side in SIDES.items():
                with running(arguments, side, more) as servers:
                    load = replace(load, url=",".join(f"{each.url}/retrieve" for each in servers))
                    run_load(replace(load, clients=64, seconds=2.0), asked[:500])
                    pids = [pid for each in servers for pid in process_tree(each.process.pid)]
                    before_s = sum(map(cpu_s, pids))
                    row = run_load(replace(load, seconds=arguments.seconds), asked)
                    row["cpu_ms_per_query"] = (sum(map(cpu_s, pids)) - before_s) * 1000 / num_answered(row)
                    row["memory_mib"] = round(sum(map(proportional_mib, pids)))
                rows.append({"scenario": scenario, "side": name, "round": number} | row)
                print(json.dumps(rows[-1]), flush=True)
    return rows


def num_answered(row: dict[str, Any]) -> float:
    """Queries of a row of `run_load`."""
    return float(row["queries_per_s"] * row["seconds"])


def medians(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line for each load and side."""
    grouped = defaultdict(list)
    for row in rows:
        grouped[row["scenario"], row["side"]].append(row)
    lines = []
    for (scenario, side), group in grouped.items():
        refused = [row["others"].get("503", {}) for row in group]
        lines.append(
            {"load": scenario, "side": side}
            | {name: statistics.median(row[name] for row in group) for name in ("queries_per_s", "p50_ms", "p99_ms")}
            | {"cpu ms a query": round(statistics.median(row["cpu_ms_per_query"] for row in group), 3)}
            | {"memory_mib": statistics.median(row["memory_mib"] for row in group)}
            | {"refusal p99 ms": statistics.median(seen["p99_ms"] for seen in refused) if all(refused) else ""}
        )
    return lines


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="One server against two replicas of it.")
    add_index_arguments(parser)
    parser.add_argument("--scenarios", nargs="+", default=list(LOADS), choices=list(LOADS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    print(markdown(medians(measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
