"""The vectors of a corpus, streamed to a file that an interrupted run can continue.

The file holds float32 values, rows x dim, no header. Its manifest has their source, and `rows_done`.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from long_task import Progress
from search_r1.errors import EncoderError
from search_r1.search.corpus import Corpus
from search_r1.search.dense.encoding.encoder import Encoder, EncoderOptions
from search_r1.search.dense.vectors import VectorFile
from search_r1.search.manifest import check_file, check_manifest, manifest_path, read_manifest, write_manifest

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
    done = rows_done(job.path, job.fields)
    step = job.batch_size * _BATCHES_A_BLOCK
    blocks = [(start, min(start + step, len(corpus))) for start in range(done, len(corpus), step)]
    if blocks:
        _reserve(job, len(corpus) * encoder.dim * 4, done)
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
    check_manifest(manifest_path(path), found, fields)
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
    with counter.get_lock():
        number = counter.value
        counter.value += 1
    device = f"cuda:{number % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    _writer = _Writer(job, Encoder(replace(job.options, device=device)), Corpus(job.corpus_path))


def _write_block(block: Block) -> int:
    return _writer.write(block)
