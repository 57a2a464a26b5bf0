"""Build an index over a corpus: BM25, or vectors of a dense encoder in a FAISS index.

    python -m search_r1.search.index_builder --retrieval_method e5 --model_path MODEL --corpus_path corpus.jsonl \\
        --save_dir indexes --faiss_type Flat

writes `{save_dir}/{method}_{faiss_type}.index` and its manifest (`.json`); `--save_embedding` keeps the vectors in
`{save_dir}/emb_{method}.memmap` (float32, rows x dim, no header). An interrupted run goes on where it stopped when
started again with the same arguments. bm25 writes the folder `{save_dir}/bm25`.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from search_r1.search.bm25 import Bm25Retriever
from search_r1.search.corpus import Corpus
from search_r1.search.encoder_spec import POOLINGS
from search_r1.search.errors import EncoderError, SearchError, ServerError
from search_r1.search.manifest import check_manifest, manifest_path, read_manifest, write_manifest

if TYPE_CHECKING:
    from search_r1.search.encoder import Encoder, EncoderOptions
    from search_r1.search.vectors import VectorFile

_LOG = logging.getLogger(__name__)
_POSITIVE = ("max_length", "batch_size", "num_threads", "num_processes", "train_rows")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The published arguments, and `--num_threads`, `--num_processes`, `--train_rows`, `--query_model_path`."""
    parser = argparse.ArgumentParser(description="Build a retrieval index.")
    parser.add_argument("--retrieval_method", required=True, help="bm25, or an encoder family: e5, bge, ...")
    parser.add_argument("--model_path", help="folder or hub id of the dense encoder")
    parser.add_argument("--query_model_path", help="the question encoder, where it is another one (DPR): it is noted")
    parser.add_argument("--corpus_path", required=True, help="passages, .jsonl or .jsonl.gz")
    parser.add_argument("--save_dir", default="indexes/")
    parser.add_argument("--max_length", type=int, default=180, help="passage tokens kept")
    parser.add_argument("--batch_size", type=int, default=512, help="passages sorted by length and encoded together")
    parser.add_argument("--use_fp16", action="store_true", help="float16 on a GPU; bfloat16 on a CPU that has it")
    parser.add_argument("--pooling_method", choices=POOLINGS, help="default: what the model's files say")
    parser.add_argument("--faiss_type", default="Flat", help="a faiss.index_factory string: Flat, HNSW64, ...")
    parser.add_argument("--train_rows", type=int, help="random rows an index is trained on (default: 64 a list)")
    parser.add_argument("--embedding_path", type=Path, help="vectors of an earlier run, instead of encoding")
    parser.add_argument("--save_embedding", action="store_true", help="keep the vectors")
    parser.add_argument("--faiss_gpu", action="store_true", help="build on all GPUs")
    parser.add_argument("--num_threads", type=int, default=os.cpu_count() or 1, help="of all processes together")
    parser.add_argument("--num_processes", type=int, default=1, help="that encode; on GPUs one for each is right")
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
    for name in _POSITIVE:
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ServerError(f"--{name} is {value}; it must be at least 1")
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
    import faiss

    from search_r1.search.encoder import Encoder
    from search_r1.search.faiss_build import build_index

    encoder = Encoder(_encoder_options(arguments, arguments.model_path))
    fields = _fields(arguments, encoder, corpus)
    vectors, fields = _vectors(arguments, encoder, corpus, fields, folder)
    target = folder / f"{arguments.retrieval_method}_{arguments.faiss_type}.index"
    manifest_path(target).unlink(missing_ok=True)  # never a new index beside an old manifest
    faiss.omp_set_num_threads(arguments.num_threads)
    build_index(vectors, arguments.faiss_type, target, arguments.faiss_gpu, arguments.train_rows)
    size = {"num_rows": len(corpus), "bytes": target.stat().st_size}
    write_manifest(manifest_path(target), fields | {"faiss_type": arguments.faiss_type} | size)
    if arguments.embedding_path is None and not arguments.save_embedding:
        from search_r1.search.embeddings import discard

        discard(vectors.path)
    return target


def _encoder_options(arguments: argparse.Namespace, model: str) -> EncoderOptions:
    from search_r1.search.encoder import EncoderOptions

    return EncoderOptions(
        arguments.retrieval_method,
        model,
        pooling=arguments.pooling_method,
        precision="half" if arguments.use_fp16 else "float32",
        num_threads=max(1, arguments.num_threads // arguments.num_processes),
    )


def _fields(arguments: argparse.Namespace, encoder: Encoder, corpus: Corpus) -> dict[str, Any]:
    """What the vectors depend on."""
    from search_r1.search.dense import encoder_fields

    if encoder.side == "query":
        raise EncoderError(f"{arguments.model_path} encodes questions; pass it by --query_model_path")
    made = {"corpus": corpus.digest, "precision": encoder.precision, "max_length": arguments.max_length}
    return encoder_fields(encoder) | made | _question_encoder(arguments)


def _question_encoder(arguments: argparse.Namespace) -> dict[str, Any]:
    if not arguments.query_model_path:
        return {}
    from search_r1.search.encoder import Encoder

    encoder = Encoder(_encoder_options(arguments, arguments.query_model_path))
    return {"query_weights": encoder.fingerprint}


def _vectors(
    arguments: argparse.Namespace, encoder: Encoder, corpus: Corpus, fields: dict[str, Any], folder: Path
) -> tuple[VectorFile, dict[str, Any]]:
    """The vectors of `--embedding_path` or of the encoder, and what their manifest says."""
    from search_r1.search.embeddings import EmbeddingJob, encode_corpus

    if arguments.embedding_path is not None:
        return _reused(arguments.embedding_path, encoder, corpus, fields)
    job = EmbeddingJob(
        path=folder / f"emb_{arguments.retrieval_method}.memmap",
        corpus_path=corpus.path,
        options=_encoder_options(arguments, arguments.model_path),
        fields=fields,
        batch_size=arguments.batch_size,
        max_tokens=arguments.max_length,
        num_processes=arguments.num_processes,
    )
    return encode_corpus(job, encoder, corpus), fields


def _reused(path: Path, encoder: Encoder, corpus: Corpus, fields: dict[str, Any]) -> tuple[VectorFile, dict[str, Any]]:
    """A file with a manifest must be complete and of this corpus and encoder; precision and length are its own."""
    from search_r1.search.vectors import VectorFile

    vectors = VectorFile(path, len(corpus), encoder.dim)
    found = read_manifest(manifest_path(path))
    own = {name: "unknown" if found is None else found.get(name) for name in ("precision", "max_length")}
    if found is not None:
        check_manifest(manifest_path(path), found, fields | own | {"rows_done": len(corpus)})
    return vectors, fields | own


if __name__ == "__main__":
    sys.exit(main())
