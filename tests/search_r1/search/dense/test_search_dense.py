"""Dense search: FAISS and matrix engines behind one retriever, manifests, fusion with BM25, real text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import faiss
import numpy as np
import pytest
import torch
from search_encoders import MEAN_POOLING, add_files, build_dense, encoder, save_bert, save_dpr
from transformers import DPRContextEncoder, DPRQuestionEncoder

from search_r1.errors import IndexMismatchError, ServerError
from search_r1.search.bm25.index import Bm25Retriever
from search_r1.search.corpus import Corpus
from search_r1.search.dense import retriever as dense
from search_r1.search.dense.embeddings import VectorFile
from search_r1.search.dense.exact_index import ExactIndex
from search_r1.search.dense.faiss_index import FaissIndex
from search_r1.search.dense.retriever import DenseRetriever
from search_r1.search.hybrid import HybridRetriever, fuse
from search_r1.search.manifest import manifest_path
from search_r1.search.retriever import Hit, RetrieverOptions
from search_r1.search.retriever_loading import load_retriever
from search_r1.search.server.retrieval_service import RetrievalService

Built = tuple[Path, Corpus]


@pytest.fixture
def built(model_dir: Path, corpus_file: Path, tmp_path: Path) -> Built:
    """A Flat index, in a folder of its own, and its corpus."""
    assert build_dense(model_dir, corpus_file, tmp_path) == 0
    return tmp_path / "e5_Flat.index", Corpus(corpus_file)


def _load(index: Path, corpus: Corpus, model: Path, family: str = "e5", **options: object) -> DenseRetriever:
    backend = RetrieverOptions(family, str(index), str(model), **options)  # type: ignore[arg-type]
    return DenseRetriever.load(index, corpus, backend)


def _ivf(vectors: np.ndarray) -> faiss.Index:
    index = faiss.index_factory(vectors.shape[1], "IVF20,Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(vectors)
    index.add(vectors)
    return index


def _vectors(rows: int = 40) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((rows, 32)).astype(np.float32)


@pytest.mark.parametrize("engine", ["faiss", "matrix"])
def test_hits_are_the_exact_inner_products(model_dir: Path, corpus_file: Path, tmp_path: Path, engine: str) -> None:
    loaded, corpus = encoder(model_dir), Corpus(corpus_file)
    vectors = loaded.encode_passages([passage["contents"] for passage in corpus])
    vectors.tofile(tmp_path / "v.memmap")
    flat = faiss.IndexFlatIP(32)
    flat.add(vectors)
    index = FaissIndex(flat) if engine == "faiss" else ExactIndex(VectorFile(tmp_path / "v.memmap", 5, 32))
    retriever = DenseRetriever("e5", index, loaded)
    queries = ["river morn", "capital of tarsia", "singer"] * 30  # more than one batch
    exact = loaded.encode_queries(queries) @ vectors.T
    for hits, scores in zip(retriever.search(queries, 3), exact, strict=True):
        assert [hit.row for hit in hits] == list(np.argsort(-scores, kind="stable")[:3])
        assert [hit.score for hit in hits] == pytest.approx(sorted(scores, reverse=True)[:3], abs=1e-5)
    assert len(retriever.search(["river"], 100)[0]) == len(retriever) == 5
    assert retriever.search([], 3) == []


def test_minus_one_rows_are_dropped() -> None:
    """An inverted list that holds fewer than k vectors: FAISS fills up with -1."""
    index, query = _ivf(_vectors()), _vectors(1)
    assert (index.search(query, 10)[1] == -1).any()
    (hits,) = FaissIndex(index).search(query, 10)
    assert 0 < len(hits) < 10 and all(hit.row >= 0 for hit in hits)


def test_search_parameters_reach_the_index() -> None:
    """All 20 lists of an inverted index are an exact search; one is not."""
    vectors = _vectors(200)
    index, queries = _ivf(vectors), _vectors(300)[200:]
    best = (queries @ vectors.T).argmax(1)
    few = [hits[0].row for hits in FaissIndex(index, "nprobe=1").search(queries, 1)]
    every = [hits[0].row for hits in FaissIndex(index, "nprobe=20").search(queries, 1)]
    assert every == best.tolist() and few != every
    with pytest.raises(ServerError, match="does not accept the search parameters 'efSearch=9'"):
        FaissIndex(index, "efSearch=9")
    for nothing in ("nprobe=0", "nprobe=-1", "quantizer_efSearch=00,nprobe=4", "nprobe=0 verbose=0", "nprobe=0.5"):
        with pytest.raises(ServerError, match="nprobe and efSearch must be at least 1"):
            FaissIndex(index, nothing)


def test_search_parameters_go_to_the_gpus_with_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """FAISS's GPU indexes copy them; a ParameterSpace refuses such an index. Here the CPU's stands for it."""
    moved = []
    monkeypatch.setattr("search_r1.search.dense.faiss_index.to_gpus", lambda index: moved.append(index.nprobe) or index)
    FaissIndex(_ivf(_vectors(200)), "nprobe=7", gpu=True)
    assert moved == [7]


def test_a_small_batch_of_a_flat_index_is_one_matrix_product() -> None:
    FaissIndex(faiss.IndexFlatIP(32))
    assert faiss.cvar.distance_compute_blas_threshold == 4 * 32


def test_an_index_that_does_not_fit_the_encoder_is_refused(model_dir: Path) -> None:
    with pytest.raises(IndexMismatchError, match="48 values, the encoder of 32"):
        DenseRetriever("e5", FaissIndex(faiss.IndexFlatIP(48)), encoder(model_dir))
    with pytest.raises(IndexMismatchError, match="inner product"):
        FaissIndex(faiss.IndexFlatL2(32))


@pytest.mark.parametrize("faiss_type", ["Flat", "HNSW8", "SQ8", "IVF2,SQ8"])
def test_every_engine_opens_a_built_index(model_dir: Path, corpus_file: Path, tmp_path: Path, faiss_type: str) -> None:
    assert build_dense(model_dir, corpus_file, tmp_path, "--faiss_type", faiss_type) == 0
    index, corpus = tmp_path / f"e5_{faiss_type}.index", Corpus(corpus_file)
    parameters = "nprobe=2" if "IVF" in faiss_type else ""
    found = [
        _load(index, corpus, model_dir, engine=engine, search_parameters=parameters).search(["river morn"], 9)[0]
        for engine in ("auto", "faiss")
    ]
    assert [hit.row for hit in found[0]] == [hit.row for hit in found[1]] and len(found[0]) == 5
    if faiss_type != "Flat":
        with pytest.raises(IndexMismatchError, match="the matrix engine needs one"):
            _load(index, corpus, model_dir, engine="matrix")


def test_an_embeddings_file_is_an_index_too(model_dir: Path, corpus_file: Path, tmp_path: Path) -> None:
    assert build_dense(model_dir, corpus_file, tmp_path, "--save_embedding") == 0
    corpus, vectors = Corpus(corpus_file), tmp_path / "emb_e5.memmap"
    expected = _load(tmp_path / "e5_Flat.index", corpus, model_dir).search(["river"], 3)
    assert _load(vectors, corpus, model_dir).search(["river"], 3) == expected
    path = manifest_path(vectors)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rows_done": 3}))
    with pytest.raises(IndexMismatchError, match="rows_done: index has 3, now 5"):
        _load(vectors, corpus, model_dir)


def test_the_fingerprint_is_of_all_that_an_answer_depends_on(built: Built, model_dir: Path) -> None:
    index, corpus = built
    first = _load(index, corpus, model_dir, query_precision="float32").fingerprint
    assert _load(index, corpus, model_dir, query_precision="float32").fingerprint == first
    others = [
        _load(index, corpus, model_dir, query_precision="bfloat16").fingerprint,
        _load(index, corpus, model_dir, query_precision="float32", engine="faiss").fingerprint,
    ]
    data = bytearray(index.read_bytes())
    data[-1] ^= 1
    index.write_bytes(data)
    others.append(_load(index, corpus, model_dir, query_precision="float32").fingerprint)
    assert len({first, *others}) == 4


def test_index_of_other_weights_corpus_or_prefix_is_refused(built: Built, model_dir: Path, tmp_path: Path) -> None:
    index, corpus = built
    assert len(_load(index, corpus, model_dir)) == 5
    with pytest.raises(IndexMismatchError, match="passage_prefix: index has 'passage: ', now ''"):
        _load(index, corpus, model_dir, "gte")
    other = save_bert(tmp_path / "other", seed=1)
    with pytest.raises(IndexMismatchError, match="weights: index has"):
        _load(index, corpus, other)
    (tmp_path / "c.jsonl").write_text('{"id": "0", "contents": "x"}\n')
    with pytest.raises(IndexMismatchError, match="corpus: index has"):
        _load(index, Corpus(tmp_path / "c.jsonl"), model_dir)
    index.write_bytes(index.read_bytes()[:-128])
    with pytest.raises(IndexMismatchError, match="bytes: index has"):
        _load(index, corpus, model_dir)
    manifest_path(index).unlink()
    with pytest.raises(IndexMismatchError):
        _load(index, corpus, model_dir)
    index.write_bytes(b"not an index")
    with pytest.raises(IndexMismatchError, match="not a readable FAISS index"):
        _load(index, corpus, model_dir)


def test_dpr_is_served_by_the_question_encoder_that_the_index_names(corpus_file: Path, tmp_path: Path) -> None:
    passages = save_dpr(tmp_path / "p", DPRContextEncoder, seed=1)
    questions, others = (save_dpr(tmp_path / f"q{seed}", DPRQuestionEncoder, seed) for seed in (2, 3))
    assert build_dense(passages, corpus_file, tmp_path, "--query_model_path", str(questions), method="dpr") == 0
    index, corpus = tmp_path / "dpr_Flat.index", Corpus(corpus_file)
    (hits,) = _load(index, corpus, questions, "dpr", query_precision="float32").search(["river"], 5)
    vectors = encoder(passages, "dpr").encode_passages([passage["contents"] for passage in corpus])
    scores = vectors @ encoder(questions, "dpr").encode_queries(["river"])[0]
    assert [hit.score for hit in hits] == pytest.approx(sorted(scores.tolist(), reverse=True), rel=1e-5)
    with pytest.raises(IndexMismatchError, match="query_weights: index has"):
        _load(index, corpus, others, "dpr")
    assert build_dense(questions, corpus_file, tmp_path, method="dpr") == 2


def test_an_encoder_whose_files_say_how_to_pool_may_have_a_name_of_its_own(corpus_file: Path, tmp_path: Path) -> None:
    model = save_bert(tmp_path / "m")
    add_files(model, MEAN_POOLING)
    assert build_dense(model, corpus_file, tmp_path, method="bge-m3") == 0
    index, corpus = str(tmp_path / "bge-m3_Flat.index"), Corpus(corpus_file)
    options = RetrieverOptions("bge-m3", index, str(model))
    assert len(load_retriever(options, corpus).search(["river"], 5)[0]) == 5
    with pytest.raises(ServerError, match="there is no retriever 'bm-25'; did you mean bm25"):
        load_retriever(replace(options, name="bm-25"), corpus)
    (model / "modules.json").unlink()
    for other in (str(model), str(tmp_path / "none"), None):
        with pytest.raises(ServerError, match="there is no retriever 'bge-m3'; did you mean bge"):
            load_retriever(replace(options, model=other), corpus)


def test_pooling_chosen_at_build_time_is_used_for_queries(model_dir: Path, corpus_file: Path, tmp_path: Path) -> None:
    assert build_dense(model_dir, corpus_file, tmp_path, "--pooling_method", "cls") == 0
    retriever = _load(tmp_path / "e5_Flat.index", Corpus(corpus_file), model_dir, query_precision="float32")
    vectors = faiss.read_index(str(tmp_path / "e5_Flat.index")).reconstruct_n(0, 5)
    (query,) = encoder(model_dir, pooling="cls").encode_queries(["capital"])
    (hits,) = retriever.search(["capital"], 1)
    assert hits[0].score == pytest.approx(float((vectors @ query).max()), abs=1e-5)


def test_published_index_without_a_manifest_is_served_but_its_size_is_checked(
    built: Built, model_dir: Path, tmp_path: Path
) -> None:
    index, corpus = built
    manifest_path(index).unlink()
    RetrievalService(_load(index, corpus, model_dir), corpus).close()
    (tmp_path / "c.jsonl").write_text('{"id": "0", "contents": "x"}\n')
    short = Corpus(tmp_path / "c.jsonl")
    with pytest.raises(IndexMismatchError, match="index has 5 rows.* has 1"):
        RetrievalService(_load(index, short, model_dir), short)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_a_clear_error(built: Built, model_dir: Path) -> None:
    index, corpus = built
    with pytest.raises(ServerError, match="--faiss_gpu: torch sees no GPU"):
        _load(index, corpus, model_dir, gpu=True)
    with pytest.raises(ServerError, match="--faiss_gpu: this build of FAISS sees no GPU"):
        _load(index, corpus, model_dir, gpu=True, engine="faiss")


def test_a_flat_index_is_shared_out_over_all_visible_gpus(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """The devices that the index is made with are noted; it then runs on the CPU."""
    asked = []

    def on_cpu(vectors: VectorFile, devices: list[str], num_threads: int) -> ExactIndex:
        asked.append(devices)
        return ExactIndex(vectors, ["cpu"] * len(devices), num_threads=num_threads)

    monkeypatch.setattr("search_r1.search.dense.retriever.ExactIndex", on_cpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    index = dense._open(built[0], 5, 32, RetrieverOptions("e5", "", "", gpu=True))
    assert asked == [[f"cuda:{index}" for index in range(8)]] and len(index) == 5


def test_fusion_is_the_sum_of_reciprocal_ranks() -> None:
    """Row 7: 1/61 + 1/62; row 9: 1/62 + 1/61, the same, so the lower row first; row 3: 1/63; row 1: 1/63 + nothing."""
    first = [Hit(7, 9.0), Hit(9, 5.0), Hit(3, 1.0)]
    second = [Hit(9, 0.2), Hit(7, 0.1), Hit(1, 0.0)]
    both = 1 / 61 + 1 / 62
    assert fuse([first, second], 4) == [Hit(7, both), Hit(9, both), Hit(1, 1 / 63), Hit(3, 1 / 63)]
    assert fuse([first, second], 2) == [Hit(7, both), Hit(9, both)]
    assert fuse([[], [Hit(4, 1.0)]], 3) == [Hit(4, 1 / 61)]
    assert fuse([[], []], 3) == []


def test_hybrid_fuses_bm25_and_a_dense_index(built: Built, model_dir: Path) -> None:
    index, corpus = built
    options = RetrieverOptions("hybrid", str(index), str(model_dir), dense_name="e5")
    hybrid = load_retriever(options, corpus)
    dense, sparse = load_retriever(replace(options, name="e5", dense_name=None), corpus), Bm25Retriever.build(corpus)
    queries = ["river of tarsia", "singer", "zebra"]
    found = hybrid.search(queries, 3)
    pairs = zip(sparse.search(queries, 100), dense.search(queries, 100), strict=True)
    assert found == [fuse(pair, 3) for pair in pairs]
    assert [hybrid.search([query], 3)[0] for query in queries] == found
    assert (hybrid.name, len(hybrid)) == ("hybrid", 5)
    assert len(found[2]) == 3, "a query without a known word still has the dense half"
    assert hybrid.fingerprint not in (dense.fingerprint, HybridRetriever([dense, sparse]).fingerprint)  # type: ignore[attr-defined]


def test_backends_that_lack_something_say_so(corpus_file: Path, tmp_path: Path) -> None:
    corpus = Corpus(corpus_file)
    (tmp_path / "one.jsonl").write_text('{"id": "0", "contents": "river"}\n')
    parts = [Bm25Retriever.build(corpus), Bm25Retriever.build(Corpus(tmp_path / "one.jsonl"))]
    with pytest.raises(IndexMismatchError, match="two or more indexes of the same corpus"):
        HybridRetriever(parts)
    with pytest.raises(IndexMismatchError, match="two or more"):
        HybridRetriever(parts[:1])
    with pytest.raises(ServerError, match="needs --dense_name"):
        load_retriever(RetrieverOptions("hybrid"), corpus)
    with pytest.raises(ServerError, match="needs --index_path and --retriever_model"):
        load_retriever(RetrieverOptions("e5"), corpus)
    with pytest.raises(ServerError, match="'torch' is not one of auto, faiss, matrix"):
        load_retriever(RetrieverOptions("e5", engine="torch"), corpus)
    with pytest.raises(ServerError, match="needs --dense_name"):
        load_retriever(RetrieverOptions("Hybrid"), corpus)
    assert load_retriever(RetrieverOptions("BM25"), corpus).name == "bm25"


def test_search_parameters_of_an_exact_search_are_told_to_have_no_effect(
    built: Built, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _load(*built, model_dir, search_parameters="nprobe=32")
    assert "--search_parameters nprobe=32 has no effect" in caplog.text


def test_a_server_that_leaves_cores_idle_says_so(
    built: Built, model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    index, corpus = built

    def told(cores: int, num_threads: int = 1) -> bool:
        caplog.clear()
        monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
        load_retriever(RetrieverOptions("e5", str(index), str(model_dir), num_threads=num_threads), corpus)
        return f"one of {cores} CPU cores: --num_threads N" in caplog.text

    assert told(64) and not told(64, num_threads=32) and not told(2)
    assert load_retriever(RetrieverOptions("bm25"), corpus) and "CPU cores" not in caplog.text, "it is small"


def test_an_index_that_may_not_be_read_is_told_in_a_line(
    built: Built, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as an index that root built, and another user serves."""
    index, corpus = built
    Bm25Retriever.build(corpus).save(tmp_path / "bm25")
    options = RetrieverOptions("e5", str(index), str(model_dir))

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", refuse)
        with pytest.raises(IndexMismatchError, match="bm25/manifest.json cannot be read: Permission denied"):
            load_retriever(RetrieverOptions("bm25", str(tmp_path / "bm25")), corpus)
        with pytest.raises(IndexMismatchError, match="index.json cannot be read: Permission denied"):
            load_retriever(options, corpus)
    index.with_name(f"{index.name}.json").unlink()
    for method in ("open", "is_file"):  # the file, or a folder above it
        with monkeypatch.context() as patch:
            patch.setattr(Path, method, refuse)
            with pytest.raises(IndexMismatchError, match="index cannot be read: Permission denied"):
                load_retriever(options, corpus)
