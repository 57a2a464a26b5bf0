"""The index builder: streaming, resuming, processes, training samples, the files it leaves and what it refuses."""

from __future__ import annotations

import json
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing.context import BaseContext
from pathlib import Path
from types import SimpleNamespace

import faiss
import numpy as np
import pytest
from forked import forked
from search_corpora import corpus_of
from search_encoders import WORDS, build_dense, encoder, save_bert

from search_r1.errors import EncoderError, IndexMismatchError
from search_r1.search import index_builder
from search_r1.search.corpus import Corpus
from search_r1.search.dense import embeddings
from search_r1.search.dense.build import build_index, sample_rows
from search_r1.search.dense.embeddings import EmbeddingJob, VectorFile, encode_corpus
from search_r1.search.dense.encoding.encoder import Encoder, EncoderOptions
from search_r1.search.dense.retriever import encoder_fields
from search_r1.search.manifest import manifest_path


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """100 passages of 1 to 7 words."""
    texts = [" ".join(WORDS[(i * 5 + j) % len(WORDS)] for j in range(1 + i % 7)) for i in range(100)]
    return corpus_of(tmp_path / "many", *texts).path


def _expected(model: Path, corpus: Path) -> np.ndarray:
    return encoder(model).encode_passages([passage["contents"] for passage in Corpus(corpus)])


class _Interrupted(Encoder):
    """Stops after `calls` batches, as Ctrl-C would; counts the passages it encoded."""

    calls = 10**9
    passages = 0

    def encode_passages(self, texts, max_tokens=None):  # type: ignore[no-untyped-def]
        if self.calls == 0:
            raise KeyboardInterrupt
        self.calls -= 1
        self.passages += len(texts)
        return super().encode_passages(texts, max_tokens)


def _job(model: Path, corpus: Path, folder: Path, **fields: object) -> EmbeddingJob:
    options = EncoderOptions("e5", str(model))
    known = encoder_fields(Encoder(options)) | {"corpus": Corpus(corpus).digest} | fields
    return EmbeddingJob(folder / "emb.memmap", corpus, options, known, batch_size=2, max_tokens=20)


def test_an_interrupted_run_goes_on_where_it_stopped(model_dir: Path, many: Path, tmp_path: Path) -> None:
    job, corpus = _job(model_dir, many, tmp_path), Corpus(many)
    first = _Interrupted(job.options)
    first.calls = 40  # 32 rows a block: two whole blocks and half of the third
    with pytest.raises(KeyboardInterrupt):
        encode_corpus(job, first, corpus)
    assert json.loads(manifest_path(job.path).read_text())["rows_done"] == 64
    second = _Interrupted(job.options)
    vectors = encode_corpus(job, second, corpus)
    assert second.passages == 36
    np.testing.assert_allclose(vectors.block(0, 100), _expected(model_dir, many), atol=1e-5)
    third = _Interrupted(job.options)
    encode_corpus(job, third, corpus)
    assert third.passages == 0, "a finished file is not encoded again"


def test_vectors_of_something_else_are_never_continued(model_dir: Path, many: Path, tmp_path: Path) -> None:
    job, corpus = _job(model_dir, many, tmp_path, max_length=20), Corpus(many)
    stopped = _Interrupted(job.options)
    stopped.calls = 20
    with pytest.raises(KeyboardInterrupt):
        encode_corpus(job, stopped, corpus)
    before = job.path.read_bytes()
    for wrong in ({"max_length": 30}, {"corpus": "another"}, {"weights": "other"}, {"precision": "bfloat16"}):
        other = _job(model_dir, many, tmp_path, max_length=20)
        other.fields.update(wrong)
        message = f"{next(iter(wrong))}: index has.*to encode the corpus anew, remove {job.path} and .*json, or pass"
        with pytest.raises(IndexMismatchError, match=message):
            encode_corpus(other, stopped, corpus)
    assert job.path.read_bytes() == before


def test_several_processes_write_the_same_vectors(
    model_dir: Path, many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embeddings, "multiprocessing", SimpleNamespace(get_context=lambda method: forked()))
    more = ("--save_embedding", "--batch_size", "2", "--num_processes", "2")
    assert build_dense(model_dir, many, tmp_path, *more) == 0
    vectors = np.fromfile(tmp_path / "emb_e5.memmap", dtype=np.float32).reshape(100, 32)
    np.testing.assert_allclose(vectors, _expected(model_dir, many), atol=1e-5)


