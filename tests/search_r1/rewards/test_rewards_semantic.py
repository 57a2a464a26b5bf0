"""Semantic similarity with a real, small encoder, against cosines computed with transformers alone."""

from __future__ import annotations

import asyncio
import functools
import shutil
from pathlib import Path

import pytest
import torch
from search_encoders import ids as word_ids
from search_encoders import save_bert
from transformers import BertModel

from search_r1.rewards import semantic
from search_r1.rewards.component import ComponentReward, make_component
from search_r1.rewards.reading import Reading
from search_r1.rewards.semantic import Semantic
from search_r1.search.dense.encoding.encoder import Encoder
from verl.errors import ConfigError


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    """An untrained BERT of width 32 without sentence-transformers files: mean pooling."""
    return save_bert(tmp_path_factory.mktemp("encoder"))


def vector(folder: Path, words: str) -> torch.Tensor:
    """Mean of the last hidden states, ids looked up by hand."""
    ids = [2, *word_ids(words), 3]
    with torch.no_grad():
        return bert(folder)(torch.tensor([ids])).last_hidden_state[0].mean(0).double()


@functools.lru_cache
def bert(folder: Path) -> BertModel:
    return BertModel.from_pretrained(folder)


def cosine(folder: Path, one: str, other: str) -> float:
    return torch.cosine_similarity(vector(folder, one), vector(folder, other), dim=0).item()


def measure(found: Semantic, *cases: tuple[str | None, list[str]]) -> list[float]:
    return asyncio.run(found.measure([Reading((), answer, tuple(golds), "q") for answer, golds in cases]))


def test_cosines_are_those_of_transformers(model_dir):
    cases = [
        ("river morn", ["city"]),
        ("anna velt", ["singer", "anna velt paints", "volcano"]),
        ("capital", ["country tarsia capital"]),
        ("volcano volcano city", ["lune"]),
    ]
    expected = [max(cosine(model_dir, answer, gold) for gold in golds) for answer, golds in cases]
    assert min(expected) > 0.0 and max(expected) - min(expected) > 0.05  # or the cases could not tell anything
    assert measure(Semantic(str(model_dir)), *cases) == pytest.approx(expected, abs=1e-5)


def test_what_has_no_cosine_and_what_is_the_same(model_dir):
    cases = [("lune", ["city", " lune "]), (None, ["city"]), (" \n", ["city"]), ("x", [" "])]
    found = measure(Semantic(str(model_dir)), *cases)
    assert found == [pytest.approx(1.0, abs=1e-9), 0.0, 0.0, 0.0]
    assert max(found) <= 1.0


def test_a_negative_cosine_is_worth_nothing(model_dir, tmp_path):
    """The embeddings of two words are made opposite, in a model that adds nothing to them."""
    folder = Path(shutil.copytree(model_dir, tmp_path / "m"))
    model = BertModel.from_pretrained(folder)
    with torch.no_grad():
        for layer in model.encoder.layer:
            for linear in (layer.attention.output.dense, layer.output.dense):
                linear.weight.zero_()
                linear.bias.zero_()
        words = model.embeddings.word_embeddings.weight
        model.embeddings.position_embeddings.weight.zero_()
        model.embeddings.token_type_embeddings.weight.zero_()
        words[2:4] = 1.0  # [CLS] and [SEP]: the layer norm makes 0 of a constant
        (city,), (lune,) = word_ids("city"), word_ids("lune")
        words[city] = -words[lune]
    model.save_pretrained(folder)
    assert cosine(folder, "city", "lune") == pytest.approx(-1.0, abs=1e-5)
    assert measure(Semantic(str(folder)), ("city", ["lune"]), ("city", ["lune", "city"])) == [0.0, pytest.approx(1.0)]
    assert measure(Semantic(str(folder)), ("[CLS]", ["city"])) == [0.0]  # a vector of length 0 has no direction


def test_both_texts_have_the_prefix_of_a_query(model_dir):
    (plain,) = measure(Semantic(str(model_dir)), ("river", ["city"]))
    (prefixed,) = measure(Semantic(str(model_dir), family="e5"), ("river", ["city"]))
    assert prefixed == pytest.approx(cosine(model_dir, "query : river", "query : city"), abs=1e-5)
    assert abs(prefixed - plain) > 1e-3


def test_vectors_that_are_not_normalised_have_a_cosine_too(model_dir):
    (found,) = measure(Semantic(str(model_dir), family="contriever"), ("river", ["city"]))
    assert found == pytest.approx(cosine(model_dir, "river", "city"), abs=1e-5)


def test_a_model_is_loaded_once_and_a_text_encoded_once(model_dir, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", "search_r1.search.dense.encoding.encoder")
    folder = Path(shutil.copytree(model_dir, tmp_path / "m"))
    encoded: list[str] = []
    real = Encoder.encode_queries
    monkeypatch.setattr(Encoder, "encode_queries", lambda self, texts: encoded.extend(texts) or real(self, texts))
    first, second = Semantic(str(folder)), Semantic(str(folder))
    assert not caplog.messages and (str(folder), "minilm", "cpu") not in semantic._encoders
    measure(first, ("river", ["city", "lune"]), ("city", ["city", "lune"]), ("river ", ["lune"]), (None, ["morn"]))
    assert sorted(encoded) == ["city", "lune", "river"]
    measure(second, ("river", ["morn"]))
    assert len([line for line in caplog.messages if str(folder) in line]) == 1
    measure(Semantic(str(folder)), (None, ["city"]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "/nowhere/at/all"}, "cannot find the encoder /nowhere/at/all"),
        ({"model": "no-one/has-this"}, "no config.json of no-one/has-this"),
        ({"family": "mine"}, "'mine' is not a known encoder family"),
        ({"device": "abacus"}, "abacus"),
        ({"device": None}, "device"),
        ({"batch": 3}, "batch"),
    ],
)
def test_options_that_cannot_be_used(model_dir, options, message):
    with pytest.raises(ConfigError, match=message):
        make_component("semantic", {"model": str(model_dir)} | options)


def test_a_model_is_required():
    with pytest.raises(ConfigError, match="model"):
        make_component("semantic")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(model_dir):
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        Semantic(str(model_dir), device="cuda")


class SemanticReward(ComponentReward):
    def combine(self, values):
        return values["semantic"]


def test_weights_that_are_broken_are_known_before_a_run(model_dir, tmp_path):
    folder = Path(shutil.copytree(model_dir, tmp_path / "m"))
    (folder / "model.safetensors").write_bytes(b"broken")
    reward = SemanticReward({"semantic": Semantic(str(folder))})
    with pytest.raises(ConfigError, match=r"semantic: the weights of .*/m are damaged"):
        reward.check()
    SemanticReward({"semantic": Semantic(str(model_dir))}).check()
