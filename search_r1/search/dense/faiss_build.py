"""Build a FAISS index file from vectors on disk. Only what the index itself keeps must fit into memory."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import faiss
import numpy as np

from long_task import Progress
from search_r1.errors import ServerError
from search_r1.search.dense.faiss_index import to_gpus
from search_r1.search.dense.vectors import VectorFile

_ROWS_A_CENTROID = 64  # k-means wants at least 39
_LEAST_TRAIN_ROWS = 65_536  # 256 for each of the 256 centroids of a product quantizer
_COUNT_OFFSET = 8  # of the row count in the file of a Flat index, after its kind and its dimension


def build_index(
    vectors: VectorFile, faiss_type: str, target: Path, gpu: bool = False, train_rows: int | None = None
) -> None:
    """Write an inner-product index of `faiss_type` (any `faiss.index_factory` string) over all vectors.

    `train_rows`: the number of random rows (always the same) to train on; by default 64 per inverted list, at least
    65,536. Raises `ServerError` if FAISS cannot build it.
    """
    with _staged(target) as staging:
        if faiss_type == "Flat":
            _write_flat(vectors, staging)
            return
        try:
            faiss.write_index(_fill(vectors, faiss_type, gpu, train_rows), str(staging))
        except RuntimeError as error:
            raise ServerError(f"FAISS cannot build {faiss_type!r} over {len(vectors)} rows: {error}") from error


def _write_flat(vectors: VectorFile, target: Path) -> None:
    """The file of an empty Flat index with the row count and the number of values put in, then the vectors."""
    header = bytearray(faiss.serialize_index(faiss.IndexFlatIP(vectors.dim)).tobytes())
    struct.pack_into("<q", header, _COUNT_OFFSET, len(vectors))
    struct.pack_into("<q", header, len(header) - 8, len(vectors) * vectors.dim)
    with target.open("wb") as file:
        file.write(header)
        for _, block in _progress(vectors):
            file.write(block.data)


def _fill(vectors: VectorFile, faiss_type: str, gpu: bool, train_rows: int | None) -> faiss.Index:
    index = faiss.index_factory(vectors.dim, faiss_type, faiss.METRIC_INNER_PRODUCT)
    inverted = faiss.try_extract_index_ivf(index)
    num_lists = 0 if inverted is None else inverted.nlist
    wanted = train_rows or max(_LEAST_TRAIN_ROWS, _ROWS_A_CENTROID * num_lists)
    index = to_gpus(index) if gpu else index
    if not index.is_trained:
        index.train(vectors.take(sample_rows(len(vectors), wanted)))
    for _, block in _progress(vectors):
        index.add(block)
    return faiss.index_gpu_to_cpu(index) if gpu else index


def sample_rows(num_rows: int, wanted: int) -> np.ndarray:
    """`wanted` different rows (all if there are fewer), ascending, the same every time."""
    return np.sort(np.random.default_rng(0).choice(num_rows, min(wanted, num_rows), replace=False, shuffle=False))


def _progress(vectors: VectorFile) -> Iterator[tuple[int, np.ndarray]]:
    with Progress("index", len(vectors), unit="vectors") as progress:
        for start, block in vectors.blocks():
            yield start, block
            progress.update(len(block))


@contextmanager
def _staged(target: Path) -> Iterator[Path]:
    """A temporary file beside `target`, renamed to it at the end: no reader ever sees half a file."""
    staging = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        yield staging
        staging.replace(target)
    finally:
        staging.unlink(missing_ok=True)
