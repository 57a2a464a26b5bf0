"""Any object with search(query) is an engine, plain or coroutine; every failure of it is a typed one."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error

import numpy as np
import pytest
from run_config import run_config
from served_app import served_corpus

from search_r1.errors import QueryRefused
from search_r1.llm_agent.environment import SearchEnvironment
from search_r1.llm_agent.search_engine import Searcher
from search_r1.search.server.wire import MAX_QUERY_CHARS
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


@pytest.mark.parametrize(
    ("title", "shown"),
    [(None, ""), (float("nan"), ""), (1984, "1984"), (0, "0"), (np.int64(7), "7"), (np.float64(7), "7")],
)
def test_a_title_of_an_engine_is_a_text_or_digits(title, shown):
    found = asyncio.run(Searcher(Titled(title), topk=1).search("sea"))
    assert [document["contents"] for document in found] == [f"{shown}\ndry"]


class Titled:
    def __init__(self, title):
        self.title = title

    def search(self, query):
        return [{"title": self.title, "text": "dry"}]


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
        (Broken("one text"), "Broken: search.. gave a str .'one text'., not a list of documents"),
        (Broken({"contents": "x"}), "gave a dict"),
        (Broken(5), "gave a int"),
        (Broken([3]), "a document is 3"),
        (Broken([{"title": "only"}]), "a document is"),
    ],
)
def test_a_failure_of_the_engine_is_one_of_the_infrastructure(engine, message):
    with pytest.raises(EnvironmentUnavailable, match=message):
        asyncio.run(Searcher(engine, topk=1).search("q"))


class HttpFailure(Exception):
    """Carries a status as aiohttp's exceptions do, or as those of httpx and requests."""

    def __init__(self, status, name):
        super().__init__(f"HTTP {status}")
        if name == "response":
            self.response = type("Response", (), {"status_code": status})()
        else:
            setattr(self, name, status)


class Picky:
    """Refuses what `refuses`, with `error`."""

    def __init__(self, error, refuses=lambda query: len(query) > 400):
        self.error, self.refuses = error, refuses

    async def search(self, query):
        if self.refuses(query):
            raise self.error
        return [f"about {query}"]


REFUSALS = [
    QueryRefused("too long"),
    urllib.error.HTTPError("http://engine", 414, "URI Too Long", {}, None),
    *(HttpFailure(status, "status") for status in (400, 413, 414, 422, 431, 451)),
    *(HttpFailure(400, name) for name in ("status_code", "code", "response")),
]


@pytest.mark.parametrize("error", REFUSALS, ids=repr)
def test_a_query_that_the_engine_refuses_finds_nothing_and_is_the_policys(error, caplog):
    """Not a failure of the infrastructure: its trajectory would be masked and drawn again."""
    searcher = Searcher(Picky(error), topk=1)

    async def both():
        return await searcher.search("x" * 420), await searcher.search("sea")

    assert asyncio.run(both()) == ([], [{"contents": "\nabout sea"}])
    assert "a query of 420 characters was refused" in caplog.text


@pytest.mark.parametrize(
    "engine",
    [
        *(Picky(HttpFailure(status, "status")) for status in (401, 402, 403, 404, 424, 429, 500, 503)),
        *(Picky(HttpFailure(status, "status"), refuses=lambda query: True) for status in (400, 422)),
        Picky(ValueError("no status")),
    ],
    ids=lambda engine: repr(engine.error),
)
def test_what_is_no_refusal_of_one_query_is_a_failure(engine):
    with pytest.raises(EnvironmentUnavailable, match="search.. raised"):
        asyncio.run(Searcher(engine, topk=1).search("x" * 420))


def test_a_query_longer_than_our_own_server_takes_finds_nothing(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"id": "0", "contents": '"Sea"\nThe sea is wet.'}) + "\n")

    async def all_at_once(url):
        searcher = Searcher.from_config(run_config([f"retriever.url={url}"]).retriever)
        queries = ["x" * (MAX_QUERY_CHARS + 1), "y " * MAX_QUERY_CHARS, "sea"]
        try:
            return await asyncio.gather(*map(searcher.search, queries))
        finally:
            await searcher.close()

    with served_corpus(corpus) as url:
        long, longer, found = asyncio.run(all_at_once(url))
    assert long == longer == [] and len(found) == 1


@pytest.mark.parametrize("is_coroutine", [False, True])
def test_a_search_that_hangs_fails_in_time_and_holds_up_nothing(is_coroutine):
    """Neither the others, nor the end of the process: a thread that hangs is a daemon."""
    never = threading.Event()

    class Hanging:
        def search(self, query):
            if query == "bad":
                never.wait()
            assert threading.current_thread().daemon
            return [query]

    class HangingCoroutine:
        async def search(self, query):
            if query == "bad":
                await asyncio.Event().wait()
            return [query]

    async def both():
        searcher = Searcher(HangingCoroutine() if is_coroutine else Hanging(), topk=1, deadline_s=0.3)
        bad = asyncio.create_task(searcher.search("bad"))
        good = await searcher.search("good")
        with pytest.raises(EnvironmentUnavailable, match=r"Hanging.*no answer in 0.3 s .retriever.deadline_s"):
            await asyncio.wait_for(bad, 60)
        return good

    assert asyncio.run(both()) == [{"contents": "\ngood"}]
    never.set()


