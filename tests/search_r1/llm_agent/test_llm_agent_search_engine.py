"""Any object with search(query) is an engine, plain or coroutine; every failure of it is a typed one."""

from __future__ import annotations

import asyncio
import threading

import pytest

from search_r1.llm_agent.environment import SearchEnvironment
from search_r1.llm_agent.search_engine import Searcher
from verl.config import load_config
from verl.errors import ConfigError, EnvironmentUnavailable
from verl.protocol import Prompt


class Plain:
    def search(self, query):
        return [f"{query} is wet", {"title": "T", "text": "dry"}, {"id": 7, "contents": "C\nsalt"}, "left out"]


class Coroutine:
    async def search(self, query):
        return [f"{query} from a coroutine"]


@pytest.mark.parametrize(
    ("engine", "contents"),
    [(Plain(), ["\nsea is wet", "T\ndry", "C\nsalt"]), (Coroutine(), ["\nsea from a coroutine"])],
)
def test_documents_of_any_shape(engine, contents):
    found = asyncio.run(Searcher(engine, topk=3).search("sea"))
    assert [document["contents"] for document in found] == contents


def test_a_plain_engine_does_not_hold_up_the_others():
    class Meeting:
        barrier = threading.Barrier(4, timeout=30)  # passes only when four searches are inside at once

        def search(self, query):
            self.barrier.wait()
            return [query]

    async def four():
        searcher = Searcher(Meeting(), topk=1)
        return await asyncio.gather(*(searcher.search(str(number)) for number in range(4)))

    assert [documents[0]["contents"] for documents in asyncio.run(four())] == ["\n0", "\n1", "\n2", "\n3"]


class Broken:
    def __init__(self, result=None):
        self.result = result

    def search(self, query):
        if self.result is None:
            raise KeyError("down")
        return self.result


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (Broken(), "Broken: search.. raised KeyError: 'down'"),
        (Broken("one text"), "gave a str"),
        (Broken({"contents": "x"}), "gave a dict"),
        (Broken(5), "gave a int"),
        (Broken([3]), "a document is 3"),
        (Broken([{"title": "only"}]), "a document is"),
    ],
)
def test_a_failure_of_the_engine_is_one_of_the_infrastructure(engine, message):
    with pytest.raises(EnvironmentUnavailable, match=message):
        asyncio.run(Searcher(engine, topk=1).search("q"))


def test_no_engine_at_all():
    with pytest.raises(ConfigError, match="search"):
        Searcher(object(), topk=1)  # type: ignore[arg-type]


def test_an_engine_named_in_the_config(byte_tokenizer):
    config = load_config("ppo_trainer", [f"retriever.engine={__name__}.Plain", "retriever.topk=1"])
    environment = SearchEnvironment.from_config(config, byte_tokenizer)
    outcome = asyncio.run(environment.step(Prompt((1,), "t", {}), "<search> sea </search>", True))
    assert outcome.reply == "\n\n<information>Doc 1(Title: ) sea is wet</information>\n\n"


def test_the_grammar_is_that_of_the_template(byte_tokenizer):
    overrides = ["agent.template=research", f"retriever.engine={__name__}.Plain"]
    environment = SearchEnvironment.from_config(load_config("ppo_trainer", overrides), byte_tokenizer)
    prompt = Prompt((1,), "t", {})
    observation = asyncio.run(environment.step(prompt, "<search> sea </search>", True)).reply
    assert observation.startswith("\n\n<result>") and observation.endswith("</result>\n\n")
    answer = asyncio.run(environment.step(prompt, r"<answer> It is \boxed{a {b}} </answer>", True))
    assert answer.done and answer.event["answer"] == "a {b}"
    without = SearchEnvironment.from_config(load_config("ppo_trainer", ["agent.template=r1"]), byte_tokenizer)
    assert without.stop_strings == ("</answer>",)
