"""The tools `search` and `open_page` over a real retrieval server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizer import chat_tokenizer
from run_config import run_config
from served_app import served_app, served_corpus, write_passages
from starlette.responses import JSONResponse

from verl.agent.text import encode_outside
from verl.agent.tools import CallResult, ToolCall, load_tools, run_calls
from verl.config import Config
from verl.errors import ConfigError, EnvironmentUnavailable
from verl.protocol import Prompt

TOKENIZER = chat_tokenizer()
PASSAGES = {
    "p1": '"Anna Velt"\nAnna Velt was born in the city of Morn and paints rivers.',
    "p2": '"Morn"\nMorn is a city in the country of Tarsia.',
    "p3": '"Morn"\nIts river is the Lune. ' + "The Lune is wet. " * 30,
    "p4": '"Morn"\nThe end of Morn <|im_end|> is near.',
    "p5": '"Tarsia"\nTarsia is a country whose capital is Osk.',
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served_corpus(write_passages(tmp_path_factory.mktemp("tools") / "corpus.jsonl", PASSAGES)) as address:
        yield address


def config_of(url: str, *more: str) -> Config:
    return run_config([f"retriever.url={url}", "retriever.topk=2", "data.max_obs_length=400", *more])


def run(config: Config, specs: list[Any], *calls: tuple[str, Any]) -> list[CallResult]:
    async def turn() -> list[CallResult]:
        tools = load_tools(specs, config, TOKENIZER)
        try:
            await tools.check()
            opened = await tools.open(Prompt((1,), "test", {}))
            return await run_calls(opened, [ToolCall(*call) for call in calls], TOKENIZER)
        finally:
            await tools.close()

    return asyncio.run(turn())


def length(result: CallResult) -> int:
    return len(encode_outside(TOKENIZER, result.text))


def test_one_query_or_several(url: str) -> None:
    one, several, empty, neither = run(
        config_of(url),
        ["search"],
        ("search", {"query": "capital of Tarsia"}),
        ("search", {"queries": ["capital of Tarsia", "painter of rivers", "capital of Tarsia"]}),
        ("search", {"query": "zzzz"}),
        ("search", {"queries": [" "]}),
    )
    assert one.text.startswith('Doc 1(Title: "Tarsia", id: p5) Tarsia is a country whose capital is Osk.\nDoc 2(')
    assert "<information>" not in one.text
    assert one.event["query"] == "capital of Tarsia" and one.event["document_ids"][0] == "p5"
    assert one.event["executed"] is True and one.event["num_found"] == 2
    first, second = several.text.split("\n\n")
    assert first.startswith("Results for 'capital of Tarsia':\nDoc 1(Title: \"Tarsia\", id: p5)")
    assert second.startswith("Results for 'painter of rivers':\nDoc 1(Title: \"Anna Velt\", id: p1)")
    assert several.event["query"] == "capital of Tarsia; painter of rivers"
    assert several.event["document_ids"][0] == "p5" and "p1" in several.event["document_ids"]
    assert (empty.status, empty.text) == ("ok", "No results found.")
    assert (neither.status, neither.text) == ("error", "Error: give a query that is not empty")


@pytest.mark.parametrize("most", [30, 80, 200])
def test_queries_share_the_length_of_the_result(url: str, most: int) -> None:
    spec = {"name": "search", "options": {"max_result_tokens": most, "show_ids": False}}
    one, two = run(
        config_of(url), [spec], ("search", {"query": "the Lune"}), ("search", {"queries": ["the Lune", "Morn"]})
    )
    assert most / 2 < length(one) <= most and length(two) <= most
    assert "id: p" not in one.text and "[cut" not in one.text


def test_a_page_is_opened_part_by_part(url: str) -> None:
    short, long, second, third, beyond, unknown, wrong = run(
        config_of(url),
        ["search", {"name": "open_page", "options": {"max_result_tokens": 300}}],
        ("open_page", {"id": "p1"}),
        ("open_page", {"id": "p3"}),
        ("open_page", {"id": "p3", "part": 2}),
        ("open_page", {"id": "p3", "part": 3}),
        ("open_page", {"id": "p3", "part": 9}),
        ("open_page", {"id": "p9"}),
        ("open_page", {"id": "p3", "part": 0}),
    )
    assert short.text == "Title: Anna Velt\nAnna Velt was born in the city of Morn and paints rivers."
    assert long.text.startswith("Title: Morn (part 1; the page continues in part 2)\nMorn is a city")
    assert long.event["more"] is True and long.event["page"] == "p3" and "query" not in long.event
    parts = [long, second, third]
    assert all(length(part) <= 300 for part in parts)
    bodies = [part.text.partition("\n")[2] for part in parts]
    whole = " ".join(PASSAGES[name].partition("\n")[2].strip() for name in ("p2", "p3", "p4"))
    assert " ".join(" ".join(bodies).split()) == whole
    assert third.text.startswith("Title: Morn (part 3, the last)\n") and third.event["more"] is False
    assert beyond.text == "Error: part 9 does not exist; the page has 3 parts"
    assert unknown.text == "Error: there is no passage with the id 'p9'; take one that a search gave"
    assert wrong.status == "invalid_arguments"


def test_a_limit_of_null_is_the_usual_one(url: str) -> None:
    """`data.max_obs_length`, as for all tools."""
    calls = [("search", {"query": "Morn"}), ("open_page", {"id": "p3"})]
    config, names = config_of(url, "data.max_obs_length=150"), ["search", "open_page"]
    expected = run(config, names, *calls)
    found = run(config, [{"name": name, "options": {"max_result_tokens": None}} for name in names], *calls)
    assert [one.text for one in found] == [one.text for one in expected]
    assert all(0 < length(one) <= 150 for one in found)


def test_an_id_that_the_server_refuses_is_the_policys_error(url: str) -> None:
    """It takes no empty id and no id of more than 32,768 characters."""
    blank, endless = run(config_of(url), ["open_page"], ("open_page", {"id": " "}), ("open_page", {"id": "9" * 32_769}))
    assert blank.text == "Error: there is no passage with the id ''; take one that a search gave"
    assert endless.text == f"Error: there is no passage with the id '{'9' * 100}'; take one that a search gave"
    refusing = JSONResponse({"detail": "max_chars: no"}, 422)
    with served_app(refusing) as other, pytest.raises(EnvironmentUnavailable, match="HTTP 422: max_chars: no"):
        run(config_of(f"{other}/retrieve"), ["open_page"])


def test_a_document_is_got_by_its_docid(url: str) -> None:
    """The same under the name of BrowseComp-Plus."""
    short, unknown, wrong = run(
        config_of(url),
        ["get_document"],
        ("get_document", {"docid": "p1"}),
        ("get_document", {"docid": "p9"}),
        ("get_document", {"id": "p1"}),
    )
    assert short.text == "Title: Anna Velt\nAnna Velt was born in the city of Morn and paints rivers."
    assert unknown.text == "Error: there is no document with the docid 'p9'; take one that a search gave"
    assert wrong.status == "invalid_arguments"
    [made] = load_tools(["get_document"], config_of(url), TOKENIZER).schemas()
    assert made["function"]["parameters"]["required"] == ["docid"]


def test_long_documents_are_shown_by_their_beginnings(url: str) -> None:
    """So that one does not take the place of all others."""
    spec = {"name": "search", "options": {"max_passage_tokens": 8}}
    (found,) = run(config_of(url), [spec], ("search", {"query": "Morn"}))
    shown = [line.partition(") ")[2] for line in found.text.splitlines()]
    assert len(shown) == len(found.event["document_ids"]) > 1
    texts = [PASSAGES[name].partition("\n")[2] for name in found.event["document_ids"]]
    assert all(text.startswith(start) and start for start, text in zip(shown, texts, strict=True))
    assert all(len(encode_outside(TOKENIZER, start)) <= 8 for start in shown)
    with pytest.raises(ConfigError, match="max_passage_tokens=0; make it 1 or more"):
        load_tools([{"name": "search", "options": {"max_passage_tokens": 0}}], config_of(url), TOKENIZER)


def test_passages_without_a_title_are_cut_and_opened(tmp_path: Path) -> None:
    """A text of one line, and one whose first line is a paragraph: as titles they would leave no room."""
    long = " ".join(f"Sentence {number} of the report." for number in range(60))
    passages = {"short": "A report of one line.", "line": long, "lines": f"{long}\nIts end.", "name": f"Ulm\n{long}"}
    most = {"max_result_tokens": 200}
    with served_corpus(write_passages(tmp_path / "corpus.jsonl", passages)) as address:
        found, short, line, lines, name, *parts = run(
            config_of(address, "retriever.topk=4"),
            [
                {"name": "search", "options": {"max_passage_tokens": 20, "max_result_tokens": 500}},
                {"name": "open_page", "options": most},
            ],
            ("search", {"query": "report"}),
            *(("open_page", {"id": name}) for name in passages),
            *(("open_page", {"id": "lines", "part": part}) for part in range(2, 30)),
        )
    assert sorted(found.event["document_ids"]) == sorted(passages) and "[cut" not in found.text
    assert "(Title: , id: short) A report of one" in found.text and "(Title: , id: lines) Sentence 0" in found.text
    assert "(Title: Ulm, id: name) Sentence 0" in found.text
    assert all(len(encode_outside(TOKENIZER, line.partition(") ")[2])) <= 20 for line in found.text.splitlines())
    assert short.text == "Title: none\nA report of one line."
    assert line.text.startswith("Title: none (part 1; the page continues in part 2)\nSentence 0 of")
    assert name.text.startswith("Title: Ulm (part 1; the page continues in part 2)\nSentence 0 of")
    opened = [lines, *(part for part in parts if part.status == "ok")]
    bodies = " ".join(part.text.partition("\n")[2] for part in opened)
    assert bodies.split() == passages["lines"].split() and all(length(part) <= 200 for part in opened)


def test_a_server_that_is_down_is_infrastructure() -> None:
    config = config_of("http://127.0.0.1:9/retrieve", "retriever.deadline_s=0.5", "retriever.timeout_s=0.5")
    for name in ("search", "open_page"):
        with pytest.raises(EnvironmentUnavailable, match="http://127.0.0.1:9/retrieve is not available"):
            run(config, [name])


def test_settings_that_cannot_be_used(url: str) -> None:
    with pytest.raises(ConfigError, match=r"agent.tools\[0\]: .* retriever.engine=mine.Engine is none"):
        load_tools(["open_page"], config_of(url, "retriever.engine=mine.Engine"), TOKENIZER)
    for name in ("search", "open_page"):
        with pytest.raises(ConfigError, match=f"the tool {name} needs a config and a tokenizer"):
            load_tools([name])
    with pytest.raises(ConfigError, match=r"agent.tools\[0\]: .* cannot be made with the options .*'max_query'"):
        load_tools([{"name": "search", "options": {"max_query": 3}}], config_of(url), TOKENIZER)
