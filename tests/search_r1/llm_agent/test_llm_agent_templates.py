"""Templates: found by name or path, with one slot and a grammar; the shipped ones speak of the tags they read."""

from __future__ import annotations

import pytest

from search_r1.llm_agent.grammar import SEARCH_R1, Grammar
from search_r1.llm_agent.templates import load_template, normalize_question, shipped_templates
from verl.errors import ConfigError, DataError


def user_message(template, question="who", context=None):
    return template.messages(question, context)[-1]["content"]


def test_search_r1_has_the_tags_and_the_question_last():
    template = load_template("search_r1")
    assert template.grammar == SEARCH_R1
    assert all(tag in template.text for tag in template.grammar.tags)
    assert "<answer> Beijing </answer>" in template.text
    assert template.text.endswith("Question: {question}\n")


@pytest.mark.parametrize("name", shipped_templates())
def test_shipped_templates_speak_of_the_tags_that_their_grammar_reads(name):
    template = load_template(name)
    text = user_message(template, "who wrote it", "Doc 1" if template.needs_context else None)
    assert text.count("who wrote it?") == 1 and "{" not in text.replace(r"\boxed{", "")
    grammar = template.grammar
    spoken = {grammar.answer, *([grammar.search, grammar.information] if grammar.search else [])}
    instructions = (template.system or "") + text
    for tag in spoken:
        assert f"<{tag}>" in instructions and f"</{tag}>" in instructions, tag
    for other in {"search", "information", "result"} - set(grammar.names if grammar.search else ()):
        assert f"<{other}>" not in text, other
    assert (r"\boxed{" in text) == grammar.boxed


def test_the_shipped_grammars():
    assert load_template("research").grammar == Grammar(information="result", boxed=True)
    assert load_template("tinywiki").grammar == SEARCH_R1
    for name in ("r1", "direct", "rag", "ircot"):
        assert load_template(name).grammar == Grammar(search=None)
    assert [name for name in shipped_templates() if load_template(name).needs_context] == ["ircot", "rag"]


def test_template_from_a_path_keeps_its_bytes(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("\u00dcber {braces} and 100%: {question} ", encoding="utf-8")
    template = load_template(str(file))
    assert template.messages("who ") == [{"role": "user", "content": "\u00dcber {braces} and 100%: who? "}]
    assert template.grammar == SEARCH_R1


def test_header_with_tags_a_box_and_a_system_message(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("---\ntags: {think: plan, search: tool}\nboxed: true\nsystem: Be brief.\n---\nQ: {question}\n---\n")
    template = load_template(str(file))
    assert template.grammar == Grammar(think="plan", search="tool", boxed=True)
    assert template.messages("who?") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Q: who?\n---\n"},
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no slot", "it contains {question} 0 times"),
        ("{question} {question}", "it contains {question} 2 times"),
        ("{question} {context} {context}", "it contains {context} 2 times"),
        ("---\ntags: {think\n---\n{question}", "no YAML"),
        ("---\ntag: {think: a}\n---\n{question}", "keys tags, boxed, system only"),
        ("---\njust words\n---\n{question}", "keys tags, boxed, system only"),
        ("---\nboxed: 3\n---\n{question}", "boxed is 3"),
        ("---\ntags: {plan: a}\n---\n{question}", "no tag 'plan'"),
        ("---\ntags: {think: null}\n---\n{question}", "the name of tag think is None"),
        ("---\ntags: {think: a b}\n---\n{question}", "letters"),
        ("---\ntags: {think: answer}\n---\n{question}", "name of its own"),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path, text, message):
    file = tmp_path / "bad.txt"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as raised:
        load_template(str(file))
    assert "bad.txt" in str(raised.value)


def test_unknown_template_names_the_known_ones():
    with pytest.raises(ConfigError, match="search_r1"):
        load_template("absent")


def test_a_slot_in_a_question_or_in_a_passage_is_only_text():
    text = user_message(load_template("rag"), "what is {context}", "a {question} mark")
    assert text.count("what is {context}?") == 1 and text.count("a {question} mark") == 1


def test_context_goes_where_there_is_a_place_for_it():
    with pytest.raises(ConfigError, match="rag needs a context"):
        load_template("rag").messages("who")
    with pytest.raises(ConfigError, match="search_r1 has no place for a context"):
        load_template("search_r1").messages("who", context="x")


def test_fingerprint_follows_content_not_name(tmp_path):
    paths = [tmp_path / name for name in ("a.txt", "b.txt", "c.txt")]
    for path, text in zip(
        paths, ["Q: {question}", "Q: {question}", "---\nboxed: true\n---\nQ: {question}"], strict=True
    ):
        path.write_text(text)
    first, same, other = (load_template(str(path)).fingerprint for path in paths)
    assert first == same != other


def test_question_mark():
    assert normalize_question(" who ") == normalize_question("who?") == "who?"
    with pytest.raises(DataError):
        normalize_question("  ")
