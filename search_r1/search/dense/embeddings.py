"""The vectors of a corpus, streamed to a file that an interrupted run can continue, and read by row from such a file or
from a FAISS Flat index.

The file holds float32 values, rows x dim, no header. Its manifest has their source, and `rows_done`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from long_task import Progress
from search_r1.errors import EncoderError, IndexMismatchError
from search_r1.search.corpus import Corpus
from search_r1.search.dense.encoding.encoder import Encoder, EncoderOptions
from search_r1.search.manifest import check_file, check_manifest, manifest_path, read_manifest, write_manifest

BLOCK_ROWS = 65_536
_WINDOW_ROWS = 256
_DENSE = 4  # reading this many times as much at once is cheaper than reading row by row


class VectorFile:
    """`num_rows` x `dim` float32 values, row after row, from byte `offset` of `path` on.

    Rows are read, not memory-mapped: mapped pages would count as memory of this process, and if the file were
    truncated, the process would crash instead of raising an error.
    """

    def __init__(self, path: Path, num_rows: int, dim: int, offset: int = 0) -> None:
        """Raises `IndexMismatchError` if the file has another size, or no rows."""
        if num_rows < 1:
            raise IndexMismatchError(f"{path} has no vectors; build it again from a corpus with passages")
        # Vectors do not say how many they are, or of which dimension: only the size of the file can show a mistake.
        size = path.stat().st_size if path.is_file() else 0
        expected = offset + num_rows * dim * 4
        if size != expected:
            raise IndexMismatchError(
                f"{path} has {size} bytes, not the {expected} of {num_rows} float32 vectors of {dim} values; "
                "use the corpus and the encoder that it was made with"
            )
        self.path, self.dim = path, dim
        self._num_rows, self._offset = num_rows, offset
        self._file = path.open("rb")

    def __len__(self) -> int:
        return self._num_rows

    def block(self, start: int, stop: int) -> np.ndarray:
        """Rows start to stop, float32 [stop - start, dim], a copy."""
        vectors = np.empty((stop - start, self.dim), dtype=np.float32)
        self._read(vectors, start)
        return vectors

    def check_finite(self, start: int, norms_R: np.ndarray) -> None:
        """Raise `IndexMismatchError` if one of the rows from `start` on, which have these norms, has NaN or Inf."""
        broken = np.flatnonzero(~np.isfinite(norms_R))
        if len(broken):
            raise IndexMismatchError(
                f"{self.path}: the vector of row {start + broken[0]} has NaN or Inf; build the index again"
            )

    def blocks(self, num_rows: int = BLOCK_ROWS) -> Iterator[tuple[int, np.ndarray]]:
        """All rows in order: (first row, float32 [at most num_rows, dim])."""
        for start in range(0, len(self), num_rows):
            yield start, self.block(start, min(start + num_rows, len(self)))

    def take(self, rows: np.ndarray) -> np.ndarray:
        """float32 [len(rows), dim]. Rows close together are read in one go, others one by one."""
        order = np.argsort(rows, kind="stable")
        ascending = rows[order]
        vectors = np.empty((len(rows), self.dim), dtype=np.float32)
        starts = np.flatnonzero(np.diff(ascending // _WINDOW_ROWS, prepend=-1)).tolist()
        for start, stop in zip(starts, [*starts[1:], len(rows)], strict=False):
            self._take_window(ascending[start:stop], vectors[start:stop])
        if (order[1:] > order[:-1]).all():
            return vectors
        as_asked = np.empty_like(vectors)
        as_asked[order] = vectors
        return as_asked

    def _take_window(self, rows: np.ndarray, vectors: np.ndarray) -> None:
        """Fill `vectors` with ascending `rows`."""
        first, last = int(rows[0]), int(rows[-1])
        if len(rows) * _DENSE >= last + 1 - first:
            vectors[:] = self.block(first, last + 1)[rows - first]
            return
        for place, row in enumerate(rows.tolist()):
            self._read(vectors[place], row)

    def _read(self, vectors: np.ndarray, row: int) -> None:
        """Fill contiguous `vectors` from `row` on."""
        into, position = vectors.data.cast("B"), self._offset + row * self.dim * 4
        while into:
            num_bytes = os.preadv(self._file.fileno(), [into], position)
            if num_bytes == 0:
                raise IndexMismatchError(f"{self.path} was cut short while in use; restore it and start again")
            into, position = into[num_bytes:], position + num_bytes


_BATCHES_A_BLOCK = 16

Block = tuple[int, int]  # first row, row after the last


@dataclass(frozen=True)
class EmbeddingJob:
    """`fields`: what the vectors depend on; `batch_size`: passages sorted by length and encoded together."""

    path: Path
    corpus_path: Path
    options: EncoderOptions
    fields: dict[str, Any]
    batch_size: int
    max_tokens: int
    num_processes: int = 1


def encode_corpus(job: EmbeddingJob, encoder: Encoder, corpus: Corpus) -> VectorFile:
    """Encode the missing rows and return all vectors.

    Progress is saved every 16 batches. With several processes, each loads its own encoder, assigned to the GPUs in
    turn. Raises `IndexMismatchError` if the file belongs to another corpus, encoder, precision or length, and
    `TargetTakenError` if it has no manifest: this program did not write it.
    """
    check_file(job.path)
    # Continue after the rows that the manifest of an interrupted run counts.
    done = rows_done(job.path, job.fields)
    step = job.batch_size * _BATCHES_A_BLOCK
    blocks = [(start, min(start + step, len(corpus))) for start in range(done, len(corpus), step)]
    if blocks:
        _reserve(job, len(corpus) * encoder.dim * 4, done)
    # A block is on disk before the manifest counts it: after a crash, at most some rows are encoded twice.
    writer = _Writer(job, encoder, corpus)
    ended = map(writer.write, blocks) if job.num_processes == 1 else _in_processes(job, blocks)
    with Progress("encode", len(corpus), done, "passages") as progress:
        for stop in ended:
            progress.reach(stop)
            write_manifest(manifest_path(job.path), job.fields | {"rows_done": stop})
    return VectorFile(job.path, len(corpus), encoder.dim)


def rows_done(path: Path, fields: dict[str, Any]) -> int:
    """Rows already in the file; 0 if there is none. Raises `IndexMismatchError` if its manifest has other `fields`."""
    found = read_manifest(manifest_path(path))
    if not path.is_file() or found is None:
        return 0
    try:
        check_manifest(manifest_path(path), found, fields)
    except IndexMismatchError as error:
        raise IndexMismatchError(
            f"{path} has vectors of an earlier build: {error}; to encode the corpus anew, remove {path} and "
            f"{manifest_path(path)}, or pass another --save_dir"
        ) from error
    return int(found.get("rows_done", 0))


def discard(path: Path) -> None:
    """Remove the vectors, then their manifest: in the other order, a crash would leave vectors that look foreign."""
    path.unlink(missing_ok=True)
    manifest_path(path).unlink(missing_ok=True)


def _reserve(job: EmbeddingJob, num_bytes: int, done: int) -> None:
    """Make the file as large as it will be; its manifest is there before it, so that the two never disagree."""
    if done == 0:
        write_manifest(manifest_path(job.path), job.fields | {"rows_done": 0})
        job.path.unlink(missing_ok=True)
    with job.path.open("ab") as file:
        file.truncate(num_bytes)


class _Writer:
    """Encodes blocks of rows into their place in the file."""

    def __init__(self, job: EmbeddingJob, encoder: Encoder, corpus: Corpus) -> None:
        self._job, self._encoder, self._corpus = job, encoder, corpus

    def write(self, block: Block) -> int:
        """Encode and write a block; returns the row after the last once it is on disk."""
        start, stop = block
        with self._job.path.open("r+b") as file:
            file.seek(start * self._encoder.dim * 4)
            for first in range(start, stop, self._job.batch_size):
                rows = range(first, min(first + self._job.batch_size, stop))
                texts = [self._corpus[row]["contents"] for row in rows]
                file.write(self._encoder.encode_passages(texts, self._job.max_tokens).data)
            file.flush()
            os.fsync(file.fileno())
        return stop


_writer: _Writer  # of a worker process


def _in_processes(job: EmbeddingJob, blocks: list[Block]) -> Iterator[int]:
    """Encode in several processes; yields the ends of blocks in order, so that `rows_done` counts no row that is not
    there."""
    context = multiprocessing.get_context("spawn")  # a forked process cannot use a GPU
    arguments = (job, context.Value("i", 0))
    with ProcessPoolExecutor(job.num_processes, context, _start_worker, arguments) as pool:
        try:
            yield from pool.map(_write_block, blocks)
        except BrokenProcessPool as error:
            raise EncoderError(
                "an encoding process ended early (killed, or out of memory); run the same command again to resume"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _start_worker(job: EmbeddingJob, counter: Any) -> None:
    import torch

    global _writer
    # Ctrl-C reaches all: this one ends its block, and the builder the pool.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with counter.get_lock():
        number = counter.value
        counter.value += 1
    device = f"cuda:{number % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    _writer = _Writer(job, Encoder(replace(job.options, device=device)), Corpus(job.corpus_path))


def _write_block(block: Block) -> int:
    return _writer.write(block)
