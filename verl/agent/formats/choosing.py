"""Which format a model's chat template writes, found out by letting it write small conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl.agent.formats.chat import ChatML, Llama3, Qwen3, Qwen35, TemplateFormat, Thinking
from verl.agent.formats.interface import Format, Message, Tool
from verl.agent.formats.template import Template
from verl.agent.text import decode_turn
from verl.errors import ConfigError, DataError, translated

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHOOSE = (
    "use a model whose template writes Hermes, Qwen3, Qwen3.5 or Llama 3 calls, set such a chat template in its "
    "tokenizer, or use an environment whose actions are tags"
)
_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
_SYSTEM: Message = {"role": "system", "content": "Answer in one word."}
_ASKED: Message = {"role": "user", "content": "What is a mill?"}
_CALLED: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "look_up", "arguments": {"word": "mill"}}}],
}
_FOUND: Message = {"role": "tool", "content": "A building that grinds grain."}
_SAID: Message = {"role": "assistant", "content": "Building."}
_THANKS: Message = {"role": "user", "content": "Thanks. And a quern?"}
_SAMPLES = (
    [_ASKED, _SAID, _THANKS, _SAID, _ASKED],
    [_ASKED, _CALLED, _FOUND],
    [_ASKED, _CALLED, _FOUND, _SAID, _THANKS],
)
_FORMS: dict[type[TemplateFormat], tuple[str, ...]] = {
    Qwen35: ("<tool_call>", "<function=look_up>", "<parameter=word>", "</tool_call>"),
    ChatML: ("<tool_call>", '"name": "look_up"', '"arguments": {"word": "mill"}', "</tool_call>"),
    Llama3: ('{"name": "look_up"', '"parameters": {"word": "mill"}}'),
}


def format_of(
    tokenizer: PreTrainedTokenizerBase,
    tools_needed: bool = True,
    *,
    thinking: Thinking = "template",
    options: Mapping[str, Any] | None = None,
) -> Format:
    """The format of a model's tool calls, by its tokenizer's chat template.

    `thinking` says how long thinking stays in the context: see `verl.agent.formats.chat`. `options` are variables of
    the chat template, such as `enable_thinking`, or `date_string`, without which Llama's template writes today's date.
    With `tools_needed=False`, a template without tools is taken too. Raises `ConfigError` if the tokenizer has no chat
    template, if the template has no tools or writes calls in an unknown form, and if a context cannot be continued
    exactly with it.
    """
    template = Template(tokenizer, options)
    with translated(DataError, lambda error: ConfigError(f"{error}; {_CHOOSE}")):
        _check_writing(template)
        kind = _kind(template, tools_needed)
        found = kind(template, thinking)
        _check(found, _TOOL if tools_needed else None)
    return found


def _check_writing(template: Template) -> None:
    """Raises `ConfigError` if the template does not take the marks around texts for texts."""
    chat = [_ASKED, _SAID, _THANKS]
    text = template.write(chat).text
    if text != template.tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=False, **template.options
    ):
        raise ConfigError(f"the chat template changes texts by more than its ends; {_CHOOSE}")


def _kind(template: Template, tools_needed: bool) -> type[TemplateFormat]:
    # A template that has the tag writes thinking, takes it out of contents, or asks for it in its prompt.
    thinks = "</think>" in str(template.tokenizer.chat_template)
    # Where the template has tools, the format is the one that it has with them.
    if not tools_needed:
        try:
            return _kind(template, True)
        except (ConfigError, DataError):
            return Qwen3 if thinks else ChatML
    if "look_up" not in template.write([_ASKED], [_TOOL]).text:
        raise ConfigError(f"the chat template of the tokenizer does not write the tools; {_CHOOSE}")
    text = template.write([_ASKED, _CALLED, _FOUND], [_TOOL]).text
    if _FOUND["content"] not in text:
        raise ConfigError(f"the chat template of the tokenizer does not write the result of a tool; {_CHOOSE}")
    # Between question and result stands the call alone: the template's own instructions may have examples of calls.
    call = text[text.rfind(_ASKED["content"]) : text.rindex(_FOUND["content"])]
    kinds = [kind for kind, parts in _FORMS.items() if all(part in call for part in parts)]
    if not kinds:
        raise ConfigError(f"the chat template writes calls in an unknown form, {call[-200:]!r}; {_CHOOSE}")
    # The calls of ChatML and Qwen3 are alike.
    return Qwen3 if kinds[0] is ChatML and thinks else kinds[0]


def _check(found: TemplateFormat, tool: Tool | None) -> None:
    """Raises `ConfigError` if contexts that grow are not what the template writes for the same conversation at once."""
    tools = [tool] if tool else []
    for sample in _SAMPLES:
        if tool is None and _CALLED in sample:
            continue
        for messages in (sample, [_SYSTEM, *sample]):
            try:
                found.render([messages[0], _ASKED])
            except DataError:  # no system message
                continue
            _check_growth(found, messages, tools)


def _check_growth(found: TemplateFormat, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
    tokenizer = found.template.tokenizer
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    context = found.render(messages[: turns[0]], tools).ids
    for place, following in zip(turns, [*turns[1:], len(messages)], strict=True):
        turn = found.turn(messages[place])
        more = found.bridge((*context, *turn), messages[place + 1 : following])
        if more is None or "</think>" in found.template.write([_ASKED]).text:  # an empty block that may go later
            return
        context = (*context, *turn, *more)
        # as texts: some tokenizers join line breaks of the prompt only where no turn follows
        at_once = found.render(messages[:following], tools).ids
        if decode_turn(tokenizer, context) != decode_turn(tokenizer, at_once):
            raise ConfigError(
                "the chat template changes what it wrote when the conversation goes on, so a context cannot be "
                f"continued exactly; {_CHOOSE}"
            )
