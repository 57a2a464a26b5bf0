"""Encode a corpus and build a FAISS index of the vectors."""

from __future__ import annotations

import argparse
import logging
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from long_task import Progress
from search_r1.errors import EncoderError, ServerError
from search_r1.search.corpus import Corpus
from search_r1.search.dense.embeddings import EmbeddingJob, VectorFile, discard, encode_corpus
from search_r1.search.dense.encoding.encoder import Encoder, EncoderOptions
from search_r1.search.dense.faiss_index import to_gpus
from search_r1.search.dense.retriever import encoder_fields
from search_r1.search.manifest import (
    check_file,
    check_manifest,
    manifest_path,
    read_manifest,
    staged,
    write_manifest,
    writing,
)

_LOG = logging.getLogger(__name__)
_DEFAULT_LENGTH = 180  # tokens of a passage
_EARLIER_LIMIT = 256
_ROWS_A_CENTROID = 64  # k-means wants at least 39
_LEAST_TRAIN_ROWS = 65_536  # 256 for each of the 256 centroids of a product quantizer
_COUNT_OFFSET = 8  # of the row count in the file of a Flat index, after its kind and its dimension


def build_dense(arguments: argparse.Namespace, corpus: Corpus, folder: Path) -> str:
    """Encode `corpus` with the arguments of `index_builder`, and print where the index is. Raises a `SearchError`."""
    if not arguments.model_path:
        raise ServerError(f"--retrieval_method {arguments.retrieval_method} needs --model_path")
    # fail before the corpus is encoded when a target is taken, or the type of index cannot be made
    check_file(_index_file(arguments, folder))
    if arguments.embedding_path is None:
        check_file(_embedding_file(arguments, folder))
    encoder = Encoder(_encoder_options(arguments, arguments.model_path))
    empty_index(arguments.faiss_type, encoder.dim)
    arguments.max_length = _max_length(arguments.max_length, encoder)
    fields = _fields(arguments, encoder, corpus)
    vectors, fields = _vectors(arguments, encoder, corpus, fields, folder)
    with writing(folder):
        target = _write_faiss(arguments, vectors, fields, folder)
        if arguments.embedding_path is None:
            _keep_or_discard(vectors.path, arguments.save_embedding)
    return target


def _index_file(arguments: argparse.Namespace, folder: Path) -> Path:
    return folder / f"{arguments.retrieval_method}_{arguments.faiss_type}.index"


def _embedding_file(arguments: argparse.Namespace, folder: Path) -> Path:
    return folder / f"emb_{arguments.retrieval_method}.memmap"


def _keep_or_discard(path: Path, save: bool) -> None:
    """Remove the vectors, unless this run or an earlier one was started with `--save_embedding`."""
    fields = read_manifest(manifest_path(path)) or {}
    if save:
        write_manifest(manifest_path(path), fields | {"kept": True})
    elif not fields.get("kept"):
        discard(path)


def _write_faiss(arguments: argparse.Namespace, vectors: VectorFile, fields: dict[str, Any], folder: Path) -> str:
    target = _index_file(arguments, folder)
    new = target.with_name(f".{target.name}.new")
    faiss.omp_set_num_threads(arguments.num_threads)
    try:
        build_index(vectors, arguments.faiss_type, new, arguments.faiss_gpu, arguments.train_rows)
        made = fields | {"faiss_type": arguments.faiss_type}
        # in between the manifest fits neither index, and still says that the file is of this builder
        write_manifest(manifest_path(target), made | {"num_rows": 0, "bytes": 0})
        new.replace(target)
    finally:
        new.unlink(missing_ok=True)
    write_manifest(manifest_path(target), made | {"num_rows": len(vectors), "bytes": target.stat().st_size})
    return str(target)


