"""Answer recall of the retrievers over a corpus: how often one of the best k passages holds a gold answer.

    .venv/bin/python scripts/bench/retrieval_quality.py --corpus_path corpus.jsonl --questions nq/test.jsonl \\
      hotpotqa/dev.jsonl --work indexes/quality --model MODEL --output quality.json

Real indexes are built in `--work` and used again by the next run. Hits are counted as `corpus_tool audit` does, over
the questions that have an answer to look for, and over those of them whose answer is in the corpus at all. What cannot
run here is in the table with its reason.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from search_r1.data.corpus.answer_matching import AnswerTokens, answer_tokens
from search_r1.data.corpus.audit import (
    GoldQuestion,
    Rank,
    first_rank,
    matcher_of,
    read_questions,
    recall,
    scan_corpus,
    summarize,
)
from search_r1.errors import SearchError, ServerError
from search_r1.search import index_builder
from search_r1.search.bm25 import lucene
from search_r1.search.bm25.index import Bm25Retriever
from search_r1.search.bm25.lucene import LuceneRetriever, is_lucene_index
from search_r1.search.corpus import Corpus
from search_r1.search.dense.encoding.encoder import Encoder, EncoderOptions
from search_r1.search.dense.faiss_index import flat_vectors
from search_r1.search.hybrid import HybridRetriever
from search_r1.search.retriever import Hit, Retriever, RetrieverOptions
from search_r1.search.retriever_loading import load_retriever

_KS = (1, 3, 5, 20)
_RERANKED = 100
_AGREEMENT_K = 3


class Indexes:
    """The retrievers over one corpus, each built when it is first asked for."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self.corpus = Corpus(arguments.corpus_path)

    @cached_property
    def bm25(self) -> Retriever:
        """Ours."""
        return Bm25Retriever.build(self.corpus)

    @cached_property
    def lucene(self) -> Retriever:
        """Raises `ServerError` without pyserini or Java."""
        folder = self._arguments.work / "lucene"
        if not is_lucene_index(folder):
            build_lucene(self.corpus, folder)
        return LuceneRetriever.load(folder, self.corpus)

    @cached_property
    def dense(self) -> Retriever:
        """Raises `ServerError` without a model."""
        model = self._arguments.model
        index = str(self._dense_index(model, self._arguments.work))
        return load_retriever(
            RetrieverOptions(self._arguments.family, index, model, query_precision="float32"), self.corpus
        )

    @cached_property
    def hybrid(self) -> Retriever:
        """BM25 and dense by reciprocal rank fusion."""
        return HybridRetriever([self.bm25, self.dense])

    @cached_property
    def reranked(self) -> Retriever:
        """BM25, its best rows ordered by a bi-encoder."""
        model, folder = self._arguments.model, self._arguments.work
        if self._arguments.reranker is not None:
            model, folder = self._arguments.reranker, folder / "reranker"
        return Reranked(self.bm25, self._dense_index(model, folder), EncoderOptions(self._arguments.family, model))

    def _dense_index(self, model: str | None, folder: Path) -> Path:
        if model is None:
            raise ServerError("no model folder was given by --model")
        family, path = self._arguments.family, folder / f"{self._arguments.family}_Flat.index"
        if not path.is_file():
            options = {"--retrieval_method": family, "--model_path": model, "--save_dir": str(folder)}
            options |= {"--corpus_path": str(self.corpus.path), "--num_threads": "1"}
            index_builder.build(index_builder.parse_arguments([word for pair in options.items() for word in pair]))
        return path


class Reranked:
    """The best 100 rows of a retriever, ordered by the inner product of the bi-encoder's vectors."""

    name = "reranked"

    def __init__(self, first: Retriever, index: Path, encoder: EncoderOptions) -> None:
        vectors = flat_vectors(index)
        assert vectors is not None, f"{index} is not a Flat index"
        self._first, self._encoder = first, Encoder(encoder)
        self._vectors_RD = vectors.block(0, len(vectors))

    def __len__(self) -> int:
        return len(self._first)

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        """See `Retriever.search`."""
        queries_BD = self._encoder.encode_queries(queries)
        found = self._first.search(queries, _RERANKED)
        return [self._order(hits, query_D)[:k] for hits, query_D in zip(found, queries_BD, strict=True)]

    def _order(self, hits: list[Hit], query_D: np.ndarray) -> list[Hit]:
        scores = self._vectors_RD[np.array([hit.row for hit in hits], dtype=np.int64)] @ query_D
        scored = [Hit(hit.row, score) for hit, score in zip(hits, scores.tolist(), strict=True)]
        return sorted(scored, key=lambda hit: (-hit.score, hit.row))


