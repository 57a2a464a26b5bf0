"""Dense search: an index over passage vectors, the encoder of the queries, and the check that the two fit."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any, Protocol

import faiss
import numpy as np
import torch

from long_task import track
from search_r1.errors import IndexMismatchError, ServerError
from search_r1.search.corpus import Corpus
from search_r1.search.dense.embeddings import BLOCK_ROWS, VectorFile
from search_r1.search.dense.encoding.encoder import Encoder, EncoderOptions
from search_r1.search.dense.exact_index import ExactIndex
from search_r1.search.dense.faiss_index import FaissIndex, flat_vectors, read_index
from search_r1.search.manifest import check_manifest, manifest_path, read_manifest
from search_r1.search.retriever import Hit, RetrieverOptions

_LOG = logging.getLogger(__name__)


def encoder_fields(encoder: Encoder) -> dict[str, Any]:
    """The encoder's fields in an index manifest; the digest of a question encoder has its own key."""
    weights = "query_weights" if encoder.side == "query" else "weights"
    return {"format": 1, weights: encoder.fingerprint, "dim": encoder.dim} | encoder.spec.index_fields()


def query_encoder(options: RetrieverOptions, pooling: str | None) -> Encoder:
    """The query encoder that `options` select. Raises `ServerError` or `EncoderError`."""
    if not options.model:
        raise ServerError(f"dense retriever {options.name!r} needs --retriever_model")
    return Encoder(
        EncoderOptions(
            options.encoder_family,
            options.model,
            pooling=pooling,
            precision=options.query_precision,
            num_threads=options.num_threads,
        )
    )


def check_fit(path: Path, found: dict[str, Any], encoder: Encoder, corpus: Corpus, sizes: dict[str, int]) -> None:
    """Raise `IndexMismatchError` if the manifest `found` at `path` is for another corpus, encoder or size."""
    expected = encoder_fields(encoder) | {"corpus": corpus.digest}
    if "query_weights" in expected and "query_weights" not in found:
        _LOG.warning("%s does not name its question encoder, so it cannot be checked", path)
        del expected["query_weights"]
    expected |= {key: value for key, value in sizes.items() if key in found}
    check_manifest(path, {"end_token": "", "title_pair": False} | found, expected)


_SAMPLED_BLOCKS, _SAMPLED_BYTES = 256, 4096


class VectorIndex(Protocol):
    """Finds rows by inner product with a query vector; see `Retriever` for order and ties."""

    dim: int

    def __len__(self) -> int: ...

    def search(self, queries_BD: np.ndarray, k: int) -> list[list[Hit]]: ...


class DenseRetriever:
    """Encodes queries and searches an index; `fingerprint` is a digest of everything that results depend on."""

    def __init__(self, name: str, index: VectorIndex, encoder: Encoder, fingerprint: str = "") -> None:
        """Raises `IndexMismatchError` if index and encoder do not match."""
        if index.dim != encoder.dim:
            raise IndexMismatchError(f"the index has vectors of {index.dim} values, the encoder of {encoder.dim}")
        self.name = name
        self.fingerprint = fingerprint or name
        self._index = index
        self._encoder = encoder

    @classmethod
    def load(cls, path: Path, corpus: Corpus, options: RetrieverOptions) -> DenseRetriever:
        """Open a FAISS file or an embeddings file (`.memmap`).

        If there is a manifest, it gives the pooling, and corpus, encoder, rows and size are checked against it. Raises
        `IndexMismatchError`, `EncoderError`, or `ServerError` if a GPU is requested and there is none.
        """
        # The manifest, if there is one, says how the passages were encoded; the queries must be encoded alike.
        found = read_manifest(manifest_path(path))
        encoder = query_encoder(options, None if found is None else found.get("pooling"))
        if found is not None:
            sizes = {"num_rows": len(corpus), "rows_done": len(corpus), "bytes": path.stat().st_size}  # if complete
            check_fit(manifest_path(path), found, encoder, corpus, sizes)
        index = _open(path, len(corpus), encoder.dim, options)
        _LOG.info("%s: %d vectors by %s", path, len(index), type(index).__name__)
        # The fingerprint: a cached answer is used again only if all of this is the same.
        parts = {
            "index": _sample_digest(path),
            "engine": type(index).__name__,
            "search_parameters": options.search_parameters,
            "encoder": encoder_fields(encoder),
            "max_query_tokens": encoder.spec.max_query_tokens,
            "query_precision": encoder.precision,
            "corpus": corpus.digest,
        }
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
        return cls(options.name, index, encoder, digest)

    def __len__(self) -> int:
        return len(self._index)

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        """See `Retriever.search`; the score is the inner product."""
        if not queries:
            return []
        return self._index.search(self._encoder.encode_queries(queries), k)


def _open(path: Path, num_rows: int, dim: int, options: RetrieverOptions) -> VectorIndex:
    # Whatever has plain vectors is searched exactly, without FAISS, unless FAISS is asked for.
    vectors = VectorFile(path, num_rows, dim) if path.suffix == ".memmap" else flat_vectors(path)
    if options.engine != "faiss":
        if vectors is not None:
            if options.search_parameters:
                _LOG.warning(
                    "--search_parameters %s has no effect: %s is searched exactly", options.search_parameters, path
                )
            return ExactIndex(vectors, _devices(options), num_threads=options.num_threads)
        if options.engine == "matrix":
            raise IndexMismatchError(f"{path} is not a Flat inner-product index; the matrix engine needs one")
    faiss.omp_set_num_threads(options.num_threads)
    index = read_index(path)
    if vectors is not None:  # FAISS itself would never find a row with NaN, and not say so
        for start, block in track(vectors.blocks(), "check vectors", -(-len(vectors) // BLOCK_ROWS), "blocks"):
            vectors.check_finite(start, np.linalg.norm(block, axis=1))
    return FaissIndex(index, options.search_parameters, options.gpu)


def _devices(options: RetrieverOptions) -> list[str]:
    if not options.gpu:
        return ["cpu"]
    if not torch.cuda.is_available():
        raise ServerError("--faiss_gpu: torch sees no GPU; install a CUDA build of torch or drop the flag")
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


def _sample_digest(path: Path) -> str:
    """SHA-256 over the size of a file and up to 256 evenly spaced blocks of 4 KiB."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for start in np.unique(np.linspace(0, max(0, size - _SAMPLED_BYTES), _SAMPLED_BLOCKS).astype(np.int64)):
            file.seek(int(start))
            digest.update(file.read(_SAMPLED_BYTES))
    return digest.hexdigest()
