"""Templates: found by name or path, with one slot; the shipped one says what the grammar understands."""

from __future__ import annotations

from pathlib import Path

import pytest

from search_r1.llm_agent.grammar import TAGS
from search_r1.llm_agent.templates import load_template, normalize_question, render
from verl.errors import ConfigError, DataError


def test_shipped_template_has_the_tags_and_the_question_last():
    template = load_template("search_r1")
    assert all(tag in template for tag in TAGS)
    assert "<answer> Beijing </answer>" in template
    assert template.endswith("Question: {question}\n")


def test_every_shipped_template_loads():
    import search_r1.llm_agent.templates as module

    files = list((Path(module.__file__).parent / "templates").glob("*.txt"))
    assert files
    for file in files:
        assert load_template(file.stem) == file.read_text(encoding="utf-8")


def test_template_from_a_path_keeps_its_bytes(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("\u00dcber {braces} and 100%: {question} ", encoding="utf-8")
    assert render(load_template(str(file)), "who ") == [
        {"role": "user", "content": "\u00dcber {braces} and 100%: who? "}
    ]


@pytest.mark.parametrize("text", ["no slot", "{question} {question}"])
def test_slot_stands_once(tmp_path, text):
    file = tmp_path / "bad.txt"
    file.write_text(text)
    with pytest.raises(ConfigError, match="bad.txt"):
        load_template(str(file))


def test_unknown_template_names_the_known_ones():
    with pytest.raises(ConfigError, match="search_r1"):
        load_template("absent")


def test_question_with_a_slot_in_it_is_only_text():
    assert render("Q: {question}", "what is {question}")[0]["content"] == "Q: what is {question}?"


def test_question_mark():
    assert normalize_question(" who ") == normalize_question("who?") == "who?"
    with pytest.raises(DataError):
        normalize_question("  ")
