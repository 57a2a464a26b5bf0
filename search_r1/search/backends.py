"""A retriever by its command-line name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from search_r1.search.bm25 import Bm25Retriever
from search_r1.search.corpus import Corpus
from search_r1.search.errors import IndexMismatchError, ServerError
from search_r1.search.retriever import Retriever


@dataclass(frozen=True)
class BackendOptions:
    """`name` is `bm25` or a dense encoder family; `model` a folder or hub id; `num_threads` counts CPU threads."""

    name: str
    index_path: str | None = None
    model: str | None = None
    gpu: bool = False
    num_threads: int = 1


def load_retriever(options: BackendOptions, corpus: Corpus) -> Retriever:
    """Open the index (BM25 without an index path: build it in memory). Raises a `SearchError`."""
    if options.name == "bm25":
        return Bm25Retriever.load(options.index_path, corpus) if options.index_path else Bm25Retriever.build(corpus)
    if not options.index_path or not options.model:
        raise ServerError(f"dense retriever {options.name!r} needs --index_path and --retriever_model")
    if not Path(options.index_path).is_file():
        raise IndexMismatchError(
            f"index file {options.index_path} does not exist; build one: python -m search_r1.search.index_builder "
            f"--retrieval_method {options.name} --model_path {options.model} --corpus_path {corpus.path} --save_dir ..."
        )
    from search_r1.search.dense import DenseRetriever  # torch is loaded only for a dense encoder

    return DenseRetriever.load(
        Path(options.index_path), corpus, options.name, options.model, gpu=options.gpu, num_threads=options.num_threads
    )
