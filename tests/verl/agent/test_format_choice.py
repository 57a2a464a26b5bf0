"""Which format a chat template has, and what is said of templates that have none."""

from __future__ import annotations

from typing import Any

import pytest
from families import FAMILIES
from format_models import DATE, DEFAULT_SYSTEM, TRIMMING, XML, made, model_format, tokenizer_of
from tokenizers import AddedToken

from verl.agent.formats import format_of
from verl.agent.formats.chat import ChatML, Llama3, Qwen3, Qwen35
from verl.errors import ConfigError, DataError

KINDS = {
    "qwen2.5": ChatML, "qwen3": Qwen3, "llama3.2": Llama3,
    "default-system": ChatML, "trimming": ChatML, "xml": Qwen35, "headers": Llama3,
}  # fmt: skip
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LAST_ONLY = TRIMMING.replace("{% for m in messages %}", "{% for m in messages[-3:] %}")


@pytest.mark.parametrize(("name", "kind"), KINDS.items())
def test_the_template_says_which_format_it_is(name: str, kind: type) -> None:
    form = model_format(name)
    assert type(form) is kind
    assert form.stop_token_ids[0] == tokenizer_of(name).eos_token_id


@pytest.mark.parametrize(
    ("template", "error"),
    [
        (None, "no chat template"),
        (PLAIN, "does not write the tools"),
        (TRIMMING.replace("{{ m.content }}\n</tool_response>", "</tool_response>"), "the result of a tool"),
        (TRIMMING.replace('{"name"', '{"function"'), "unknown form"),
        (TRIMMING.replace("<|im_end|>", "\n###"), "a token that ends it"),
        (TRIMMING.replace("<|im_start|>assistant\n{%", "<|im_start|>model\n{%"), "cannot be continued exactly"),
        (LAST_ONLY, "changes what it wrote"),
        (TRIMMING + "{{ raise_exception('never') }}", "cannot write these messages"),
        (TRIMMING.replace("m.content | trim", "m.content[:9]"), "by more than its ends"),
        (XML, "no token of the tokenizer"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_with_the_reason(template: str | None, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        format_of(made(template))


def test_a_tokenizer_whose_tokens_take_white_space_is_refused() -> None:
    tokenizer = made(TRIMMING)
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<|im_begin|>", rstrip=True)]})
    tokenizer.chat_template = TRIMMING.replace("<|im_start|>", "<|im_begin|>")
    with pytest.raises(ConfigError, match="takes white space beside"):
        format_of(tokenizer)


def test_without_tools_a_plain_template_will_do() -> None:
    tokenizer = made(PLAIN)
    form = format_of(tokenizer, tools_needed=False)
    assert type(form) is ChatML
    context = form.render([{"role": "user", "content": "a"}]).ids
    more = form.bridge((*context, form.stop_token_ids[0]), [{"role": "user", "content": "b"}])
    assert more and tokenizer.decode(more) == "\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"


def test_without_tools_a_template_may_refuse_their_results_and_system_messages() -> None:
    """As Gemma's does."""
    form = format_of(
        made(
            PLAIN.replace("{{ m.role }}", "{{ m.role if m.role in ['user', 'assistant'] else raise_exception('no') }}")
        ),
        tools_needed=False,
    )
    assert form.turn({"role": "assistant", "content": "c"})[-1] == form.stop_token_ids[0]
    with pytest.raises(DataError, match="cannot write these messages: TemplateError: no"):
        form.bridge(form.render([QUESTION]).ids, [RESULT])


def test_an_unknown_mode_of_thinking_is_refused() -> None:
    with pytest.raises(ConfigError, match="thinking is 'never'"):
        format_of(made(DEFAULT_SYSTEM), thinking="never")  # type: ignore[arg-type]


QUESTION = {"role": "user", "content": "a"}
RESULT = {"role": "tool", "content": "b"}


@pytest.mark.parametrize("name", ["qwen3", "xml"])
def test_thinking_leaves_the_context_as_the_setting_says(name: str) -> None:
    turn: dict[str, Any] = {"role": "assistant", "content": "c", "reasoning_content": "Hm."}
    kept = {}
    for thinking in ("all", "tool_cycle", "template"):
        form = model_format(name, thinking)
        ids = (*form.render([QUESTION]).ids, *form.turn(turn))
        kept[thinking] = [form.bridge(ids, [RESULT]) is not None, form.bridge(ids, [QUESTION]) is not None]
        again = form.render([QUESTION, turn, QUESTION])
        assert ("Hm." in again.text) == kept[thinking][1]
    assert kept == {"all": [True, True], "tool_cycle": [True, False], "template": [True, False]}


def test_a_template_that_always_drops_thinking_can_keep_it_in_a_tool_cycle() -> None:
    """As QwQ's does: the thinking of earlier turns is left out, whatever follows."""
    template = XML.replace("loop.index0 > ns.last", "loop.last and loop.index0 > ns.last")
    tokenizer = made(template, others=("<think>", "</think>", "<tool_call>", "</tool_call>"))
    turn: dict[str, Any] = {"role": "assistant", "content": "c", "reasoning_content": "Hm."}
    for thinking, kept in (("template", False), ("tool_cycle", True)):
        form = format_of(tokenizer, thinking=thinking)  # type: ignore[arg-type]
        ids = (*form.render([QUESTION]).ids, *form.turn(turn))
        more = form.bridge(ids, [RESULT])
        rendered = form.render([QUESTION, turn, RESULT])
        assert ((more is not None), "Hm." in rendered.text) == (kept, kept)
        if more is not None:
            assert (*ids, *more) == rendered.ids
        assert form.bridge(ids, [QUESTION]) is None
        first = form.render([QUESTION, turn, QUESTION, turn, RESULT])
        assert first.text.count("Hm.") == int(kept)


@pytest.mark.parametrize("name", ["qwen3", "xml"])
def test_thinking_that_is_switched_off_keeps_the_context_exact(name: str) -> None:
    form = format_of(tokenizer_of(name), thinking="all", options={**DATE, "enable_thinking": False})
    first, turn = form.render([QUESTION]), {"role": "assistant", "content": "c"}
    assert first.text.endswith("<think>\n\n</think>\n\n")
    ids = (*first.ids, *form.turn(turn))
    more = form.bridge(ids, [QUESTION])
    assert more and (*ids, *more) == form.render([QUESTION, turn, QUESTION]).ids
    assert form.parse(form.turn(turn)).content == "c"


def test_two_calls_in_a_turn_are_refused_where_the_template_takes_one() -> None:
    call = {"type": "function", "function": {"name": "now", "arguments": {}}}
    with pytest.raises(DataError, match="one call a turn"):
        model_format("headers").turn({"role": "assistant", "content": "", "tool_calls": [call, call]})


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([], "ends with"),
        ([QUESTION, {"role": "assistant", "content": "a"}], "ends with"),
        ([{"role": "developer", "content": "a"}], "the role 'developer'"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}]}], "is list, not a text"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": {1j: {2j}}}}]}, QUESTION],
            "write",
        ),
    ],
)
def test_messages_that_are_none(messages: list[Any], error: str) -> None:
    with pytest.raises(DataError, match=error):
        model_format("trimming").render(messages)


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.tokenizer])
def test_the_families_of_the_docs_have_the_format_that_is_said(family: str) -> None:
    tokenizer, kind = FAMILIES[family].tokenizer or ("", "")
    assert type(model_format(tokenizer)).__name__ == kind
