"""Build an index over a corpus: BM25, or vectors of a dense encoder in a FAISS index.

    .venv/bin/python -m search_r1.search.index_builder --retrieval_method e5 --model_path MODEL \\
        --corpus_path corpus.jsonl --save_dir indexes --faiss_type Flat

writes `{save_dir}/{method}_{faiss_type}.index` and its manifest (`.json`); `--save_embedding` keeps the vectors in
`{save_dir}/emb_{method}.memmap` (float32, rows x dim, no header). An interrupted run resumes where it stopped when
started again with the same arguments. bm25 writes the folder `{save_dir}/bm25`. An existing index of the same name is
replaced; anything else in its place is an error.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from program_end import exit_status
from search_r1.errors import ServerError
from search_r1.search.bm25.index import Bm25Retriever
from search_r1.search.corpus import Corpus
from search_r1.search.dense.encoding.specification import POOLINGS
from search_r1.search.library_threads import prepare_libraries
from search_r1.search.manifest import only_builder, writing

_LOG = logging.getLogger(__name__)
_POSITIVE = ("max_length", "batch_size", "num_threads", "num_processes", "train_rows")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The published arguments, and `--num_threads`, `--num_processes`, `--train_rows`, `--query_model_path`."""
    parser = argparse.ArgumentParser(
        prog="python -m search_r1.search.index_builder", description="Build a retrieval index."
    )
    # what is indexed, with which encoder, and where the index goes
    parser.add_argument("--retrieval_method", required=True, help="bm25, or an encoder family: e5, bge, ...")
    parser.add_argument("--model_path", help="folder or hub id of the dense encoder")
    parser.add_argument(
        "--query_model_path", help="the question encoder, if it is another one (DPR); recorded in the manifest"
    )
    parser.add_argument("--corpus_path", required=True, help="passages, .jsonl or .jsonl.gz")
    parser.add_argument("--save_dir", default="indexes/")
    # how passages are encoded
    parser.add_argument(
        "--max_length",
        type=int,
        help="maximum number of tokens of a passage; the rest is cut (default: 180, or fewer if the model takes fewer)",
    )
    parser.add_argument("--batch_size", type=int, default=512, help="passages per batch, sorted by length")
    parser.add_argument(
        "--use_fp16", action="store_true", help="encode in float16 on a GPU, in bfloat16 on a CPU that supports it"
    )
    parser.add_argument("--pooling_method", choices=POOLINGS, help="default: from the model's files")
    # the index of the vectors, or the parameters of BM25
    parser.add_argument("--faiss_type", default="Flat", help="a faiss.index_factory string: Flat, HNSW64, ...")
    parser.add_argument("--train_rows", type=int, help="random rows to train the index on (default: 64 per list)")
    parser.add_argument("--embedding_path", type=Path, help="vectors of an earlier run, to use instead of encoding")
    parser.add_argument("--save_embedding", action="store_true", help="keep the file of vectors")
    parser.add_argument("--faiss_gpu", action="store_true", help="build on all GPUs")
    parser.add_argument(
        "--bm25_k1", type=float, default=0.9, help="BM25 k1: how quickly repeated terms stop adding to the score"
    )
    parser.add_argument("--bm25_b", type=float, default=0.4, help="BM25 b: influence of the passage length, 0 to 1")
    # the processes that do it
    parser.add_argument(
        "--num_threads", type=int, default=len(os.sched_getaffinity(0)), help="CPU threads of all processes together"
    )
    parser.add_argument("--num_processes", type=int, default=1, help="processes that encode; on GPUs, one per GPU")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Build the index; returns the exit status, as `exit_status` says."""
    arguments = parse_arguments(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")

    def left() -> str:
        is_dense = arguments.retrieval_method != "bm25"
        return "the same command goes on after the vectors that are encoded" if is_dense else "nothing was written"

    return exit_status(lambda: _LOG.info("wrote %s", build(arguments)), left)


def build(arguments: argparse.Namespace) -> str:
    """Build the index and print where it is. Raises a `SearchError`."""
    _check(arguments)
    corpus = Corpus(arguments.corpus_path)
    folder = Path(arguments.save_dir)
    if arguments.retrieval_method.lower() == "bm25":
        arguments.retrieval_method = "bm25"
    with only_builder(folder):
        return _build(arguments, corpus, folder)


def _build(arguments: argparse.Namespace, corpus: Corpus, folder: Path) -> str:
    if arguments.retrieval_method == "bm25":
        Bm25Retriever.check_folder(folder / "bm25")  # fail before the long work, not after it
        index = Bm25Retriever.build(corpus, arguments.bm25_k1, arguments.bm25_b)
        with writing(folder / "bm25"):
            index.save(folder / "bm25")
        return str(folder / "bm25")
    # Torch and FAISS read their number of threads when they are imported, and BM25 needs neither: so only here.
    prepare_libraries(arguments.num_threads)
    from search_r1.search.dense.build import build_dense

    return build_dense(arguments, corpus, folder)


def _check(arguments: argparse.Namespace) -> None:
    for name in _POSITIVE:
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ServerError(f"--{name} is {value}; it must be at least 1")
    if not 0 <= arguments.bm25_k1 < float("inf") or not 0 <= arguments.bm25_b <= 1:
        raise ServerError("--bm25_k1 must be 0 or more and --bm25_b between 0 and 1")


if __name__ == "__main__":
    sys.exit(main())
