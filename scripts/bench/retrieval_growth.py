"""What a server costs as the corpus grows: build time, bytes, memory, rate, tail latency, recall.

    .venv/bin/python scripts/bench/retrieval_growth.py --like wiki.jsonl.gz --model MINILM --questions questions.jsonl

Passages and vectors are those of `retrieval_data.py`; vectors are made, not encoded, so build time is that of the
index alone. Every server has two threads and shares two cores with 64 clients of single queries, its cache is off.
Recall@3 is the share of the three best rows of FAISS Flat in float32, for the same vectors of the questions.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from retrieval_data import make_corpus, make_seeds, make_vectors, read_passages
from retrieval_load import Load, markdown, read_questions, run_load
from servers import server

DENSE = {
    "exact (matrix)": ("Flat", "auto", ""),
    "HNSW32, efSearch 128": ("HNSW32", "faiss", "efSearch=128"),
    "HNSW32_SQ8, efSearch 128": ("HNSW32_SQ8", "faiss", "efSearch=128"),
    "IVF1024,SQ8, nprobe 64": ("IVF1024,SQ8", "faiss", "nprobe=64"),
}
_SAMPLE = 500


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description="What a server costs as the corpus grows.")
    parser.add_argument("--like", type=Path, required=True, help="a real corpus, .jsonl or .jsonl.gz")
    parser.add_argument("--model", required=True, help="folder of a MiniLM encoder")
    parser.add_argument("--questions", type=Path, nargs="+", required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--engines", nargs="+", default=["bm25", *DENSE], choices=["bm25", *DENSE])
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"))
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--output", type=Path, default=Path("runs/bench/growth.json"))
    arguments = parser.parse_args()
    questions, like = read_questions(arguments.questions), read_passages(arguments.like)
    seeds_SD = make_seeds(like, arguments.model, arguments.folder / "seeds.npy")
    rows = []
    for number in arguments.rows:
        corpus = make_corpus(like, number, arguments.folder / f"passages_{number}.jsonl")
        vectors = make_vectors(seeds_SD, number, arguments.folder / f"vectors_{number}.f32")
        for engine in arguments.engines:
            rows.append({"rows": number, "engine": engine} | measure(arguments, engine, corpus, vectors, questions))
            print(json.dumps(rows[-1]), flush=True)
    print(markdown(rows))
    arguments.output.write_text(json.dumps(rows, indent=1) + "\n")


def measure(
    arguments: argparse.Namespace, engine: str, corpus: Path, vectors: Path, questions: list[str]
) -> dict[str, Any]:
    """Build, serve, load."""
    folder = arguments.folder / f"growth_{corpus.stem}"
    kind, choice, parameters = DENSE.get(engine, ("", "", ""))
    build = ["--corpus_path", str(corpus), "--save_dir", str(folder), "--num_threads", "2"]
    command = ["-m", "search_r1.search.retrieval_server", "--corpus_path", str(corpus), "--num_threads", "2"]
    command += ["--cache_size", "0"]
    if kind:
        index = folder / f"minilm_{kind}.index"
        build += ["--retrieval_method", "minilm", "--model_path", arguments.model, "--faiss_type", kind]
        build += ["--embedding_path", str(vectors)]
        command += ["--retriever_name", "minilm", "--retriever_model", arguments.model, "--dense_engine", choice]
        command += ["--search_parameters", parameters] if parameters else []
    else:
        index = folder / "bm25"
        build += ["--retrieval_method", "bm25"]
        command += ["--retriever_name", "bm25"]
    seconds = timed_build(build)
    command += ["--index_path", str(index)]
    with tempfile.NamedTemporaryFile(suffix=".log") as log, server(command, [0, 1], Path(log.name)) as running:
        url = f"{running.url}/retrieve"
        run_load(Load(url, 64, seconds=2.0), questions)
        row = run_load(Load(url, 64, seconds=arguments.seconds), questions)
        memory = max(running.rss_mib)
    files = [index] if index.is_file() else list(index.iterdir())
    return {
        "build s": round(seconds, 1),
        "index MiB": round(sum(file.stat().st_size for file in files) / 2**20),
        "server RSS MiB": round(memory),
        "q/s": row["queries_per_s"],
        "p99 ms": row["p99_ms"],
        "recall@3": recall(arguments, index, kind, choice, parameters, vectors, questions) if kind else "-",
    }


def timed_build(arguments: list[str]) -> float:
    """Seconds from the first passage read to the last byte written, without loading the libraries."""
    from search_r1.search import index_builder

    start = time.perf_counter()
    if index_builder.main(arguments):
        raise SystemExit("the index was not built")
    return time.perf_counter() - start


def recall(
    arguments: argparse.Namespace,
    index: Path,
    kind: str,
    choice: str,
    parameters: str,
    vectors: Path,
    questions: list[str],
) -> float:
    """Share of Flat's three best rows that the index finds."""
    import faiss

    from search_r1.search.dense.encoding.encoder import Encoder, EncoderOptions
    from search_r1.search.dense.exact_index import ExactIndex
    from search_r1.search.dense.faiss_index import FaissIndex, read_index
    from search_r1.search.dense.vectors import VectorFile

    queries = Encoder(EncoderOptions("minilm", arguments.model)).encode_queries(questions[:_SAMPLE])
    rows = vectors.stat().st_size // 4 // queries.shape[1]
    flat = faiss.IndexFlatIP(queries.shape[1])
    file = VectorFile(vectors, rows, queries.shape[1])
    best = np.full((len(queries), 3), -np.inf, dtype=np.float32)
    expected = np.full((len(queries), 3), -1, dtype=np.int64)
    for start, block in file.blocks():  # Flat a block at a time: all of it need not fit into memory
        flat.reset()
        flat.add(block)
        scores, ids = flat.search(queries, 3)
        both, all_ids = np.hstack([best, scores]), np.hstack([expected, ids + start])
        order = np.argsort(-both, axis=1, kind="stable")[:, :3]
        best, expected = np.take_along_axis(both, order, 1), np.take_along_axis(all_ids, order, 1)
    searched = ExactIndex(file) if choice == "auto" else FaissIndex(read_index(index), parameters)
    found = [{hit.row for hit in hits} for hits in searched.search(queries, 3)]
    return round(
        sum(len(rows & set(best)) for rows, best in zip(found, expected.tolist(), strict=True)) / 3 / _SAMPLE, 4
    )


if __name__ == "__main__":
    main()
