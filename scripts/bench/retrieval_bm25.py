"""BM25 over HTTP: single queries and lists, beside the library bm25s in this process.

    .venv/bin/python scripts/bench/retrieval_bm25.py --corpus_path passages.jsonl --index_path indexes/bm25 \\
      --questions questions.jsonl

The server has no cache here: every query is searched. Server and clients share the cores. `bm25s` searches the same
files, its numba backend, one query a call and 512 a call.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from retrieval_load import Load, markdown, read_questions, run_load
from servers import server

LOADS = {"256 clients x 1": Load("", 256), "32 clients x lists of 64": Load("", 32, (64,))}
_BATCHES = (1, 7, 64)


def measure(arguments: argparse.Namespace, questions: list[str]) -> list[dict[str, Any]]:
    """Rounds of all loads on one server, and whether a ranking depends on its batch."""
    command = ["-m", "search_r1.search.retrieval_server", "--corpus_path", arguments.corpus_path]
    command += ["--index_path", arguments.index_path, "--retriever_name", "bm25", "--cache_size", "0"]
    command += ["--num_threads", str(arguments.num_threads)]
    rows = []
    with tempfile.NamedTemporaryFile(suffix=".log") as log, server(command, [0, 1], Path(log.name)) as running:
        url = f"{running.url}/retrieve"
        run_load(Load(url, 64, seconds=2.0), questions[:500])
        for number in range(arguments.rounds):
            for name, load in LOADS.items():
                cpu_s = running.cpu_s
                row = run_load(Load(url, load.clients, load.list_sizes, seconds=arguments.seconds), questions)
                row["server_cores"] = round((running.cpu_s - cpu_s) / row["seconds"], 2)
                rows.append({"scenario": name, "round": number} | row)
                print(json.dumps(rows[-1]), flush=True)
        answers = [rankings(url, questions[:1024], size) for size in _BATCHES]
        print(json.dumps({"rankings alone and in lists of 7 and 64 are equal": answers.count(answers[0]) == 3}))
    return rows


def rankings(url: str, questions: list[str], size: int) -> list[Any]:
    """The answers to all questions, asked in lists of `size`."""
    found: list[Any] = []
    for start in range(0, len(questions), size):
        body = {"queries": questions[start : start + size], "topk": 10, "return_scores": True}
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as reply:  # nosec B310 # of the server that this script started
            found += json.load(reply)["result"]
    return found


def library(index_path: str, questions: list[str]) -> dict[str, float]:
    """Queries a second of bm25s itself, tokenising as the server does; medians of five."""
    import bm25s

    from search_r1.search.bm25.analyzer import terms

    index = bm25s.BM25.load(index_path, mmap=True, show_progress=False)
    index.backend = "numba"
    rates = {}
    for size in (1, 512):
        seconds = []
        for start in range(0, 6 * size, size):
            before = time.perf_counter()
            asked = [[term for term in terms(text) if term in index.vocab_dict] for text in questions[start:][:size]]
            index.retrieve(asked, k=3, show_progress=False, n_threads=1, backend_selection="numba")
            seconds.append(time.perf_counter() - before)
        rates[f"bm25s, {size} a call"] = round(size / statistics.median(seconds[1:]), 1)
    return rates


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description="BM25 over HTTP.")
    parser.add_argument("--corpus_path", required=True)
    parser.add_argument("--index_path", required=True, help="folder of the index builder")
    parser.add_argument("--questions", type=Path, nargs="+", required=True)
    parser.add_argument("--num_threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--output", type=Path, default=Path("runs/bench/bm25.json"))
    arguments = parser.parse_args()
    questions = read_questions(arguments.questions)
    baseline = library(arguments.index_path, questions)
    print(json.dumps(baseline), flush=True)
    rows = measure(arguments, questions)
    keys = ("requests_per_s", "queries_per_s", "p50_ms", "p99_ms")
    table: list[dict[str, Any]] = [
        {"scenario": name}
        | {key: statistics.median(row[key] for row in rows if row["scenario"] == name) for key in keys}
        for name in LOADS
    ]
    print(markdown(table))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps({"library": baseline, "table": table, "rounds": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
