"""Reranking: scores against float64 forwards of single pairs, the routes over real HTTP, the two programs."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import torch
from search_clients import search
from search_corpora import write_rows
from search_cross_encoders import POSITIONS, VOCABULARY, ids, logit, save_cross_encoder, score
from search_encoders import save_bert
from search_scheduling import Gate
from search_servers import PATIENCE_S, wait_until
from transformers import AutoModelForSequenceClassification, RobertaConfig, RobertaForSequenceClassification

from search_r1.errors import EncoderError, SearchFailed
from search_r1.http.gate import Metrics
from search_r1.search import rerank_server, retrieval_rerank_server
from search_r1.search.bm25.index import Bm25Retriever
from search_r1.search.corpus import Corpus
from search_r1.search.rerank.cross_encoder import CrossEncoder, CrossEncoderOptions, Pair
from search_r1.search.rerank.reranker import RerankedSource, Reranker, RerankLimits
from search_r1.search.rerank.routes import rerank_router, reranked_router
from search_r1.search.server.app import AppOptions, create_app_of
from search_r1.search.server.retrieval_service import RetrievalService

_PASSAGES = {
    "Morn (city)": "Morn is a city in the country of Tarsia.",
    "Lune": "the river of Morn",
    "Osk": "Osk is the capital of Tarsia.",
    "Velt (singer) (born in Osk)": "Anna Velt paints rivers",
    "Album": "a book and an album by the actor",
}
_QUERIES = ["who painted rivers?", "which city was the capital of Tarsia", "the singer Anna"]
Truth = dict[tuple[str, str], float]  # the float64 score of each query with each passage, by title
_CORPUS = [
    {"id": f"p{n}", "contents": f'"{title}"\n{text}', "url": f"w/{n}"}
    for n, (title, text) in enumerate(_PASSAGES.items())
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_cross_encoder(tmp_path_factory.mktemp("cross"), seed=1)  # turns the order of BM25 round


@pytest.fixture(scope="module")
def loaded(model_dir: Path) -> CrossEncoder:
    return CrossEncoder(_options(model_dir))


@pytest.fixture(scope="module")
def truth(model_dir: Path) -> Truth:
    return {(q, title): score(model_dir, q, title, text) for q in _QUERIES for title, text in _PASSAGES.items()}


class GatedCrossEncoder(Gate, CrossEncoder):
    """A loaded model that notes its batches; each waits at the gate."""

    def __init__(self, loaded: CrossEncoder) -> None:
        Gate.__init__(self)
        vars(self).update(vars(loaded))
        self.batches: list[list[Pair]] = []

    def score(self, pairs) -> np.ndarray:
        self.batches.append(list(pairs))
        self.wait_at_the_gate()
        return super().score(pairs)


class Stage:
    """A reranking server in this process."""

    def __init__(self, url: str, model: GatedCrossEncoder, reranker: Reranker) -> None:
        self.url, self.model, self.reranker = url, model, reranker

    def post(self, headers: dict[str, str] | None = None, **body: object) -> requests.Response:
        return requests.post(f"{self.url}/rerank", json=body, headers=headers, timeout=PATIENCE_S)

    def result(self, **body: object) -> list[list[Any]]:
        reply = self.post(**body)
        assert reply.status_code == 200, reply.text
        return reply.json()["result"]

    def value(self, metric: str) -> float | None:
        return self.reranker.metrics.registry.get_sample_value(metric)


@pytest.fixture
def gated(run_app, loaded: CrossEncoder) -> Iterator[Callable[..., Stage]]:
    """`gated(**limits)`: a server whose batches wait at the gate."""
    made: list[Stage] = []

    def start(**limits: Any) -> Stage:
        model = GatedCrossEncoder(loaded)
        reranker = Reranker(model, RerankLimits(**{"max_wait_ms": 0.0} | limits))
        options = AppOptions(topk=3, timeout_s=PATIENCE_S)
        app = create_app_of(reranker, rerank_router(reranker, options), options, reranker.metrics)
        made.append(Stage(run_app(app), model, reranker))
        return made[-1]

    yield start
    for stage in made:
        stage.model.open()
        stage.reranker.close()


@pytest.fixture
def stage(gated: Callable[..., Stage]) -> Stage:
    """A server that never waits."""
    stage = gated()
    stage.model.open()
    return stage


def _options(folder: Path, **options: Any) -> CrossEncoderOptions:
    return CrossEncoderOptions(str(folder), **{"precision": "float32"} | options)


def _document(title: str) -> dict[str, Any]:
    return next(row for row in _CORPUS if row["contents"].startswith(f'"{title}"'))


def _pair(query: str, title: str) -> Pair:
    return Pair(query, f'(Title: "{title}") {_PASSAGES[title]}')


def _random_pairs(number: int) -> list[Pair]:
    draw, words = np.random.default_rng(0), VOCABULARY[14:-2]
    texts = lambda longest: " ".join(draw.choice(words, draw.integers(1, longest)))  # noqa: E731
    return [Pair(texts(7), texts(50)) for _ in range(number)]


def _ranking(truth: Truth, query: str, titles: list[str]) -> list[str]:
    return sorted(titles, key=lambda title: -truth[query, title])


def _titles(hits: list[Any]) -> list[str]:
    documents = [hit.get("document", hit) for hit in hits]
    return [document["contents"].split("\n")[0].strip('"') for document in documents]


# --- the model


def test_scores_are_those_of_each_pair_alone(model_dir: Path, loaded: CrossEncoder, truth: Truth) -> None:
    scores = CrossEncoder(_options(model_dir, batch_size=4)).score([_pair(*names) for names in truth])
    assert scores.dtype == np.float64
    np.testing.assert_allclose(scores, list(truth.values()), atol=3e-5)
    assert np.std(scores) > 0.5
    assert loaded.score([]).shape == (0,)


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 3e-5), ("bfloat16", 0.1)])
def test_a_score_does_not_depend_on_its_batch(model_dir: Path, precision: str, tolerance: float) -> None:
    model, pairs = CrossEncoder(_options(model_dir, precision=precision)), _random_pairs(256)
    together = model.score(pairs)
    np.testing.assert_allclose(model.score(pairs[::-1])[::-1], together, atol=tolerance)
    alone = np.concatenate([model.score([pair]) for pair in pairs[:60]])
    np.testing.assert_allclose(alone, together[:60], atol=tolerance)
    assert model.precision == precision and 1.2 < together.std() < 1.8
    assert len(set(together.tolist())) > 250  # a classifier in bfloat16, too, would leave about 207 different scores


def test_the_passage_is_cut_and_the_query_is_whole(model_dir: Path, loaded: CrossEncoder) -> None:
    query, passage = "which river was the river of Morn?", "Tarsia rivers " * 40
    expected = logit(model_dir, ids(query), ids(passage)[: 20 - 3 - len(ids(query))])
    found = CrossEncoder(_options(model_dir, max_length=20)).score([Pair(query, passage)])
    np.testing.assert_allclose(found, [expected], atol=3e-5)
    assert loaded.max_length == POSITIONS  # the model reads no more, whatever was asked for
    expected = logit(model_dir, ids(query), ids(passage)[: POSITIONS - 3 - len(ids(query))])
    np.testing.assert_allclose(loaded.score([Pair(query, passage)]), [expected], atol=3e-5)


def test_a_query_that_leaves_no_room_is_cut_to_three_fourths(model_dir: Path) -> None:
    """23 tokens hold 20 of text: 15 are the query's, 5 the passage's. The word at the cut is in two pieces."""
    query, passage = "the " * 14 + "rivers of Morn", "Osk is the capital of Tarsia."
    assert ids(query)[14:16] == ids("rivers")
    expected = logit(model_dir, ids(query)[:15], ids(passage)[:5])
    found = CrossEncoder(_options(model_dir, max_length=23)).score([Pair(query, passage)])
    np.testing.assert_allclose(found, [expected], atol=3e-5)
    with pytest.raises(EncoderError, match="6 tokens do not hold a query and a passage"):
        CrossEncoder(_options(model_dir, max_length=6))


_SIGMOID = "torch.nn.modules.activation.Sigmoid"
_IDENTITY = "torch.nn.modules.linear.Identity"


@pytest.mark.parametrize(
    ("config", "own", "is_sigmoid"),
    [
        ({"sbert_ce_default_activation_function": _IDENTITY}, None, False),
        ({"sbert_ce_default_activation_function": _SIGMOID}, None, True),
        ({"sentence_transformers": {"version": "4.1.0", "activation_fn": _SIGMOID}}, None, True),
        ({"sentence_transformers": {"activation_fn": _SIGMOID}}, {"activation_fn": _IDENTITY}, False),
        ({}, {"activation_fn": _SIGMOID}, True),
    ],
)
def test_the_models_files_say_whether_a_score_is_a_sigmoid(
    tmp_path: Path, truth: Truth, config: dict, own: dict | None, is_sigmoid: bool
) -> None:
    folder = save_cross_encoder(tmp_path, seed=1, **config)
    if own:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(own))
    (found,) = CrossEncoder(_options(folder)).score([_pair(_QUERIES[0], "Osk")])
    expected = truth[_QUERIES[0], "Osk"]
    assert found == pytest.approx(1 / (1 + np.exp(-expected)) if is_sigmoid else expected, abs=3e-5)


def test_a_pair_has_as_many_tokens_as_there_are_positions(tmp_path: Path) -> None:
    """RoBERTa numbers them from behind the padding on; a tokenizer without model_max_length knows nothing of it."""
    config = json.loads((save_cross_encoder(tmp_path) / "config.json").read_text()) | {"pad_token_id": 3}
    RobertaForSequenceClassification(RobertaConfig(**config, num_labels=1)).save_pretrained(tmp_path)
    model = CrossEncoder(_options(tmp_path))
    assert model.max_length == POSITIONS - 3 - 1
    assert np.isfinite(model.score([Pair("Osk", "river " * 100)])).all()


def test_models_that_are_no_cross_encoders_are_refused(tmp_path: Path, model_dir: Path) -> None:
    two = save_cross_encoder(tmp_path / "two", num_labels=2)
    with pytest.raises(EncoderError, match="gives 2 scores per pair"):
        CrossEncoder(_options(two))
    with pytest.raises(EncoderError, match=r"lacks 2 weights .*would be random; pass a cross-encoder"):
        CrossEncoder(_options(save_bert(tmp_path / "encoder")))
    tanh = save_cross_encoder(tmp_path / "tanh", sbert_ce_default_activation_function="torch.nn.Tanh")
    with pytest.raises(EncoderError, match=r"the activation torch.nn.Tanh; supported are Identity, Sigmoid"):
        CrossEncoder(_options(tanh))
    (tanh / "config_sentence_transformers.json").write_text("[]")
    with pytest.raises(EncoderError, match=r"config_sentence_transformers.json: the whole file"):
        CrossEncoder(_options(tanh))
    with pytest.raises(EncoderError, match="cannot load the model .*nowhere"):
        CrossEncoder(_options(tmp_path / "nowhere"))
    wordless = save_cross_encoder(tmp_path / "wordless")
    for file in wordless.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(EncoderError, match="no vocabulary"):
        CrossEncoder(_options(wordless))


# --- /rerank


def test_each_query_is_scored_with_its_own_documents(stage: Stage, truth: Truth) -> None:
    own = [["Osk", "Lune"], [], ["Velt (singer) (born in Osk)", "Morn (city)", "Osk", "Album"]]
    documents = [[_document(title) for title in titles] for titles in own]
    result = stage.result(queries=_QUERIES, documents=documents, return_scores=True)
    assert [len(hits) for hits in result] == [2, 0, 3]  # three by default
    for query, titles, hits in zip(_QUERIES, own, result, strict=True):
        best = _ranking(truth, query, titles)[:3]
        assert _titles(hits) == best
        assert [hit["score"] for hit in hits] == pytest.approx([truth[query, title] for title in best], abs=3e-5)
        assert all(hit["document"] == _document(title) for hit, title in zip(hits, best, strict=True))
    assert sum(map(len, stage.model.batches)) == 6  # not 3 x 6: nobody is scored with a neighbour's documents
    assert stage.result(queries=_QUERIES, documents=documents) == [[hit["document"] for hit in hits] for hits in result]
    assert stage.result(queries=[], documents=[]) == []


def test_what_published_clients_send(stage: Stage, truth: Truth) -> None:
    """Documents as a search gave them, with another score; the default of three when rerank_topk is null."""
    titles, query = list(_PASSAGES), _QUERIES[1]
    wrapped = [[{"document": _document(title), "score": 0.0} for title in titles]]
    best = _ranking(truth, query, titles)
    ask = lambda **more: _titles(stage.result(queries=[query], documents=wrapped, **more)[0])  # noqa: E731
    assert ask() == ask(rerank_topk=None, topk=None) == ask(rerank_topk=0) == best[:3]
    assert ask(rerank_topk=1) == ask(topk=1) == ask(rerank_topk=1, topk=4) == best[:1]
    assert ask(rerank_topk=100) == best


def test_equal_scores_keep_the_order_given(stage: Stage) -> None:
    twins = [_document("Osk") | {"id": name} for name in ("c", "a", "b")]
    others = [_document("Lune") | {"id": name} for name in ("z", "y")]
    for documents in (twins + others, others + twins):
        (hits,) = stage.result(queries=[_QUERIES[0]], documents=[documents], rerank_topk=5)
        assert [hit["id"] for hit in hits] in (["c", "a", "b", "z", "y"], ["z", "y", "c", "a", "b"])


_GOOD = {"contents": '"T"\nx'}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"queries": ["a"]}, "documents: Field required"),
        ({"documents": []}, "queries: Field required"),
        ({"queries": ["a", "b"], "documents": [[_GOOD]]}, "2 queries and 1 lists of documents; send a list for each"),
        ({"queries": ["a"], "documents": [[_GOOD, {"text": "x"}]]}, 'documents.0.1: Value error, send {"contents"'),
        ({"queries": ["a"], "documents": [["a string"]]}, 'documents.0.0: Value error, send {"contents"'),
        ({"queries": ["a"], "documents": [[{"document": "a string"}]]}, "documents.0.0: Value error, send"),
        ({"queries": ["a"], "documents": [[{"contents": 3}]]}, "documents.0.0: Value error, send"),
        (
            {"queries": ["a"], "documents": [[_GOOD | {"weight": math.nan}]]},
            "documents.0.0: ",
        ),  # no reply can
        ({"queries": ["a"], "documents": [[{"contents": "x" * 131_073}]]}, "131073 characters; send at most 131072"),
        ({"queries": ["a"], "documents": [[_GOOD] * 1001]}, "documents.0: List should have at most 1000 items"),
        ({"queries": ["a"] * 66, "documents": [[_GOOD] * 1000] * 66}, "66000 documents; send at most 65536 at once"),
        ({"queries": ["a" * 32_769], "documents": [[]]}, "queries.0: String should have at most 32768"),
        ({"queries": ["a"], "documents": [[]], "rerank_topk": -1}, "rerank_topk: Input should be greater"),
        ({"queries": ["a"], "documents": [[]], "topk": 1001}, "topk: Input should be less than or equal to 1000"),
    ],
)
def test_bad_requests_say_what_is_wrong(stage: Stage, body: dict, message: str) -> None:
    reply = requests.post(f"{stage.url}/rerank", data=json.dumps(body), timeout=PATIENCE_S)
    assert reply.status_code == 422
    assert message in reply.json()["detail"] and len(reply.text) < 500


def test_a_pair_without_a_finite_score_fails_its_request_alone(model_dir: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model_dir, tmp_path / "broken"))
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[ids("volcano")[0]] = float("nan")
    model.save_pretrained(folder)
    gated = GatedCrossEncoder(CrossEncoder(_options(folder)))
    gated.open()

    async def both() -> list[Any]:
        reranker = Reranker(gated, RerankLimits(max_batch=2, max_wait_ms=1000 * PATIENCE_S))
        document = [[json.dumps(_document("Osk")).encode()]]
        asked = [reranker.rerank([query], document, 1) for query in ("a volcano", "a city")]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        reranker.close()
        return answers

    (failed,), answered = asyncio.run(both())
    assert len(gated.batches) == 1, "they shared a batch"
    assert isinstance(failed, SearchFailed) and "scored a passage with nan" in str(failed)
    ((hit,),) = answered
    assert hit.score == pytest.approx(score(model_dir, "a city", "Osk", _PASSAGES["Osk"]), abs=3e-5)


# --- batches, queue, cache


def _ask(stage: Stage, query: str, *titles: str, **more: Any) -> requests.Response:
    return stage.post(queries=[query], documents=[[_document(title) for title in titles]], return_scores=True, **more)


def test_pairs_of_waiting_requests_share_a_batch_and_equal_ones_are_scored_once(
    gated: Callable[..., Stage], truth: Truth
) -> None:
    stage = gated()
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(_ask, stage, _QUERIES[0], "Album")
        wait_until(lambda: len(stage.model.batches) == 1)
        waiting = [pool.submit(_ask, stage, query, "Osk", "Lune") for query in _QUERIES]
        wait_until(lambda: stage.value("rerank_queue_pairs") == 6)
        twin = pool.submit(_ask, stage, _QUERIES[0], "Osk", "Morn (city)")
        wait_until(lambda: stage.value("rerank_queue_pairs") == 7)
        stage.model.open()
        replies = [future.result() for future in [first, *waiting, twin]]
    assert [len(batch) for batch in stage.model.batches] == [1, 7]
    for reply, query in zip(replies[1:], [*_QUERIES, _QUERIES[0]], strict=True):
        (hits,) = reply.json()["result"]
        expected = [truth[query, title] for title in _titles(hits)]
        assert [hit["score"] for hit in hits] == pytest.approx(expected, abs=3e-5)
    assert stage.value("rerank_shared_pairs_total") == 1
    assert stage.value("rerank_batch_pairs_sum") == 8 and stage.value("rerank_batch_seconds_count") == 2


def test_a_repeated_pair_is_not_scored_again(stage: Stage) -> None:
    before = _ask(stage, _QUERIES[0], "Osk", "Lune").json()
    assert _ask(stage, _QUERIES[0], "Osk", "Lune").json() == before
    _ask(stage, _QUERIES[0], "Osk", "Album")
    assert [len(batch) for batch in stage.model.batches] == [2, 1]
    assert stage.value("rerank_cache_hits_total") == 3 and stage.value("rerank_cache_misses_total") == 3
    assert stage.value("rerank_cache_bytes") == 3 * 300


def test_without_a_cache_every_pair_is_scored(gated: Callable[..., Stage]) -> None:
    stage = gated(cache_mib=0)
    stage.model.open()
    assert _ask(stage, _QUERIES[0], "Osk").json() == _ask(stage, _QUERIES[0], "Osk").json()
    assert [len(batch) for batch in stage.model.batches] == [1, 1]


def test_a_full_queue_is_503_and_who_leaves_makes_room(gated: Callable[..., Stage]) -> None:
    stage = gated(max_queue=3)
    with ThreadPoolExecutor(4) as pool:
        busy = pool.submit(_ask, stage, _QUERIES[0], "Album")
        wait_until(lambda: len(stage.model.batches) == 1)
        leaving = HTTPConnection(stage.url.removeprefix("http://"), timeout=PATIENCE_S)
        asked = {"queries": [_QUERIES[1]], "documents": [[_document("Osk"), _document("Lune")]]}
        leaving.request("POST", "/rerank", json.dumps(asked))
        wait_until(lambda: stage.value("rerank_queue_pairs") == 2)
        refused = _ask(stage, _QUERIES[2], "Osk", "Lune")
        assert refused.status_code == 503 and int(refused.headers["Retry-After"]) >= 1
        assert "2 pairs are queued and the limit is 3" in refused.json()["detail"]
        leaving.close()
        wait_until(lambda: stage.value("rerank_queue_pairs") == 0)
        assert _ask(stage, _QUERIES[1], "Osk", "Lune", headers={"X-Deadline-Ms": "50"}).status_code == 504
        assert stage.value("rerank_queue_pairs") == 0
        staying = pool.submit(_ask, stage, _QUERIES[2], "Osk", "Lune")
        wait_until(lambda: stage.value("rerank_queue_pairs") == 2)
        stage.model.open()
        assert busy.result().status_code == staying.result().status_code == 200
    assert [{pair.query for pair in batch} for batch in stage.model.batches] == [{_QUERIES[0]}, {_QUERIES[2]}]


# --- a search before the reranker


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return Corpus(write_rows(tmp_path / "corpus.jsonl", *_CORPUS))


@pytest.fixture
def search_url(run_app, corpus: Corpus, loaded: CrossEncoder) -> Iterator[str]:
    """BM25, four candidates and two passages by default."""
    metrics = Metrics()
    service = RetrievalService(Bm25Retriever.build(corpus), corpus, metrics=metrics)
    reranker = Reranker(loaded, metrics=metrics)
    source, options = RerankedSource(service, reranker, 4), AppOptions(topk=2)
    yield run_app(create_app_of(source, reranked_router(source, reranker, options), options, metrics))
    asyncio.run(source.close())


_QUERY = "the city of Morn in the country of Tarsia, capital rivers"  # finds four of the five


def _candidates(corpus: Corpus, number: int) -> list[str]:
    (hits,) = Bm25Retriever.build(corpus).search([_QUERY], number)
    return _titles([corpus[hit.row] for hit in hits])


@pytest.mark.parametrize(
    ("body", "num_candidates", "topk"),
    [
        ({}, 4, 2),
        ({"topk": 1}, 4, 1),
        ({"topk": None, "topk_rerank": None, "topk_retrieval": None, "rerank": None}, 4, 2),
        ({"topk_rerank": 1, "topk": 3}, 4, 1),
        ({"topk_retrieval": 2}, 2, 2),
        ({"topk_retrieval": 3, "topk_rerank": 2}, 3, 2),
        ({"topk_retrieval": 1, "topk": 3}, 3, 3),  # never fewer candidates than passages asked for
        ({"rerank": {"candidates": 2}, "topk": 1, "topk_retrieval": 4}, 2, 1),
    ],
)
def test_candidates_are_found_and_the_best_of_them_returned(
    search_url: str, corpus: Corpus, model_dir: Path, body: dict, num_candidates: int, topk: int
) -> None:
    found = _candidates(corpus, num_candidates)
    scores = {title: score(model_dir, _QUERY, title, _PASSAGES[title]) for title in found}
    best = sorted(found, key=lambda title: -scores[title])[:topk]
    assert len(found) == num_candidates and best != found[:topk]
    reply = requests.post(f"{search_url}/retrieve", json={"queries": [_QUERY, ""], "return_scores": True} | body)
    hits, nothing = reply.json()["result"]
    assert nothing == [] and _titles(hits) == best
    assert [hit["document"] for hit in hits] == [_document(title) for title in best]
    assert [hit["score"] for hit in hits] == pytest.approx([scores[title] for title in best], abs=3e-5)


def test_the_other_search_routes_are_reranked_too(search_url: str) -> None:
    hits = requests.post(f"{search_url}/retrieve", json={"queries": [_QUERY], "topk": 4}).json()["result"][0]
    body = {"query": _QUERY, "top_n": 4}
    assert requests.post(f"{search_url}/search", json=body).json() == hits
    many = requests.post(f"{search_url}/batch_search", json=body | {"query": [_QUERY]}).json()
    assert many == [hits]
    again = requests.post(f"{search_url}/rerank", json={"queries": [_QUERY], "documents": [hits[::-1]], "topk": 4})
    assert again.json()["result"] == [hits]
    counted = requests.get(f"{search_url}/metrics").text.splitlines()
    assert "retrieval_cache_misses_total 1.0" in counted
    assert "rerank_batch_pairs_sum 4.0" in counted and "rerank_cache_misses_total 4.0" in counted


def test_the_model_is_not_chosen_by_a_request(search_url: str) -> None:
    body = {"queries": ["a"], "rerank": {"model": "another", "candidates": 3}}
    reply = requests.post(f"{search_url}/retrieve", json=body)
    assert reply.status_code == 422 and "rerank.model: Value error, the model is chosen" in reply.json()["detail"]
    for bad in ({"topk_retrieval": 101}, {"topk_rerank": -1}, {"rerank": {"candidates": "ten"}}):
        assert requests.post(f"{search_url}/retrieve", json={"queries": ["a"]} | bad).status_code == 422


def test_the_schemas_of_the_requests_are_published(search_url: str) -> None:
    api = requests.get(f"{search_url}/openapi.json", timeout=PATIENCE_S).json()
    read = lambda route: api["paths"][route]["post"]["requestBody"]["content"]["application/json"]["schema"]  # noqa: E731
    fields = set(read("/retrieve")["properties"])
    assert fields == {"queries", "query", "topk", "return_scores", "topk_retrieval", "topk_rerank", "rerank"}
    assert set(read("/retrieve")["properties"]["rerank"]["properties"]) == {"candidates", "model"}
    assert set(read("/rerank")["properties"]) == {"queries", "documents", "rerank_topk", "topk", "return_scores"}
    assert "$ref" not in json.dumps([read("/retrieve"), read("/rerank")])


# --- the programs


def test_the_two_programs(serve, tmp_path: Path, corpus: Corpus, model_dir: Path) -> None:
    common = ("--reranker_precision", "float32", "--max_wait_ms", "0")
    rerank_url = serve(
        *("--rerank_model_name_or_path", str(model_dir), "--rerank_topk", "2", "--max_length", "64"),
        *("--batch_size", "8", "--reranker_type", "sentence_transformer", *common),
        module="rerank_server",
    )
    search_url = serve(
        *("--corpus_path", str(corpus.path), "--retriever_name", "bm25", "--retrieval_topk", "4"),
        *("--reranking_topk", "2", "--reranker_model", str(model_dir), "--reranker_batch_size", "8", *common),
        module="retrieval_rerank_server",
    )
    health = requests.get(f"{rerank_url}/healthz").json()
    assert len(health.pop("index_version")) == 16
    assert health == {"status": "ok", "retriever": str(model_dir), "corpus_size": None, "topk": 2}
    assert requests.get(f"{search_url}/healthz").json()["retriever"] == f"bm25, reranked by {model_dir}"

    found = _candidates(corpus, 4)
    scores = {title: score(model_dir, _QUERY, title, _PASSAGES[title]) for title in found}
    best = sorted(found, key=lambda title: -scores[title])[:2]
    body = {"queries": [_QUERY], "documents": [[_document(title) for title in found]], "return_scores": True}
    (hits,) = requests.post(f"{rerank_url}/rerank", json=body).json()["result"]
    assert _titles(hits) == best
    assert requests.post(f"{rerank_url}/retrieve", json={"queries": ["a"]}).status_code == 404
    passages = search(f"{search_url}/retrieve", _QUERY, topk=2)
    assert _titles(passages) == best
    page = requests.post(f"{search_url}/page", json={"id": passages[0]["id"]}).json()["page"]
    assert page["title"] == best[0]
    assert [passage["score"] for passage in passages] == pytest.approx([scores[title] for title in best], abs=3e-5)


def test_the_published_arguments_and_their_defaults() -> None:
    model = "cross-encoder/ms-marco-MiniLM-L12-v2"
    alone = {"max_length": 512, "rerank_topk": 3, "rerank_model_name_or_path": model, "batch_size": 32}
    alone |= {"reranker_type": "sentence_transformer", "port": 6980}
    assert alone.items() <= vars(rerank_server.parse_arguments([])).items()
    behind = {"retrieval_topk": 10, "retriever_name": "e5", "reranking_topk": 3, "reranker_model": model}
    behind |= {"reranker_batch_size": 32, "faiss_gpu": True, "port": 8000}
    parsed = retrieval_rerank_server.parse_arguments(["--corpus_path", "c.jsonl", "--faiss_gpu"])
    assert behind.items() <= vars(parsed).items()
    with pytest.raises(SystemExit):
        rerank_server.parse_arguments(["--reranker_type", "colbert"])


def test_a_program_that_cannot_start_says_why(
    capfd: pytest.CaptureFixture[str], corpus: Corpus, model_dir: Path
) -> None:
    behind = ["--port", "0", "--corpus_path", str(corpus.path), "--retriever_name", "bm25"]
    behind += ["--reranker_model", str(model_dir)]
    alone = ["--port", "0", "--rerank_model_name_or_path", str(model_dir)]
    for main, arguments, message in [
        (rerank_server.main, ["--port", "0", "--rerank_model_name_or_path", "/gone"], "cannot load the model /gone"),
        (rerank_server.main, [*alone, "--rerank_topk", "0"], "--rerank_topk is 0"),
        (rerank_server.main, [*alone, "--num_threads", "0"], "--num_threads is 0"),
        (rerank_server.main, [*alone, "--batch_size", "0"], "batch_size is 0"),
        (rerank_server.main, [*alone, "--reranker_cache_size", "-1"], "--reranker_cache_size is -1"),
        (rerank_server.main, [*alone, "--max_wait_ms", "inf"], "--max_wait_ms is inf"),
        (rerank_server.main, [*alone, "--timeout_s", "0"], "--timeout_s is 0"),
        (retrieval_rerank_server.main, [*behind, "--retrieval_topk", "2"], "it must be at least --reranking_topk, 3"),
        (retrieval_rerank_server.main, [*behind, "--retrieval_topk", "101"], "--retrieval_topk is 101"),
        (retrieval_rerank_server.main, [*behind, "--max_batch", "0"], "--max_batch is 0"),
    ]:
        assert main(arguments) == 2
        errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and message in errors[0]