def build_lucene(corpus: Corpus, folder: Path) -> None:
    """Index by pyserini's own program, in a process of its own. Raises `ServerError`."""
    found = lucene.find_java()
    source = folder.with_name("lucene_input")
    source.mkdir(parents=True, exist_ok=True)
    with (source / "corpus.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"id": row["id"], "contents": row["contents"]}) + "\n" for row in corpus)
    run = "runpy.run_module('pyserini.index.lucene', run_name='__main__')"
    script = f"import runpy, search_r1.search.bm25.lucene as java; java.use_java(java.find_java()); {run}"
    options = ["--collection", "JsonCollection", "--generator", "DefaultLuceneDocumentGenerator", "--threads", "1"]
    command = [sys.executable, "-c", script, *options, "--input", str(source), "--index", str(folder)]
    environment = os.environ | {"JAVA_HOME": str(found.home), "OPENAI_API_KEY": "none"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        reason = (done.stderr.strip() or "no message").splitlines()[-1]
        raise ServerError(f"pyserini could not build the index: {reason}")


@dataclass(frozen=True)
class Sets:
    """Questions by set, and the answers that the corpus holds."""

    questions: dict[str, list[GoldQuestion]]
    found: set[AnswerTokens]

    @property
    def pooled(self) -> list[GoldQuestion]:
        return [question for group in self.questions.values() for question in group]

    def rows(self, ranks: Sequence[Rank]) -> dict[str, Any]:
        """Recall of each set and of all; `ranks` in the order of `pooled`."""
        rows, start = {}, 0
        for name, group in self.questions.items():
            rows[name] = recall(group, self.found, ranks[start : start + len(group)], _KS)
            start += len(group)
        return rows | {"all": recall(self.pooled, self.found, ranks, _KS)}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything, for JSON."""
    questions = {f"{path.parent.name}/{path.name}": read_questions(path) for path in arguments.questions}
    every = [question for group in questions.values() for question in group]
    num_passages, found = scan_corpus(arguments.corpus_path, matcher_of(every))
    sets, indexes = Sets(questions, found), Indexes(arguments)
    systems: dict[str, Callable[[], Retriever]] = {
        "BM25": lambda: indexes.bm25,
        "BM25, Lucene": lambda: indexes.lucene,
        f"dense, {arguments.family}": lambda: indexes.dense,
        "hybrid (BM25 + dense, RRF)": lambda: indexes.hybrid,
        f"BM25, best {_RERANKED} reranked by the bi-encoder": lambda: indexes.reranked,
    }
    report: dict[str, Any] = {
        "corpus": arguments.corpus_path.name,
        "passages": num_passages,
        "coverage": {name: summarize(group, found) for name, group in (questions | {"all": every}).items()},
        "systems": {name: _recall_of(system, sets, indexes.corpus) for name, system in systems.items()},
    }
    if "not_run" not in report["systems"]["BM25, Lucene"]:
        from lucene_agreement import compare

        texts = [question.text for question in every]
        report["agreement"] = compare(indexes.corpus, texts, indexes.bm25, indexes.lucene, _AGREEMENT_K)
    return report


def _recall_of(system: Callable[[], Retriever], sets: Sets, corpus: Corpus) -> dict[str, Any]:
    try:
        retriever = system()
    except SearchError as error:
        return {"not_run": str(error)}
    tokens = lru_cache(maxsize=None)(lambda row: answer_tokens(corpus[row]["contents"]))
    found = retriever.search([question.text for question in sets.pooled], max(_KS))
    pairs = zip(sets.pooled, found, strict=True)
    return sets.rows([first_rank(question, (tokens(hit.row) for hit in hits)) for question, hits in pairs])


def table(report: dict[str, Any]) -> Iterator[str]:
    """Markdown: recall over the span questions, and over the covered ones in brackets."""
    for name, counts in report["coverage"].items():
        shown = ", ".join(f"{counts[key]} {key}" for key in ("questions", "yes_no", "empty", "span", "covered"))
        yield f"{name}: {shown}, coverage {counts['coverage']}"
    yield "\n| questions | retriever | " + " | ".join(f"@{k}" for k in _KS) + " |"
    yield "|---|---|" + "---|" * len(_KS)
    for name in report["coverage"]:
        for system, rows in report["systems"].items():
            if "not_run" in rows:
                yield f"| {name} | {system} | not run: {rows['not_run']} |" + " |" * (len(_KS) - 1)
                continue
            cells = (f"{row['of_all']:.3f} ({row['of_covered']:.3f})" for row in rows[name].values())
            yield f"| {name} | {system} | {' | '.join(cells)} |"
    if "agreement" in report:
        yield "\n" + json.dumps(report["agreement"], indent=2, ensure_ascii=False)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Answer recall of the retrievers over a corpus.")
    parser.add_argument("--corpus_path", required=True, type=Path, help="passages, .jsonl or .jsonl.gz")
    parser.add_argument("--questions", required=True, nargs="+", type=Path, help="files in the format of FlashRAG")
    parser.add_argument("--work", required=True, type=Path, help="folder of the indexes, kept for the next run")
    parser.add_argument("--model", help="folder of the dense encoder; without it the dense rows are not run")
    parser.add_argument("--family", default="minilm", help="the encoder's family (default: minilm)")
    parser.add_argument("--reranker", help="folder of the bi-encoder that reranks (default: that of --model)")
    parser.add_argument("--output", type=Path, help="write the report as JSON")
    return parser.parse_args()


def main() -> None:
    """Measure, write and print."""
    arguments = parse_arguments()
    arguments.work.mkdir(parents=True, exist_ok=True)
    report = measure(arguments)
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print("\n".join(table(report)))


if __name__ == "__main__":
    main()