def _encoder_options(arguments: argparse.Namespace, model: str) -> EncoderOptions:
    return EncoderOptions(
        arguments.retrieval_method,
        model,
        pooling=arguments.pooling_method,
        precision="half" if arguments.use_fp16 else "float32",
        num_threads=max(1, arguments.num_threads // arguments.num_processes),
    )


def _fields(arguments: argparse.Namespace, encoder: Encoder, corpus: Corpus) -> dict[str, Any]:
    """The fields of the manifest: everything that the vectors depend on."""
    if encoder.side == "query":
        raise EncoderError(f"{arguments.model_path} is a question encoder; pass it with --query_model_path")
    made = {"corpus": corpus.digest, "precision": encoder.precision, "max_length": arguments.max_length}
    if arguments.max_length > _EARLIER_LIMIT:
        # vectors of earlier versions lack this: they cut passages at 256 tokens whatever their manifest says
        made["cut_at"] = arguments.max_length
    return encoder_fields(encoder) | made | _question_encoder(arguments)


def _max_length(wanted: int | None, encoder: Encoder) -> int:
    """The length that passages are cut at, which the manifest has. The published script asks 256 of every model."""
    if wanted is not None and wanted > encoder.longest:
        _LOG.warning(
            "--max_length %d: the encoder takes texts of at most %d tokens, so passages are cut there",
            *(wanted, encoder.longest),
        )
    return min(_DEFAULT_LENGTH if wanted is None else wanted, encoder.longest)


def _question_encoder(arguments: argparse.Namespace) -> dict[str, Any]:
    if not arguments.query_model_path:
        return {}
    encoder = Encoder(_encoder_options(arguments, arguments.query_model_path))
    return {"query_weights": encoder.fingerprint}


def _vectors(
    arguments: argparse.Namespace, encoder: Encoder, corpus: Corpus, fields: dict[str, Any], folder: Path
) -> tuple[VectorFile, dict[str, Any]]:
    """The vectors of `--embedding_path` or of the encoder, and what their manifest says."""
    if arguments.embedding_path is not None:
        return _reused(arguments.embedding_path, encoder, corpus, fields)
    job = EmbeddingJob(
        path=_embedding_file(arguments, folder),
        corpus_path=corpus.path,
        options=_encoder_options(arguments, arguments.model_path),
        fields=fields,
        batch_size=arguments.batch_size,
        max_tokens=arguments.max_length,
        num_processes=arguments.num_processes,
    )
    with writing(job.path):
        return encode_corpus(job, encoder, corpus), fields


def _reused(path: Path, encoder: Encoder, corpus: Corpus, fields: dict[str, Any]) -> tuple[VectorFile, dict[str, Any]]:
    """The vectors of an earlier run, and the fields of their manifest; precision and length are its own.

    A file with a manifest must be complete and of this corpus and encoder.
    """
    vectors = VectorFile(path, len(corpus), encoder.dim)
    found = read_manifest(manifest_path(path))
    own = {name: "unknown" if found is None else found.get(name) for name in ("precision", "max_length")}
    fields = {name: value for name, value in fields.items() if name != "cut_at"}
    if found is not None:
        own |= {"cut_at": found["cut_at"]} if "cut_at" in found else {}
        check_manifest(manifest_path(path), found, fields | own | {"rows_done": len(corpus)})
    return vectors, fields | own


# Build a FAISS index file from vectors on disk. Only what the index itself keeps must fit into memory.


def build_index(
    vectors: VectorFile, faiss_type: str, target: Path, gpu: bool = False, train_rows: int | None = None
) -> None:
    """Write an inner-product index of `faiss_type` (any `faiss.index_factory` string) over all vectors.

    `train_rows`: the number of random rows (always the same) to train on; by default 64 per inverted list, at least
    65,536. Raises `ServerError` if FAISS cannot build it.
    """
    with staged(target) as staging:
        if faiss_type == "Flat":
            _write_flat(vectors, staging)
            return
        try:
            faiss.write_index(_fill(vectors, faiss_type, gpu, train_rows), str(staging))
        except RuntimeError as error:
            raise ServerError(f"FAISS cannot build {faiss_type!r} over {len(vectors)} rows: {error}") from error


def empty_index(faiss_type: str, dim: int) -> faiss.Index:
    """An index of `faiss_type` without vectors. Raises `ServerError` unless FAISS has such a one for inner products."""
    try:
        index = faiss.index_factory(dim, faiss_type, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        reason = str(error).rpartition(": ")[2]  # behind the place in FAISS's code
        raise ServerError(f"FAISS cannot build {faiss_type!r} of vectors of {dim} values: {reason}") from error
    # The factory passes over the metric for some types, such as HNSW32_PQ16, and the server would refuse the index.
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise ServerError(
            f"FAISS builds {faiss_type!r} for Euclidean distances, and not for inner products; pass another "
            "--faiss_type, such as HNSW64 or HNSW32_SQ8"
        )
    return index


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
    index = empty_index(faiss_type, vectors.dim)
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
