"""Tokenizers with chat templates for tests of `verl.agent.formats`: the real ones, and made ones that need no files."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from verl.agent.formats import Format, format_of

_REAL = Path(__file__).resolve().parents[3] / "shared" / "data" / "tokenizers"
EXAMPLES = {25: 50, 400: 2000}  # of the profiles small and large
many = hypothesis.settings(max_examples=EXAMPLES.get(hypothesis.settings().max_examples, 50))
DATE = {"date_string": "26 Jul 2026"}  # else Llama's template writes today's

_TOOLS = (
    "{%- macro listed(tools) -%}{%- for tool in tools %}{{ '\n' }}{{ tool | tojson }}{%- endfor %}{%- endmacro -%}"
    "{%- macro answers(messages, at) -%}{%- set m = messages[at] -%}"
    "{%- if at == 0 or messages[at - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{%- if at + 1 == messages | length or messages[at + 1].role != 'tool' %}<|im_end|>\n{% endif -%}{%- endmacro -%}"
)
_HERMES_CALLS = (
    "{%- for call in m.tool_calls %}{% if not loop.first or m.content %}{{ '\n' }}{% endif %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}"
)
DEFAULT_SYSTEM = (
    _TOOLS + "<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}"
    "You are a model.{% endif %}{% if tools %} # Tools: call with <tool_call></tool_call>."
    "{{ listed(tools) }}{% endif %}"
    "<|im_end|>\n{% for m in messages %}{% if m.role == 'tool' %}{{ answers(messages, loop.index0) }}"
    "{% elif not (loop.first and m.role == 'system') %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    + _HERMES_CALLS
    + "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMING = (
    _TOOLS + "{% if tools %}<|im_start|>tools{{ listed(tools) }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}{{ answers(messages, loop.index0) }}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}"
    + _HERMES_CALLS
    + "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
XML = (
    _TOOLS + "{% if tools %}<|im_start|>system\n# Tools{{ listed(tools) }}<|im_end|>\n{% endif %}"
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'tool' %}{{ answers(messages, loop.index0) }}"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{% if loop.index0 > ns.last %}<think>\n"
    "{{ (m.reasoning_content or '') | trim }}\n</think>\n\n{% endif %}{{ m.content.split('</think>') | last | trim }}"
    "{% for call in m.tool_calls %}{% if not loop.first or m.content | trim %}{{ '\n' }}{% endif %}"
    "<tool_call>\n<function={{ call.function.name }}>\n{% for key, value in call.function.arguments | items %}"
    "<parameter={{ key }}>\n{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '\n' }}</think>\n\n{% endif %}{% endif %}"
)
HEADERS = (
    "{% macro header(role) %}<|start_header_id|>{{ role }}<|end_header_id|>\n\n{% endmacro %}"
    "{% if tools %}{{ header('tools') }}{% for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}<|eot_id|>"
    "{% endif %}"
    "{% for m in messages %}{{ header('ipython' if m.role == 'tool' else m.role) }}"
    "{% if m.tool_calls %}{% set call = m.tool_calls[0].function %}"
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call a turn') }}{% endif %}"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}'
    "{% elif m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}{{ header('assistant') }}{% endif %}"
)
_CHATML = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
_CALL_TAGS = ("<tool_call>", "</tool_call>")
_LLAMA = ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>")
MADE = {
    "default-system": (DEFAULT_SYSTEM, _CHATML, ()),  # its tags of calls are ordinary text
    "trimming": (TRIMMING, _CHATML, _CALL_TAGS),
    "xml": (XML, _CHATML, (*_CALL_TAGS, "<think>", "</think>", "<tool_response>")),
    "headers": (HEADERS, _LLAMA, ()),
}
REAL = ("qwen2.5", "qwen3", "llama3.2")
NAMES = (*REAL, *MADE)
THINKING = ("qwen3", "xml")
ONE_CALL = ("llama3.2", "headers")  # and nothing said beside it


def made(
    template: str | None, special: tuple[str, ...] = _CHATML, others: tuple[str, ...] = ()
) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with added tokens, of which the first of `special` is EOS."""
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(r"\s*[\r\n]+|\s+(?!\S)|\s?\w+|\s?[^\s\w]+|\s+"), "isolated")  # as Qwen's
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = [
        '{"name": "search", "arguments": {"query": "the river"}}\n<tool_call>\n</tool_call>\nsystem user assistant\n\n'
    ]
    tokenizer.train_from_iterator(corpus * 4, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in others])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0], chat_template=template)


