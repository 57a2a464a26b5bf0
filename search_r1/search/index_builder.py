"""Build an index over a corpus: BM25, or vectors of a dense encoder in a FAISS index.

    python -m search_r1.search.index_builder --retrieval_method e5 --model_path MODEL --corpus_path corpus.jsonl \\
        --save_dir indexes --faiss_type Flat

writes `{save_dir}/{method}_{faiss_type}.index` and its manifest (`.json`); `--save_embedding` keeps the vectors in
`{save_dir}/emb_{method}.memmap` (float32, rows x dim, no header). bm25 writes the folder `{save_dir}/bm25`.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from search_r1.search.bm25 import Bm25Retriever
from search_r1.search.corpus import Corpus
from search_r1.search.encoder_spec import POOLINGS
from search_r1.search.errors import IndexMismatchError, SearchError, ServerError
from search_r1.search.manifest import write_manifest

if TYPE_CHECKING:
    import faiss

    from search_r1.search.encoder import Encoder

_LOG = logging.getLogger(__name__)
_ADD_ROWS = 65_536


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The published arguments, and `--num_threads`."""
    parser = argparse.ArgumentParser(description="Build a retrieval index.")
    parser.add_argument("--retrieval_method", required=True, help="bm25, or an encoder family: e5, bge, ...")
    parser.add_argument("--model_path", help="folder or hub id of the dense encoder")
    parser.add_argument("--corpus_path", required=True, help="passages, .jsonl or .jsonl.gz")
    parser.add_argument("--save_dir", default="indexes/")
    parser.add_argument("--max_length", type=int, default=180, help="passage tokens kept")
    parser.add_argument("--batch_size", type=int, default=512)
    parser.add_argument("--use_fp16", action="store_true", help="half precision on a GPU; a CPU stays at float32")
    parser.add_argument("--pooling_method", choices=POOLINGS, help="default: what the model's files say")
    parser.add_argument("--faiss_type", default="Flat", help="a faiss.index_factory string: Flat, HNSW64, ...")
    parser.add_argument("--embedding_path", type=Path, help="vectors of an earlier run, instead of encoding")
    parser.add_argument("--save_embedding", action="store_true", help="keep the vectors")
    parser.add_argument("--faiss_gpu", action="store_true", help="build on all GPUs")
    parser.add_argument("--num_threads", type=int, default=os.cpu_count() or 1)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Build the index; returns the exit code."""
    arguments = parse_arguments(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        target = build(arguments)
    except SearchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    _LOG.info("wrote %s", target)
    return 0


def build(arguments: argparse.Namespace) -> Path:
    """Build what the arguments ask for and return its path. Raises a `SearchError`."""
    corpus = Corpus(arguments.corpus_path)
    folder = Path(arguments.save_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.retrieval_method == "bm25":
        Bm25Retriever.build(corpus).save(folder / "bm25")
        return folder / "bm25"
    return _build_dense(arguments, corpus, folder)


def _build_dense(arguments: argparse.Namespace, corpus: Corpus, folder: Path) -> Path:
    if not arguments.model_path:
        raise ServerError(f"--retrieval_method {arguments.retrieval_method} needs --model_path")
    from search_r1.search.dense import encoder_fields, manifest_path
    from search_r1.search.encoder import Encoder, EncoderOptions

    method = arguments.retrieval_method
    encoder = Encoder(
        EncoderOptions(
            method, arguments.model_path, arguments.pooling_method, arguments.use_fp16, arguments.num_threads
        )
    )
    kept = arguments.embedding_path or folder / f"emb_{method}.memmap"
    if arguments.embedding_path is None:
        _encode_corpus(encoder, corpus, kept, arguments.batch_size, arguments.max_length)
    vectors = _open_vectors(kept, len(corpus), encoder.dim)
    target = folder / f"{method}_{arguments.faiss_type}.index"
    manifest_path(target).unlink(missing_ok=True)  # never a new index beside an old manifest
    _write_index(_fill(vectors, arguments.faiss_type, arguments.faiss_gpu, arguments.num_threads), target)
    details = {"faiss_type": arguments.faiss_type, "num_rows": len(corpus), "max_length": arguments.max_length}
    write_manifest(manifest_path(target), encoder_fields(encoder) | {"corpus": corpus.digest} | details)
    if arguments.embedding_path is None and not arguments.save_embedding:
        kept.unlink()
    return target


def _encode_corpus(encoder: Encoder, corpus: Corpus, path: Path, batch_size: int, max_tokens: int) -> None:
    """Stream the vectors to `path`, through a temporary name: an interrupted run leaves no half file behind."""
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        vectors = np.memmap(staging, dtype=np.float32, mode="w+", shape=(len(corpus), encoder.dim))
        for start in tqdm(range(0, len(corpus), batch_size), desc="encode", disable=None):
            stop = min(start + batch_size, len(corpus))
            texts = [corpus[row]["contents"] for row in range(start, stop)]
            vectors[start:stop] = encoder.encode_passages(texts, max_tokens)
        vectors.flush()
        staging.replace(path)
    finally:
        staging.unlink(missing_ok=True)


def _open_vectors(path: Path, rows: int, dim: int) -> np.ndarray:
    """float32 [rows, dim]. Raises `IndexMismatchError` when the file's size says otherwise."""
    size = path.stat().st_size if path.is_file() else 0
    if size != rows * dim * 4:
        raise IndexMismatchError(
            f"{path} has {size} bytes, not the {rows * dim * 4} of {rows} float32 vectors of {dim}; "
            "it is of another corpus or encoder"
        )
    return np.memmap(path, dtype=np.float32, mode="r", shape=(rows, dim))


def _fill(vectors: np.ndarray, faiss_type: str, gpu: bool, num_threads: int) -> faiss.Index:
    """Train (where the type needs it) and add all vectors, a block at a time."""
    import faiss

    from search_r1.search.dense import to_gpus

    faiss.omp_set_num_threads(num_threads)
    try:
        index = faiss.index_factory(vectors.shape[1], faiss_type, faiss.METRIC_INNER_PRODUCT)
        index = to_gpus(index) if gpu else index
        if not index.is_trained:
            index.train(vectors)
        for start in tqdm(range(0, len(vectors), _ADD_ROWS), desc="add", disable=None):
            index.add(np.ascontiguousarray(vectors[start : start + _ADD_ROWS]))
    except RuntimeError as error:
        raise ServerError(f"FAISS cannot build {faiss_type!r} over {len(vectors)} rows: {error}") from error
    return faiss.index_gpu_to_cpu(index) if gpu else index


def _write_index(index: faiss.Index, target: Path) -> None:
    import faiss

    staging = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        faiss.write_index(index, str(staging))
        staging.replace(target)
    finally:
        staging.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
