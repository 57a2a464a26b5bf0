"""Load a retriever by its command-line name."""

from __future__ import annotations

import difflib
import logging
import os
from dataclasses import replace
from pathlib import Path
from shlex import quote

from search_r1.errors import EncoderError, IndexMismatchError, ServerError
from search_r1.search.bm25.index import Bm25Retriever
from search_r1.search.bm25.lucene import LuceneRetriever, is_lucene_index
from search_r1.search.corpus import Corpus
from search_r1.search.dense.encoding.specification import FAMILIES
from search_r1.search.hybrid import HybridRetriever
from search_r1.search.retriever import Retriever, RetrieverOptions

_LOG = logging.getLogger(__name__)

ENGINES = ("auto", "faiss", "matrix")
LOCAL = ("bm25", "hybrid")
_MANY_PASSAGES = 1_000_000  # from here on a search with words takes one core long, too
_MANY_CORES = 4


def check_name(name: str, model: str | None = None) -> None:
    """Raise `ServerError` if `name` looks like a misspelt name of a retriever.

    A dense encoder may have any name, such as bge-m3, if its `model` says itself how to pool.
    """
    known = [*LOCAL, *FAMILIES]
    near = difflib.get_close_matches(name.lower(), known, n=1)
    if name.lower() not in known and near and (near[0] in LOCAL or not _says_how_to_pool(model)):
        raise ServerError(f"there is no retriever {name!r}; did you mean {near[0]}? There are {', '.join(known)}")


def _says_how_to_pool(model: str | None) -> bool:
    if not model:
        return False
    from search_r1.search.dense.encoding.model import json_reader  # loads torch

    try:
        return json_reader(model)("modules.json") is not None
    except EncoderError:
        return False


def load_retriever(options: RetrieverOptions, corpus: Corpus) -> Retriever:
    """Open the index (for BM25 without an index path, build it in memory). Raises a `SearchError`."""
    check_name(options.name, options.model)
    if options.name.lower() in LOCAL:
        options = replace(options, name=options.name.lower())
    if options.engine not in ENGINES:
        raise ServerError(f"dense engine {options.engine!r} is not one of {', '.join(ENGINES)}")
    _tell_of_idle_cores(options, len(corpus))
    if options.name == "bm25":
        return _load_bm25(options.index_path, corpus, options.num_threads)
    if options.name == "hybrid":
        return _load_hybrid(options, corpus)
    return _load_dense(options, corpus)


def _tell_of_idle_cores(options: RetrieverOptions, num_passages: int) -> None:
    """One thread is the default, as a laptop's cores are the trainer's; on a server, rollouts would wait for it."""
    cores, is_slow = len(os.sched_getaffinity(0)), options.name != "bm25" or num_passages >= _MANY_PASSAGES
    if options.num_threads == 1 and not options.gpu and is_slow and cores >= _MANY_CORES:
        _LOG.warning("queries are answered by one of %d CPU cores: --num_threads N gives them more", cores)


def _load_bm25(index_path: str | None, corpus: Corpus, num_threads: int) -> Retriever:
    """Our own BM25 index, or a Lucene index, by what the folder holds; without a folder, built in memory."""
    if not index_path:
        return Bm25Retriever.build(corpus, num_threads=num_threads)
    if is_lucene_index(index_path):
        return LuceneRetriever.load(index_path, corpus, num_threads=num_threads)
    return Bm25Retriever.load(index_path, corpus, num_threads)


def _load_hybrid(options: RetrieverOptions, corpus: Corpus) -> Retriever:
    if not options.dense_name:
        raise ServerError("retriever 'hybrid' needs --dense_name, the encoder family of its dense index (e5, bge, ...)")
    dense = _load_dense(replace(options, name=options.dense_name), corpus)
    return HybridRetriever([_load_bm25(options.bm25_index_path, corpus, options.num_threads), dense])


def _load_dense(options: RetrieverOptions, corpus: Corpus) -> Retriever:
    if not options.index_path or not options.model:
        raise ServerError(f"dense retriever {options.name!r} needs --index_path and --retriever_model")
    path = Path(options.index_path)
    try:
        if not path.is_file():
            raise IndexMismatchError(
                f"index file {path} does not exist; build one: .venv/bin/python -m search_r1.search.index_builder "
                f"--retrieval_method {options.name} --model_path {quote(options.model)} "
                f"--corpus_path {quote(str(corpus.path))} --save_dir ..."
            )
        from search_r1.search.dense.retriever import DenseRetriever  # torch is loaded only for a dense encoder

        return DenseRetriever.load(path, corpus, options)
    except OSError as error:
        raise IndexMismatchError(f"index file {path} cannot be read: {error.strerror or error}; allow it") from error
