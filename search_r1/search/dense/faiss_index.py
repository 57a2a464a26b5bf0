"""Search in a FAISS index of any type, and the opening of its file."""

from __future__ import annotations

from pathlib import Path

import faiss
import numpy as np

from search_r1.errors import IndexMismatchError, ServerError
from search_r1.search.dense.vectors import VectorFile
from search_r1.search.retriever import Hit

_BLAS_QUERIES = 4  # from this many queries on a flat search is one matrix product
_INVERTED_LISTS = b"Iw"
_FLAT = b"IxFI"


class FaissIndex:
    """Inner-product search, exact or approximate depending on the index.

    An exact index sums in another order for one query than for a batch: the scores agree up to float32 rounding.
    """

    def __init__(self, index: faiss.Index, parameters: str = "") -> None:
        """`parameters` as in `nprobe=32` or `efSearch=128,k_factor_rf=4`.

        Raises `IndexMismatchError` for another metric and `ServerError` for parameters that the index does not accept.
        """
        if index.metric_type != faiss.METRIC_INNER_PRODUCT:
            raise IndexMismatchError("the index was not built for the inner product; build it with index_builder")
        self.dim = int(index.d)
        self._index = index
        if parameters:
            _set_parameters(index, parameters)
        # FAISS counts queries x values; its own default leaves small batches without a matrix product
        faiss.cvar.distance_compute_blas_threshold = _BLAS_QUERIES * self.dim

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def search(self, queries_BD: np.ndarray, k: int) -> list[list[Hit]]:
        """See `Retriever.search`; queries are finite float32 [B, D], the score is the inner product."""
        k = min(k, len(self))
        if k < 1:
            return [[] for _ in queries_BD]
        scores, rows = self._index.search(np.ascontiguousarray(queries_BD, dtype=np.float32), k)
        return [_hits(*pair) for pair in zip(scores, rows, strict=True)]


def _hits(scores: np.ndarray, rows: np.ndarray) -> list[Hit]:
    """FAISS pads with row -1 when it finds fewer than k rows; they are dropped."""
    found = [Hit(int(row), float(score)) for score, row in zip(scores, rows, strict=True) if row >= 0]
    return sorted(found, key=lambda hit: (-hit.score, hit.row))


def _set_parameters(index: faiss.Index, parameters: str) -> None:
    try:
        faiss.ParameterSpace().set_index_parameters(index, parameters)  # type: ignore[arg-type]
    except RuntimeError as error:
        raise ServerError(f"this index does not accept the search parameters {parameters!r}: {error}") from error


def read_index(path: Path) -> faiss.Index:
    """Open a FAISS file, memory-mapped if FAISS supports that. Raises `IndexMismatchError` if it is not one."""
    with path.open("rb") as file:
        kind = file.read(4)
    inverted = kind.startswith(_INVERTED_LISTS)
    try:
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP if inverted else faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise IndexMismatchError(f"{path} is not a readable FAISS index ({reason}); build it again") from error
    if inverted:
        _without_prefetch(index)
    return index


def _without_prefetch(index: faiss.Index) -> None:
    """Mapped lists are read ahead by 32 threads a search, which costs more than it saves once they are in memory."""
    lists = faiss.extract_index_ivf(index).invlists
    if lists is not None and isinstance(lists := faiss.downcast_InvertedLists(lists), faiss.OnDiskInvertedLists):
        lists.prefetch_nthread = 0


def flat_vectors(path: Path) -> VectorFile | None:
    """The vectors in the file of an inner-product Flat index, not read yet; None for any other index."""
    with path.open("rb") as file:
        if file.read(4) != _FLAT:
            return None
    index = read_index(path)
    offset = path.stat().st_size - index.ntotal * index.d * 4  # they are the last thing in the file
    return VectorFile(path, int(index.ntotal), int(index.d), offset)


def to_gpus(index: faiss.Index) -> faiss.Index:
    """Shard the index over all GPUs in half precision. Raises `ServerError` if this build of FAISS sees no GPU."""
    if not hasattr(faiss, "StandardGpuResources") or faiss.get_num_gpus() == 0:
        raise ServerError(
            "--faiss_gpu: this build of FAISS sees no GPU; serve a Flat index or an embeddings file with "
            "--dense_engine matrix, which does not need FAISS, install a GPU build of FAISS, or drop the flag"
        )
    options = faiss.GpuMultipleClonerOptions()
    options.useFloat16 = True
    options.shard = True
    return faiss.index_cpu_to_all_gpus(index, co=options)