@pytest.mark.parametrize("number", [1, 24])
def test_as_many_plain_searches_at_once_as_is_set(number):
    """The event loop's own threads are six on two cores."""

    class Meeting:
        inside, most, lock = 0, 0, threading.Lock()
        barrier = threading.Barrier(number, timeout=30)

        def search(self, query):
            with self.lock:
                self.inside += 1
                self.most = max(self.most, self.inside)
            self.barrier.wait()
            with self.lock:
                self.inside -= 1
            return [query]

    engine = Meeting()

    async def all_of_them():
        searcher = Searcher(engine, topk=1, max_concurrent=number)
        return await asyncio.gather(*(searcher.search(str(name)) for name in range(2 * number)))

    assert len(asyncio.run(all_of_them())) == 2 * number and engine.most == number


class WithArguments:
    def __init__(self, prefix, repeat=1):
        self.prefix, self.repeat = prefix, repeat

    async def search(self, query):
        return [f"{self.prefix} {query}"] * self.repeat


def plain_function(query, prefix="plain"):
    return [f"{prefix} {query}"]


async def coroutine_function(query, prefix="coroutine"):
    return [f"{prefix} {query}"]


@pytest.mark.parametrize(
    ("name", "more", "texts"),
    [
        ("WithArguments", ["retriever.engine_kwargs.prefix=my", "retriever.engine_kwargs.repeat=2"], ["my sea"] * 2),
        ("plain_function", [], ["plain sea"]),
        ("plain_function", ["retriever.engine_kwargs.prefix=my"], ["my sea"]),
        ("coroutine_function", ["retriever.engine_kwargs.prefix=my"], ["my sea"]),
    ],
)
def test_an_engine_has_its_arguments_from_the_config(name, more, texts):
    overrides = [f"retriever.engine={__name__}.{name}", *(f"+{key}" for key in more)]
    searcher = Searcher.from_config(run_config(overrides).retriever)
    found = asyncio.run(searcher.search("sea"))
    assert [document["contents"] for document in found] == [f"\n{text}" for text in texts]


def test_the_deadline_of_the_config_is_that_of_the_engine():
    name = f"{__name__}.sleeping"
    overrides = [f"retriever.engine={name}", "retriever.timeout_s=0.2", "retriever.deadline_s=0.2"]
    searcher = Searcher.from_config(run_config(overrides).retriever)
    with pytest.raises(EnvironmentUnavailable, match="search engine sleeping: .*no answer in 0.2 s"):
        asyncio.run(searcher.search("sea"))


async def sleeping(query):
    await asyncio.sleep(3600)


@pytest.mark.parametrize("arguments", [[], ["+retriever.engine_kwargs.nonsense=1"]])
def test_arguments_that_do_not_fit_are_named(arguments):
    overrides = [f"retriever.engine={__name__}.WithArguments", *arguments]
    with pytest.raises(ConfigError, match="WithArguments cannot be made with retriever.engine_kwargs.*argument"):
        Searcher.from_config(run_config(overrides).retriever)


def test_arguments_that_do_not_fit_are_named_without_their_secrets():
    overrides = [f"retriever.engine={__name__}.Plain", "retriever.engine_kwargs={api_key: abc, size: 3}"]
    with pytest.raises(ConfigError, match=r"engine_kwargs=\{'api_key': '\*\*\*', 'size': 3\}"):
        Searcher.from_config(run_config(overrides).retriever)


def test_no_engine_at_all():
    with pytest.raises(ConfigError, match="search"):
        Searcher(object(), topk=1)  # type: ignore[arg-type]


def test_an_engine_named_in_the_config(byte_tokenizer):
    config = run_config([f"retriever.engine={__name__}.Plain", "retriever.topk=1"])
    environment = SearchEnvironment.from_config(config, byte_tokenizer)
    outcome = asyncio.run(environment.step(Prompt((1,), "t", {}), "<search> sea </search>", True))
    assert outcome.reply == "\n\n<information>Doc 1(Title: ) sea is wet</information>\n\n"


def test_the_grammar_is_that_of_the_template(byte_tokenizer):
    overrides = ["agent.template=research", f"retriever.engine={__name__}.Plain"]
    environment = SearchEnvironment.from_config(run_config(overrides), byte_tokenizer)
    prompt = Prompt((1,), "t", {})
    observation = asyncio.run(environment.step(prompt, "<search> sea </search>", True)).reply
    assert observation.startswith("\n\n<result>") and observation.endswith("</result>\n\n")
    answer = asyncio.run(environment.step(prompt, r"<answer> It is \boxed{a {b}} </answer>", True))
    assert answer.done and answer.event["answer"] == "a {b}"
    without = SearchEnvironment.from_config(run_config(["agent.template=r1"]), byte_tokenizer)
    assert without.stop_strings == ("</answer>",)
