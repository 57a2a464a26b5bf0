"""Dense search: a FAISS index over passage vectors, and the encoder of the queries."""

from __future__ import annotations

from pathlib import Path

import faiss
import numpy as np

from search_r1.search.corpus import Corpus
from search_r1.search.encoder import Encoder, EncoderOptions
from search_r1.search.errors import IndexMismatchError, ServerError
from search_r1.search.manifest import check_manifest, read_manifest
from search_r1.search.retriever import Hit


def manifest_path(index_path: Path) -> Path:
    """Where the manifest of a FAISS file is kept."""
    return index_path.with_name(index_path.name + ".json")


class DenseRetriever:
    """Inner-product search, exact or approximate as the index is."""

    def __init__(self, name: str, index: faiss.Index, encoder: Encoder) -> None:
        """Raises `IndexMismatchError` when index and encoder do not fit each other."""
        if index.d != encoder.dim:
            raise IndexMismatchError(f"the index has vectors of {index.d} values, the encoder of {encoder.dim}")
        if index.metric_type != faiss.METRIC_INNER_PRODUCT:
            raise IndexMismatchError("the index was not built for the inner product; build it by index_builder")
        self.name = name
        self._index = index
        self._encoder = encoder

    @classmethod
    def load(
        cls, path: Path, corpus: Corpus, name: str, model: str, gpu: bool = False, num_threads: int = 1
    ) -> DenseRetriever:
        """Open a FAISS file. A manifest beside it gives the pooling, and corpus and encoder are checked against it.

        Raises `IndexMismatchError`, `EncoderError`, or `ServerError` when a GPU is asked for and FAISS has none.
        """
        found = read_manifest(manifest_path(path))
        pooling = None if found is None else found.get("pooling")
        encoder = Encoder(EncoderOptions(name, model, pooling=pooling, half=True, num_threads=num_threads))
        if found is not None:
            check_manifest(manifest_path(path), found, encoder_fields(encoder) | {"corpus": corpus.digest})
        faiss.omp_set_num_threads(num_threads)
        index = read_index(path)
        return cls(name, to_gpus(index) if gpu else index, encoder)

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        """See `Retriever.search`; the score is the inner product."""
        if not queries:
            return []
        scores, rows = self._index.search(self._encoder.encode_queries(queries), min(k, len(self)))
        return [_hits(*pair) for pair in zip(scores, rows, strict=True)]


def _hits(scores: np.ndarray, rows: np.ndarray) -> list[Hit]:
    """FAISS fills up with row -1 when it found fewer than k: those are no hits."""
    found = [Hit(int(row), float(score)) for score, row in zip(scores, rows, strict=True) if row >= 0]
    return sorted(found, key=lambda hit: (-hit.score, hit.row))


def encoder_fields(encoder: Encoder) -> dict[str, object]:
    """What an index manifest keeps of the encoder."""
    return {"format": 1, "weights": encoder.fingerprint, "dim": encoder.dim} | encoder.spec.index_fields()


def read_index(path: Path) -> faiss.Index:
    """Raises `IndexMismatchError` when `path` is not a FAISS index."""
    try:
        return faiss.read_index(str(path))
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise IndexMismatchError(f"{path} is not a readable FAISS index ({reason}); build it again") from error


def to_gpus(index: faiss.Index) -> faiss.Index:
    """Shard the index over all GPUs in half precision. Raises `ServerError` when this FAISS sees no GPU."""
    if not hasattr(faiss, "StandardGpuResources") or faiss.get_num_gpus() == 0:
        raise ServerError("--faiss_gpu: this FAISS sees no GPU; install faiss-gpu on a CUDA machine or drop the flag")
    options = faiss.GpuMultipleClonerOptions()
    options.useFloat16 = True
    options.shard = True
    return faiss.index_cpu_to_all_gpus(index, co=options)
