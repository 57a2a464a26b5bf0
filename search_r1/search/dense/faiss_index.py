"""Search in a FAISS index of any type, and the opening of its file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import faiss
import numpy as np

from long_task import track
from search_r1.errors import IndexMismatchError, ServerError
from search_r1.search.dense.embeddings import VectorFile
from search_r1.search.retriever import Hit

_BLAS_QUERIES = 4  # from this many queries on a flat search is one matrix product
_INVERTED_LISTS = b"Iw"
_FLAT = b"IxFI"
_FLAT_HEADER_BYTES = 45  # before the vectors


class FaissIndex:
    """Inner-product search, exact or approximate depending on the index.

    An exact index sums in another order for one query than for a batch: the scores agree up to float32 rounding.
    """

    def __init__(self, index: faiss.Index, parameters: str = "", gpu: bool = False) -> None:
        """`parameters` as in `nprobe=32` or `efSearch=128,k_factor_rf=4`; with `gpu`, searched on all GPUs.

        Raises `IndexMismatchError` for another metric and `ServerError` for parameters that the index does not accept,
        or without a GPU.
        """
        if index.metric_type != faiss.METRIC_INNER_PRODUCT:
            raise IndexMismatchError("the index was not built for the inner product; build it with index_builder")
        self.dim = int(index.d)
        if parameters:  # before the index moves: GPU indexes copy them, and cannot be told them by a ParameterSpace
            _set_parameters(index, parameters)
        self._index = to_gpus(index) if gpu else index
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
        results = []
        for of_query in zip(rows, scores, strict=True):
            # FAISS pads with row -1 when it finds fewer than k rows
            hits = [Hit(int(row), float(score)) for row, score in zip(*of_query, strict=True) if row >= 0]
            results.append(sorted(hits, key=lambda hit: (-hit.score, hit.row)))
        return results


def _set_parameters(index: faiss.Index, parameters: str) -> None:
    if re.search(r"(nprobe|efSearch)=(-|0+(\.|[ ,]|$))", parameters):  # FAISS takes them, and then finds nothing
        raise ServerError(f"--search_parameters {parameters}: nprobe and efSearch must be at least 1")
    try:
        faiss.ParameterSpace().set_index_parameters(index, parameters)  # type: ignore[arg-type]
    except RuntimeError as error:
        raise ServerError(f"this index does not accept the search parameters {parameters!r}: {error}") from error


def read_index(path: Path) -> faiss.Index:
    """Open a FAISS file, memory-mapped if FAISS supports that.

    Raises `IndexMismatchError` if it is not one, has no rows, or if its ids are not the rows of a corpus (see
    `check_ids`).
    """
    with path.open("rb") as file:
        kind = file.read(4)
    inverted = kind.startswith(_INVERTED_LISTS)
    try:
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP if inverted else faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise IndexMismatchError(f"{path} is not a readable FAISS index ({reason}); build it again") from error
    if inverted:
        # Mapped lists are read ahead by 32 threads a search, which costs more than it saves once they are in memory.
        lists = faiss.extract_index_ivf(index).invlists
        if lists is not None and isinstance(lists := faiss.downcast_InvertedLists(lists), faiss.OnDiskInvertedLists):
            lists.prefetch_nthread = 0
    if index.ntotal == 0:
        raise IndexMismatchError(f"{path} has no vectors; build it again from a corpus with passages")
    check_ids(index, path)
    return index


def check_ids(index: faiss.Index, path: Path) -> None:
    """Raise `IndexMismatchError` unless the ids of `index`, read from `path`, are 0 to N - 1, each once.

    N is the number of rows in its header. An index may have ids of its own: an IndexIDMap in a table, an index with
    inverted lists beside each vector. The parts of an index must agree on N, on the dimension and on the metric.
    """
    for part in _parts(index):
        if part.ntotal != index.ntotal or part.metric_type != index.metric_type:
            raise IndexMismatchError(
                f"{path}: its header says {index.ntotal} rows and metric {index.metric_type}, but its "
                f"{type(part).__name__} has {part.ntotal} rows and metric {part.metric_type}; build it again"
            )
        # A row of any other kind of index is known by its place.
        if isinstance(part, faiss.IndexIDMap | faiss.IndexIDMap2):
            _check_permutation(iter([faiss.vector_to_array(part.id_map)]), part, path)
        elif isinstance(part, faiss.IndexIVF):
            _check_permutation(_ids_of_lists(part), part, path)


def _parts(index: faiss.Index) -> Iterator[faiss.Index]:
    """`index`, and the indexes inside it that hold its rows."""
    index = faiss.downcast_index(index)
    yield index
    for name in ("index", "base_index", "refine_index", "storage"):
        inner = getattr(index, name, None)
        if isinstance(inner, faiss.Index):
            yield from _parts(inner)


def _ids_of_lists(index: faiss.IndexIVF) -> Iterator[np.ndarray]:
    lists = index.invlists
    assert lists is not None
    for number in track(range(index.nlist), "check ids", index.nlist, "lists"):
        size = lists.list_size(number)
        if size:
            yield np.array(faiss.rev_swig_ptr(lists.get_ids(number), size))


def _check_permutation(ids: Iterator[np.ndarray], index: faiss.Index, path: Path) -> None:
    num_rows, count = int(index.ntotal), 0
    seen = np.zeros(num_rows, dtype=bool)
    for block in ids:
        count += len(block)
        outside = block[(block < 0) | (block >= num_rows)]
        if len(outside):
            _refuse_ids(index, path, f"the id {outside[0]}")
        seen[block] = True
    # N ids in the range, none of which is missing, are there once each.
    if count != num_rows:
        _refuse_ids(index, path, f"{count} vectors")
    if not seen.all():
        _refuse_ids(index, path, f"no id {int(np.argmin(seen))}, but another one twice")


def _refuse_ids(index: faiss.Index, path: Path, found: str) -> NoReturn:
    raise IndexMismatchError(
        f"{path}: an index of {index.ntotal} rows must have the ids 0 to {index.ntotal - 1}, each once, because an id "
        f"is the number of a row of the corpus; this {type(index).__name__} has {found}; build it with index_builder"
    )


def flat_vectors(path: Path) -> VectorFile | None:
    """The vectors in the file of an inner-product Flat index, not read yet; None for any other index.

    Raises `IndexMismatchError` if the file is longer or shorter than its header says.
    """
    with path.open("rb") as file:
        if file.read(4) != _FLAT:
            return None
    index = read_index(path)
    return VectorFile(path, int(index.ntotal), int(index.d), _FLAT_HEADER_BYTES)


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