def test_a_process_that_ends_early_is_an_error(
    model_dir: Path, many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the workers end before they load anything."""

    def pool(num_processes: int, context: BaseContext, *_: object) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(num_processes, context, os._exit, (1,))

    monkeypatch.setattr(embeddings, "ProcessPoolExecutor", pool)
    job = replace(_job(model_dir, many, tmp_path), num_processes=2)
    with pytest.raises(EncoderError, match="an encoding process ended early"):
        encode_corpus(job, Encoder(job.options), Corpus(many))


def test_the_flat_file_is_that_of_faiss(tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).standard_normal((77, 12)).astype(np.float32)
    vectors.tofile(tmp_path / "v.memmap")
    index = faiss.IndexFlatIP(12)
    index.add(vectors)
    faiss.write_index(index, str(tmp_path / "theirs"))
    build_index(VectorFile(tmp_path / "v.memmap", 77, 12), "Flat", tmp_path / "ours")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("faiss_type", ["HNSW8,SQ8", "IVF4,PQ4x4"])
def test_any_factory_string(tmp_path: Path, faiss_type: str) -> None:
    vectors = np.random.default_rng(0).standard_normal((400, 8)).astype(np.float32)
    vectors.tofile(tmp_path / "v.memmap")
    build_index(VectorFile(tmp_path / "v.memmap", 400, 8), faiss_type, tmp_path / "index", train_rows=300)
    index = faiss.read_index(str(tmp_path / "index"))
    assert index.ntotal == 400 and index.metric_type == faiss.METRIC_INNER_PRODUCT
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["index", "v.memmap"]


def test_a_training_sample_is_random_repeatable_and_without_repeats() -> None:
    rows = sample_rows(1000, 100)
    assert len(rows) == 100 and (np.diff(rows) > 0).all() and rows.tolist() == sample_rows(1000, 100).tolist()
    assert 300 < rows.mean() < 700 and rows.max() > 900
    assert sample_rows(5, 100).tolist() == [0, 1, 2, 3, 4]


def test_vectors_are_reused_and_removed_as_asked(model_dir: Path, corpus_file: Path, tmp_path: Path) -> None:
    kept, reused = tmp_path / "kept", tmp_path / "reused"
    assert build_dense(model_dir, corpus_file, kept, "--save_embedding") == 0
    vectors = kept / "emb_e5.memmap"
    assert build_dense(model_dir, corpus_file, reused, "--embedding_path", str(vectors), "--faiss_type", "HNSW8") == 0
    assert sorted(path.name for path in reused.iterdir()) == ["e5_HNSW8.index", "e5_HNSW8.index.json"]
    assert vectors.is_file()
    first, second = (faiss.read_index(str(path)) for path in (kept / "e5_Flat.index", reused / "e5_HNSW8.index"))
    np.testing.assert_array_equal(first.reconstruct_n(0, 5), second.reconstruct_n(0, 5))
    assert build_dense(model_dir, corpus_file, reused) == 0
    assert not list(reused.glob("emb_e5.memmap*"))
    manifest_path(vectors).unlink()  # a published file has none
    assert build_dense(model_dir, corpus_file, reused, "--embedding_path", str(vectors)) == 0
    assert json.loads((reused / "e5_Flat.index.json").read_text())["precision"] == "unknown"
    vectors.write_bytes(vectors.read_bytes()[:-4])
    assert build_dense(model_dir, corpus_file, reused, "--embedding_path", str(vectors)) == 2


def test_vectors_of_another_encoder_are_not_reused(
    model_dir: Path, corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build_dense(model_dir, corpus_file, tmp_path, "--save_embedding") == 0
    other = save_bert(tmp_path / "other", seed=1)
    more = ("--embedding_path", str(tmp_path / "emb_e5.memmap"))
    assert build_dense(other, corpus_file, tmp_path / "new", *more) == 2
    assert "weights: index has" in capsys.readouterr().err


def test_the_manifest_says_what_the_index_is_of(model_dir: Path, corpus_file: Path, tmp_path: Path) -> None:
    assert build_dense(model_dir, corpus_file, tmp_path, "--max_length", "12") == 0
    manifest = json.loads((tmp_path / "e5_Flat.index.json").read_text())
    loaded = encoder(model_dir)
    expected = {
        "corpus": Corpus(corpus_file).digest,
        "weights": loaded.fingerprint,
        "precision": "float32",
        "faiss_type": "Flat",
        "num_rows": 5,
        "max_length": 12,
        "bytes": (tmp_path / "e5_Flat.index").stat().st_size,
        "pooling": "mean",
        "passage_prefix": "passage: ",
        "dim": 32,
    }
    assert {key: manifest[key] for key in expected} == expected


def test_bm25_may_be_written_in_capitals(corpus_file: Path, tmp_path: Path) -> None:
    arguments = ["--retrieval_method", "BM25", "--corpus_path", str(corpus_file), "--save_dir", str(tmp_path / "out")]
    assert index_builder.main(arguments) == 0 and (tmp_path / "out" / "bm25" / "manifest.json").is_file()


def test_builder_errors_are_one_line(
    model_dir: Path, corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for faiss_type, message in (
        ("Nonsense9", "FAISS cannot build 'Nonsense9' of vectors of 32 values: could not parse index string Nonsense9"),
        ("HNSW8_PQ4", "FAISS builds 'HNSW8_PQ4' for Euclidean distances, and not for inner products"),
    ):
        assert build_dense(model_dir, corpus_file, tmp_path / "typed", "--faiss_type", faiss_type) == 2
        assert message in capsys.readouterr().err
        assert list((tmp_path / "typed").iterdir()) == [], "it is said before the corpus is encoded"
    assert build_dense(model_dir, tmp_path / "none.jsonl", tmp_path) == 2
    assert "does not exist" in capsys.readouterr().err
    assert index_builder.main(["--retrieval_method", "e5", "--corpus_path", str(corpus_file)]) == 2
    assert "needs --model_path" in capsys.readouterr().err
    assert build_dense(model_dir, corpus_file, tmp_path, "--batch_size", "0") == 2
    assert "--batch_size is 0" in capsys.readouterr().err
    assert build_dense(model_dir, corpus_file, tmp_path, "--bm25_b", "1.5") == 2
    assert "--bm25_b between 0 and 1" in capsys.readouterr().err