@lru_cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    if name in MADE:
        return made(*MADE[name])
    if not (_REAL / name).is_dir():
        pytest.skip(f"the real tokenizer {name} is not beside the repository")
    return AutoTokenizer.from_pretrained(_REAL / name)


@lru_cache
def model_format(name: str, thinking: str = "template") -> Format:
    return format_of(tokenizer_of(name), thinking=thinking, options=DATE)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Style:
    """A chat template in the manner of ChatML. `thinking`: when it drops the thinking of earlier turns ("never",
    "user": when a user message comes, "always": when any message comes), or "none" if it has none."""

    start: str
    end: str
    roles: tuple[str, str, str, str]  # how it names system, user, assistant and tool
    after_role: str
    after_end: str
    around_result: tuple[str, str]
    one_message: bool  # for all results of a turn
    before_call: str
    tag_tokens: bool  # the tags of calls are tokens
    strips: bool
    thinking: str

    def tokenizer(self) -> PreTrainedTokenizerFast:
        thinks = () if self.thinking == "none" else ("<think>", "</think>")
        tags = _CALL_TAGS if self.tag_tokens else ()
        return made(self._template(), (self.end, self.start, "<|endoftext|>"), (*tags, *thinks))

    def _template(self) -> str:
        names = dict(zip(("system", "user", "assistant", "tool"), self.roles, strict=True))

        def head(role: str) -> str:
            return f"{self.start}{names[role]}{self.after_role}"

        tail, strip = f"{self.end}{self.after_end}", " | trim" if self.strips else ""
        together = " and (loop.first or messages[loop.index0 - 1].role != 'tool')" if self.one_message else ""
        last = " and (loop.last or messages[loop.index0 + 1].role != 'tool')" if self.one_message else ""
        begin, close = self.around_result
        kept = {"never": "true", "user": "loop.index0 > ns.last", "always": "loop.last"}.get(self.thinking)
        think = "<think>{{ m.reasoning_content }}</think>"
        thought = f"{{% if m.reasoning_content and {kept} %}}{think}{{% endif %}}" if kept else ""
        return (
            "{% set ns = namespace(last=-1) %}"
            "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
            f"{{% if tools %}}{head('system')}Tools:{{% for tool in tools %}} {{{{ tool | tojson }}}}{{% endfor %}}"
            f"{tail}{{% endif %}}"
            "{% for m in messages %}{% if m.role == 'tool' %}"
            f"{{% if true{together} %}}{head('tool')}{{% endif %}}{begin}{{{{ m.content{strip} }}}}{close}"
            f"{{% if true{last} %}}{tail}{{% endif %}}{{% elif m.role == 'assistant' %}}{head('assistant')}"
            f"{thought}{{{{ m.content{strip} }}}}{{% for call in m.tool_calls %}}{self.before_call}<tool_call>"
            '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
            f"{{% endfor %}}{tail}{{% elif m.role == 'user' %}}{head('user')}{{{{ m.content{strip} }}}}{tail}"
            f"{{% else %}}{head('system')}{{{{ m.content{strip} }}}}{tail}{{% endif %}}{{% endfor %}}"
            f"{{% if add_generation_prompt %}}{head('assistant')}{{% endif %}}"
        )


_SPACES = ("\n", "", " ", "\n\n", ":\n")


def styles(tag_tokens: bool) -> st.SearchStrategy[Style]:
    return st.builds(
        Style,
        start=st.sampled_from(["<|im_start|>", "<|turn|>", "[TURN]", "<s>"]),
        end=st.sampled_from(["<|im_end|>", "<|end|>", "</s>", "[/TURN]"]),
        roles=st.sampled_from(
            [("system", "user", "assistant", "tool"), ("S", "Human", "Bot", "Human"), ("", "0", "1", "2")]
        ),
        after_role=st.sampled_from(_SPACES),
        after_end=st.sampled_from(_SPACES[:4]),
        around_result=st.sampled_from(
            [("<tool_response>\n", "\n</tool_response>"), ("[RESULT]", "[/RESULT]\n"), ("", "\n"), ("Result: ", " ")]
        ),
        one_message=st.booleans(),
        before_call=st.sampled_from(["\n", "", " "]),
        tag_tokens=st.just(tag_tokens),
        strips=st.booleans(),
        thinking=st.sampled_from(["none", "none", "never", "user", "always"]),
    )
