"""Rollouts of chat models that call tools, in the viewer: its data, the saved file, and the page."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from chat_episodes import QUESTION, chat_trajectory, says, search
from format_models import NAMES, ONE_CALL, THINKING, tokenizer_of
from playwright.sync_api import Page, expect
from viewer_world import Episodes, client_of, served, write_step

from verl.agent.chat import SAID_NOTHING
from verl.protocol import Trajectory

Write = Callable[..., Path]
UNKNOWN = {"type": "function", "function": {"name": "look", "arguments": {}}}


@pytest.fixture
def run_of(tmp_path: Path) -> Write:
    """A run with one trajectory, and the tokenizer `name` unless that is left out."""

    def write(trajectory: Trajectory, name: str, with_tokenizer: bool = True) -> Path:
        folder, tokenizer = tmp_path / "chat", tokenizer_of(name)
        trajectory.reward = 1.0
        write_step(folder, Episodes(tokenizer), "train", 1, [trajectory])
        if with_tokenizer:
            tokenizer.save_pretrained(folder / "actor" / "global_step_1")
        return folder

    return write


def shown(folder: Path) -> dict:
    query = {"run": "chat", "file": "train_step_1", "row": 0}
    return client_of(folder).get("/api/trajectory", params=query).json()


def parts(data: dict, source: str) -> list[tuple[str, str]]:
    segments = [segment for segment in data["segments"] if segment["source"] == source]
    return [(part["kind"], "".join(text for text, _ in part["runs"])) for one in segments for part in one["parts"]]


@pytest.mark.parametrize("name", NAMES)
def test_a_turn_shows_its_thinking_what_it_says_and_its_calls(run_of: Write, name: str) -> None:
    thought = "Which river?" if name in THINKING else ""
    said = "" if name in ONE_CALL else "I look."
    calls = [search(query="city")] if name in ONE_CALL else [search(query="river"), UNKNOWN, search(query="city")]
    trajectory = chat_trajectory(name, [says(said, *calls, thought=thought), says("It is <answer> Sael </answer>.")])
    data = shown(run_of(trajectory, name))
    own = parts(data, "policy")
    assert all(segment["exact"] for segment in data["segments"])
    kinds = [kind for kind, text in own if text.strip() and (kind, said) != ("text", "")]
    assert [kind for kind in kinds if kind not in ("think", "text")] == ["call"] * len(calls) + ["answer"]
    if thought:
        assert kinds[0] == "think" and thought in own[0][1]
    assert said in "".join(text for kind, text in own if kind == "text")
    assert all('"query"' in text or "parameter=query" in text or "look" in text for kind, text in own if kind == "call")
    # the calls, one by one
    listed = data["calls"]
    assert [one["name"] for one in listed] == [call["function"]["name"] for call in calls]
    assert [one["status"] for one in listed] == [["ok", "unknown_tool"][one["name"] == "look"] for one in listed]
    assert listed[-1]["arguments"] == '{"query": "city"}' and ["Sael", True] in listed[-1]["result"]
    assert [one["query"] for one in data["searches"]] == (["city"] if name in ONE_CALL else ["river", "city"])
    assert [one["passages"][0]["id"] for one in data["searches"]] == [one["query"] for one in data["searches"]]
    assert data["answer"] == "Sael" and data["num_searches"] == len(data["searches"])


def test_without_a_tokenizer_and_over_sequences(run_of: Write) -> None:
    turns = [says("", search(queries=["river", "city"]), thought="Hm."), "Hm.\n</think>\n\n<|im_end|>", says("Sael")]
    trajectory = chat_trajectory("xml", turns, thinking="tool_cycle")
    folder = run_of(trajectory, "xml", with_tokenizer=False)
    data = shown(folder)
    assert [kind for kind, _ in parts(data, "policy")][:2] == ["think", "text"] and data["answer"] == "Sael"
    assert [kind for kind, _ in parts(data, "environment")] == ["result"]
    assert SAID_NOTHING in parts(data, "context")[0][1]
    [searched] = data["searches"]
    assert [one["title"][0][0] for one in searched["passages"]] == ["Ildra", "Vonmark"]
    assert [one["id"] for one in searched["passages"]] == ["river", "city"]
    query = {"run": "chat", "file": "train_step_1", "row": 0}
    saved = client_of(folder).get("/api/export", params=query).text
    assert "<code>search {&quot;queries&quot;" in saved and ", ok</h3>" in saved


@pytest.fixture(scope="session")
def called() -> Trajectory:
    """Of the session, so that it is played before a browser starts: beside one, no event loop can run."""
    turns = [says("I look.", search(query="river"), UNKNOWN, thought="Which river?"), says("It is Sael.")]
    return chat_trajectory("xml", turns)


def test_the_page_lists_the_calls(called: Trajectory, page: Page, run_of: Write) -> None:
    with served(run_of(called, "xml")) as url:
        page.goto(f"{url}#run=chat&view=trajectory&file=train_step_1&row=0")
        expect(page.locator(".question").first).to_have_text(QUESTION)
        expect(page.locator("details.call summary")).to_have_text(
            [
                re.compile(r'Turn 1: search \{"query": "river"\}\s+ok, \d'),
                re.compile(r"Turn 1: look \{\}\s+unknown_tool"),
            ]
        )
        expect(page.locator("details.call").nth(1)).to_contain_text("no tool has the name 'look'")
        expect(page.locator(".part.call").first).to_contain_text("<function=search>")
        expect(page.locator(".part.think").first).to_contain_text("Which river?")
        expect(page.locator(".part.result")).to_contain_text("The Ildra is a river")
