"""Whatever is sent, the server answers with a reply of the right shape or says what is wrong: never HTTP 500."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import status_code_conformance

from search_r1.search.server.wire import FlashRagBatchRequest, FlashRagRequest, RetrieveRequest

_MODELS: dict[str, type[RetrieveRequest | FlashRagRequest | FlashRagBatchRequest]] = {
    "retrieve": RetrieveRequest,
    "search": FlashRagRequest,
    "batch_search": FlashRagBatchRequest,
}
_FIELDS = ["queries", "query", "topk", "return_scores", "top_n", "return_score", "other"]
_REFUSALS = {400, 413, 422}

_text = st.text(max_size=20) | st.sampled_from(
    ["Morn", "capital of Tarsia", "\u6771\u4eac", "\x00", "\U0001f600", "<b>"]
)
_number = st.integers(-5, 10**20) | st.floats()
_scalar = st.none() | st.booleans() | _number | _text
_value = st.recursive(_scalar, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_text, inner, max_size=3))
_anything = st.dictionaries(st.sampled_from(_FIELDS), _value | st.lists(_text, max_size=5), max_size=7) | _value
_valid = st.fixed_dictionaries(
    {"query": _text | st.lists(_text, max_size=5)},
    optional={"topk": st.integers(0, 100), "top_n": st.integers(1, 100), "return_scores": st.booleans()},
)
_QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]  # schemathesis filters much


@pytest.fixture(scope="module")
def session() -> requests.Session:
    return requests.Session()


@pytest.mark.parametrize("route", list(_MODELS))
@given(body=_anything | _valid)
def test_any_json(small_server: str, session: requests.Session, route: str, body: Any) -> None:
    reply = session.post(f"{small_server}/{route}", data=json.dumps(body).encode(), timeout=120)
    if reply.status_code == 200:
        _check_shape(route, body, reply.json())
    else:
        assert reply.status_code in _REFUSALS and reply.json()["detail"]


@pytest.mark.parametrize("route", list(_MODELS))
@given(body=st.binary(max_size=60) | st.text(max_size=60).map(lambda text: f'{{"query": {text}}}'.encode()))
def test_any_bytes(small_server: str, session: requests.Session, route: str, body: bytes) -> None:
    reply = session.post(f"{small_server}/{route}", data=body, timeout=120)
    assert reply.status_code in _REFUSALS | {200}


@given(value=st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=12) | st.floats().map(str))
def test_any_deadline(small_server: str, session: requests.Session, value: str) -> None:
    headers = {"X-Deadline-Ms": value.strip()}
    reply = session.post(f"{small_server}/retrieve", json={"query": "Morn"}, headers=headers, timeout=120)
    assert reply.status_code in {200, 422, 504}


def _check_shape(route: str, body: dict[str, Any], reply: Any) -> None:
    request = _MODELS[route].model_validate(body)
    queries = request.texts()
    if isinstance(request, RetrieveRequest):
        answers = [[hit["document"] if request.return_scores else hit for hit in hits] for hits in reply["result"]]
    else:
        documents, *scores = reply if request.return_score else [reply]
        answers = documents if route == "batch_search" else [documents]
        assert not scores or len(scores[0]) == len(documents)
    assert len(answers) == len(queries)
    assert all(document["id"] and document["contents"] for documents in answers for document in documents)


def test_the_server_keeps_to_its_own_interface_document(small_server: str) -> None:
    """schemathesis makes requests from /openapi.json, valid ones and others."""
    document = schemathesis.openapi.from_url(f"{small_server}/openapi.json")
    operations = [found.ok() for found in document.get_all_operations()]
    assert {"/retrieve", "/search", "/batch_search", "/healthz"} <= {operation.path for operation in operations}
    for operation in operations:
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):

            @settings(suppress_health_check=_QUIET, max_examples=settings.default.max_examples // 2)
            @given(case=operation.as_strategy(generation_mode=mode))
            def exchange(case: schemathesis.Case) -> None:
                case.call_and_validate(checks=[not_a_server_error, status_code_conformance])

            with suppress(Unsatisfiable):  # a route without parameters has no wrong ones
                exchange()
