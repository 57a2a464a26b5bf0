"""An index file is refused at load unless its contents are what its header and its manifest say."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import faiss
import numpy as np
import pytest
from search_corpora import corpus_of
from search_encoders import WORDS, build_dense, encoder, save_bert

from search_r1.errors import IndexMismatchError
from search_r1.search.dense.embeddings import VectorFile
from search_r1.search.dense.faiss_index import FaissIndex, read_index
from search_r1.search.dense.retriever import DenseRetriever
from search_r1.search.manifest import manifest_path
from search_r1.search.retriever import RetrieverOptions

ROWS, DIM = 60, 16
VECTORS = np.random.default_rng(0).standard_normal((ROWS, DIM)).astype(np.float32)
TYPES = ["IVF4,Flat", "IVF4,SQ8", "PCA8,IVF4,Flat", "IVF4,Flat,RFlat", "IVF4_HNSW4,Flat", "IVF2,PQ4x4fs"]
IDS: dict[str, np.ndarray] = {
    "from 1": np.arange(1, ROWS + 1),
    "negative": np.arange(ROWS) - 1,
    "times ten": 10 * np.arange(ROWS),
    "repeated": np.arange(ROWS) // 2,
    "one repeated": np.r_[np.arange(ROWS - 1), 0],
    "very large": np.arange(ROWS) + 2**40,
}


def _made(kind: str, ids: np.ndarray | None = None, rows: int = ROWS) -> faiss.Index:
    index = faiss.index_factory(DIM, kind, faiss.METRIC_INNER_PRODUCT)
    if not index.is_trained:
        index.train(VECTORS)
    index.add(VECTORS[:rows]) if ids is None else index.add_with_ids(VECTORS, ids.astype(np.int64))
    return index


def _written(index: faiss.Index, folder: Path) -> Path:
    faiss.write_index(index, str(folder / "e5.index"))
    return folder / "e5.index"


def _with_ids(kind: str, ids: np.ndarray) -> faiss.Index:
    if not kind.startswith("IDMap"):
        return _made(kind, ids)
    index = {"IDMap": faiss.IndexIDMap, "IDMap2": faiss.IndexIDMap2}[kind.split(",")[0]](_made("Flat", rows=0))
    index.add_with_ids(VECTORS, ids.astype(np.int64))
    return index


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("kind", ["IDMap,Flat", "IDMap2,Flat", "IVF4,Flat", "IVF4,SQ8", "PCA8,IVF4,Flat"])
def test_ids_that_are_no_row_numbers_are_refused(tmp_path: Path, kind: str, ids: str) -> None:
    path = _written(_with_ids(kind, IDS[ids]), tmp_path)
    with pytest.raises(IndexMismatchError, match=f"{path}: an index of 60 rows must have the ids 0 to 59, each once"):
        read_index(path)


@pytest.mark.parametrize("kind", ["IDMap,Flat", "IDMap2,Flat", "IVF4,Flat", "PCA16,IVF4,Flat"])
def test_rows_in_another_order_are_found_by_their_ids(tmp_path: Path, kind: str) -> None:
    ids = np.random.default_rng(1).permutation(ROWS)
    index = FaissIndex(read_index(_written(_with_ids(kind, ids), tmp_path)), "nprobe=4" if "IVF" in kind else "")
    best = (VECTORS @ VECTORS.T).argmax(axis=1)
    assert [hits[0].row for hits in index.search(VECTORS, 1)] == ids[best].tolist()


@pytest.mark.parametrize("rows", [-1, 1, -ROWS])
@pytest.mark.parametrize("kind", [*TYPES, "Flat", "HNSW4", "HNSW4,SQ8", "SQ8", "IDMap,Flat"])
def test_a_header_with_another_number_of_rows_is_refused(tmp_path: Path, kind: str, rows: int) -> None:
    path = _written(_with_ids(kind, np.arange(ROWS)) if kind.startswith("IDMap") else _made(kind), tmp_path)
    assert len(FaissIndex(read_index(path))) == ROWS
    header = bytearray(path.read_bytes())
    struct.pack_into("<q", header, 8, ROWS + rows)  # after the kind and the dimension
    path.write_bytes(header)
    with pytest.raises(IndexMismatchError, match="build it"):
        read_index(path)


def test_a_part_with_another_metric_is_refused(tmp_path: Path) -> None:
    index = faiss.IndexIDMap(faiss.IndexFlatL2(DIM))
    index.add_with_ids(VECTORS, np.arange(ROWS))
    index.metric_type = faiss.METRIC_INNER_PRODUCT
    with pytest.raises(IndexMismatchError, match="IndexFlatL2 has 60 rows and metric 1"):
        read_index(_written(index, tmp_path))


Spoil = Callable[[Path], None]


def _rewrite(change: Callable[[bytes], bytes]) -> Spoil:
    return lambda path: path.write_bytes(change(path.read_bytes())) and None


@pytest.mark.parametrize("engine", ["faiss", "matrix"])
@pytest.mark.parametrize(
    "spoil",
    [
        _rewrite(lambda content: content + content[-DIM * 8 :]),  # a part that was appended twice
        _rewrite(lambda content: content[: -DIM * 8]),
        _rewrite(lambda content: content[:-4] + struct.pack("<f", np.nan)),
        _rewrite(lambda content: content[:-8] + struct.pack("<ff", np.inf, 1.0)),
    ],
    ids=["longer", "shorter", "nan", "inf"],
)
def test_every_way_to_read_a_flat_index_refuses_the_same(
    model_dir: Path, tmp_path: Path, spoil: Spoil, engine: str
) -> None:
    corpus = corpus_of(tmp_path / "corpus", *(" ".join(WORDS[i : i + 2]) for i in range(8)))
    assert build_dense(model_dir, corpus.path, tmp_path) == 0
    path = tmp_path / "e5_Flat.index"
    manifest_path(path).unlink()  # as a published index
    options = RetrieverOptions("e5", str(path), str(model_dir), engine=engine)
    found = DenseRetriever.load(path, corpus, options).search(["river"], 8)
    assert sorted(hit.row for hit in found[0]) == list(range(8))
    spoil(path)
    with pytest.raises(IndexMismatchError, match=str(path)):
        DenseRetriever.load(path, corpus, options)


@pytest.mark.parametrize("engine", ["auto", "faiss", "matrix"])
@pytest.mark.parametrize("kind", ["Flat", "HNSW8", "SQ8", "IDMap,Flat", "IVF1,Flat"])
def test_an_index_without_rows_is_refused(model_dir: Path, tmp_path: Path, kind: str, engine: str) -> None:
    corpus = corpus_of(tmp_path / "corpus", "river", "sea")
    dim = encoder(model_dir).dim
    index = faiss.index_factory(dim, kind, faiss.METRIC_INNER_PRODUCT)
    index.train(np.ones((40, dim), dtype=np.float32))
    path = _written(index, tmp_path)
    options = RetrieverOptions("e5", str(path), str(model_dir), engine=engine)
    message = "no vectors" if engine != "matrix" or kind == "Flat" else "the matrix engine needs one"
    with pytest.raises(IndexMismatchError, match=f"{path} .*{message}"):
        DenseRetriever.load(path, corpus, options)


def test_a_file_of_vectors_without_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "emb_e5.memmap").touch()
    with pytest.raises(IndexMismatchError, match="emb_e5.memmap has no vectors; build it again"):
        VectorFile(tmp_path / "emb_e5.memmap", 0, DIM)


# --- the length of passages


@pytest.fixture
def long_model(tmp_path: Path) -> Path:
    """An encoder of 600 positions."""
    return save_bert(tmp_path / "long", max_position_embeddings=600)


def test_a_passage_is_cut_where_it_was_asked_and_never_silently_elsewhere(long_model: Path) -> None:
    loaded = encoder(long_model)
    text = " ".join(WORDS[2 + i % 17] for i in range(590))
    words = text.split()

    def cut(limit: int) -> np.ndarray:  # [CLS] passage : ... [SEP]
        return loaded.encode_passages([" ".join(words[: limit - 4])])

    for limit in (12, 256):
        np.testing.assert_allclose(loaded.encode_passages([text], limit), cut(limit), atol=1e-6)
    vectors = [loaded.encode_passages([text], limit)[0] for limit in (256, 400, 512)]
    assert min(np.abs(one - two).max() for one, two in zip(vectors, vectors[1:], strict=False)) > 1e-5


@pytest.mark.parametrize("limits", [{}, {"sentence_bert_config.json": {"max_seq_length": 300}}])
def test_a_length_beyond_the_model_is_told_and_the_manifest_has_the_real_one(
    long_model: Path, tmp_path: Path, limits: dict, caplog: pytest.LogCaptureFixture
) -> None:
    corpus = corpus_of(tmp_path / "corpus", "river", "city").path
    if limits:
        pooling = {"pooling_mode_mean_tokens": True}
        modules = [
            {"type": "x.Transformer", "path": ""},
            {"type": "x.Pooling", "path": "1"},
            {"type": "x.Normalize", "path": "2"},
        ]
        (long_model / "1").mkdir()
        for name, content in {"modules.json": modules, "1/config.json": pooling, **limits}.items():
            (long_model / name).write_text(json.dumps(content))
    longest = 300 if limits else 600
    told = f"--max_length {longest + 1}: the encoder takes texts of at most {longest} tokens"
    for wanted in (longest, longest + 1):
        assert build_dense(long_model, corpus, tmp_path / str(wanted), "--max_length", str(wanted)) == 0
        assert (told in caplog.text) == (wanted > longest)
        made = json.loads((tmp_path / str(wanted) / "e5_Flat.index.json").read_text())
        assert made["max_length"] == longest


def test_vectors_that_an_earlier_version_cut_at_256_are_not_continued(
    long_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = corpus_of(tmp_path / "corpus", "river", "city").path
    long = ("--max_length", "400", "--save_embedding")
    assert build_dense(long_model, corpus, tmp_path, *long) == 0
    manifest = manifest_path(tmp_path / "emb_e5.memmap")
    fields = json.loads(manifest.read_text())
    del fields["cut_at"]
    manifest.write_text(json.dumps(fields | {"rows_done": 1}))
    assert build_dense(long_model, corpus, tmp_path, *long) == 2
    assert "cut_at: index has None, now 400" in capsys.readouterr().err
    manifest.write_text(json.dumps(fields))  # complete: they may be used as they are
    more = ("--embedding_path", str(tmp_path / "emb_e5.memmap"))
    assert build_dense(long_model, corpus, tmp_path / "new", "--max_length", "400", *more) == 0
