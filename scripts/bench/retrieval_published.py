"""Our dense server against the behaviour of the published one, on one core and on two.

    .venv/bin/python scripts/bench/retrieval_published.py --model MINILM --corpus_path passages.jsonl \\
      --index_path Flat.index --questions questions.jsonl

Both servers have the same encoder weights, the same vectors and the same core; the clients run on another one. In every
scenario they take turns, each freshly started, for several rounds; rates and latencies are medians over the rounds. On
two cores the clients have no core of their own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from retrieval_load import Load, markdown, read_questions, run_load
from servers import server

SCENARIOS = {
    "256 clients x 1": {"clients": 256},
    "32 clients x lists of 64": {"clients": 32, "list_sizes": (64,)},
    "256 clients x 1, each query 5 times": {"clients": 256, "repeats": 5},
}
CACHED = "256 clients x 1, all cached"
TWO_CORES = "256 clients x 1, two cores"
_CACHED_QUESTIONS = 200


def commands(arguments: argparse.Namespace, num_threads: int) -> dict[str, list[str]]:
    """The command line of each side."""
    shared = ["--corpus_path", arguments.corpus_path, "--index_path", arguments.index_path]
    shared += ["--retriever_model", arguments.model, "--num_threads", str(num_threads)]
    return {
        "published": [str(Path(__file__).with_name("published_server.py")), *shared],
        "ours": ["-m", "search_r1.search.retrieval_server", *shared, "--retriever_name", "minilm"],
    }


def measure(side: str, command: list[str], cores: list[int], load: dict[str, Any], questions: list[str]) -> dict:
    """One round of one side."""
    with tempfile.NamedTemporaryFile(suffix=".log") as log, server(command, cores, Path(log.name)) as running:
        warm, asked = questions[:8], questions[8:]
        run_load(Load(f"{running.url}/retrieve", clients=8, seconds=2.0), warm)
        if load.pop("cached", False):
            asked = asked[:_CACHED_QUESTIONS]
            run_load(Load(f"{running.url}/retrieve", clients=64, seconds=3.0), asked)
        cpu_s = running.cpu_s
        row = run_load(Load(f"{running.url}/retrieve", **load), asked)
        row["server_cores"] = round((running.cpu_s - cpu_s) / row["seconds"], 2)
        row["growth_mib"] = round(running.growth_mib)
        return {"side": side} | row


def compare(arguments: argparse.Namespace, questions: list[str]) -> list[dict[str, Any]]:
    """All scenarios, rounds and sides."""
    plan: list[tuple[str, list[str], int, dict[str, Any]]] = [
        (name, ["published", "ours"], 1, load) for name, load in SCENARIOS.items()
    ]
    plan += [(CACHED, ["ours"], 1, {"clients": 256, "cached": True}), (TWO_CORES, ["published", "ours"], 2, {})]
    rows = []
    for scenario, sides, num_cores, load in plan:
        if arguments.scenarios and not any(word in scenario for word in arguments.scenarios):
            continue
        for number in range(arguments.rounds):
            for side in sides:
                command = commands(arguments, num_cores)[side]
                timed = load | {"seconds": arguments.seconds}
                row = measure(side, command, list(range(num_cores)), timed, questions)
                rows.append({"scenario": scenario, "round": number} | row)
                print(json.dumps(rows[-1]), flush=True)
    return rows


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians over the rounds, ours over the published."""
    table = []
    for scenario in dict.fromkeys(row["scenario"] for row in rows):
        sides = {}
        for side in ("published", "ours"):
            own = [row for row in rows if row["scenario"] == scenario and row["side"] == side]
            if own:
                keys = ("queries_per_s", "p50_ms", "p99_ms", "growth_mib", "server_cores")
                sides[side] = {key: statistics.median(row[key] for row in own) for key in keys}
        ours, published = sides["ours"], sides.get("published", {})
        times = ours["queries_per_s"] / published["queries_per_s"] if published else float("nan")
        tail = ours["p99_ms"] / published["p99_ms"] if published else float("nan")
        table.append(
            {
                "scenario": scenario,
                "published q/s": published.get("queries_per_s", "-"),
                "ours q/s": ours["queries_per_s"],
                "ratio": round(times, 1) if published else "-",
                "published p99 ms": published.get("p99_ms", "-"),
                "ours p99 ms": ours["p99_ms"],
                "p99 ratio": round(tail, 3) if published else "-",
                "ours growth MiB": ours["growth_mib"],
            }
        )
    return table


def exactness(arguments: argparse.Namespace, questions: list[str]) -> dict[str, float]:
    """Share of the best 3 rows of float32 FAISS Flat that ours finds: for the same vectors, and with bf16 vectors."""
    import faiss

    from search_r1.search.dense.embeddings import VectorFile
    from search_r1.search.dense.encoding.encoder import Encoder, EncoderOptions
    from search_r1.search.dense.exact_index import ExactIndex

    index = faiss.read_index(arguments.index_path)
    header = Path(arguments.index_path).stat().st_size - index.ntotal * index.d * 4
    matrix = ExactIndex(VectorFile(Path(arguments.index_path), index.ntotal, index.d, header))
    shares = {}
    exact = Encoder(EncoderOptions("minilm", arguments.model)).encode_queries(questions)
    rounded = Encoder(EncoderOptions("minilm", arguments.model, precision="auto")).encode_queries(questions)
    _, expected = index.search(exact, 3)
    for name, vectors in (("search", exact), ("encoder and search", rounded)):
        found = [[hit.row for hit in hits] for hits in matrix.search(vectors, 3)]
        common = [len(set(rows) & set(best)) for rows, best in zip(found, expected.tolist(), strict=True)]
        shares[f"recall@3 of {name}"] = round(float(np.mean(common)) / 3, 4)
    return shares


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description="Our dense server against the published one's behaviour.")
    parser.add_argument("--model", required=True, help="folder of a MiniLM encoder")
    parser.add_argument("--corpus_path", required=True)
    parser.add_argument("--index_path", required=True, help="FAISS Flat of that corpus")
    parser.add_argument("--questions", type=Path, nargs="+", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--scenarios", nargs="*", help="words of the names of those to run; default: all")
    parser.add_argument("--output", type=Path, default=Path("runs/bench/published.json"))
    arguments = parser.parse_args()
    questions = read_questions(arguments.questions)
    shares = exactness(arguments, questions[:1000])
    print(json.dumps(shares), flush=True)
    rows = compare(arguments, questions)
    table = ratios(rows)
    print(markdown(table))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps({"exactness": shares, "table": table, "rounds": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
