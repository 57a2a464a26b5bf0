"""Contents of messages are text, whatever a chat template does with them; ordinary prompts keep their ids."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from search_r1.llm_agent.templates import load_template
from verl.agent.messages import encode_messages, encode_prompt
from verl.agent.text import encode_outside, encode_text
from verl.data.prompts import PromptSource
from verl.errors import DataError

_DATA = Path(__file__).resolve().parents[4] / "shared" / "data"
END = "<|endoftext|>"  # of `byte_tokenizer`
MESSAGES = [{"role": "system", "content": f" be {END} "}, {"role": "user", "content": f"a{END}{END} b?\n"}]
EACH = "{% for m in messages %}"
CHAT = EACH + "[{{ m.role }}]{{ CONTENT }}<|endoftext|>\n{% endfor %}[me]"


def in_chat(tokenizer: PreTrainedTokenizerFast, template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("content", "system", "user"),
    [
        ("m.content", f" be {END} ", f"a{END}{END} b?\n"),
        ("m.content | trim", f"be {END}", f"a{END}{END} b?"),
        ("m.content.strip().upper()", f"BE {END.upper()}", f"A{END.upper()}{END.upper()} B?"),
        ("m.content | tojson", json.dumps(f" be {END} "), json.dumps(f"a{END}{END} b?\n")),
        ("m.content ~ m.content", f" be {END}  be {END} ", f"a{END}{END} b?\na{END}{END} b?\n"),
        ("m.content.split('<|endoftext|>')[-1].lstrip()", "", " b?\n".lstrip()),
    ],
)
def test_what_a_template_makes_of_a_content_is_text(content: str, system: str, user: str, byte_tokenizer: Any) -> None:
    tokenizer = in_chat(byte_tokenizer, CHAT.replace("CONTENT", content))
    ids = encode_messages(tokenizer, MESSAGES)
    assert ids.count(tokenizer.eos_token_id) == 2
    assert tokenizer.decode(ids) == f"[system]{system}{END}\n[user]{user}{END}\n[me]"


def test_a_template_that_looks_into_the_contents_treats_them_as_text(byte_tokenizer: Any) -> None:
    """It would write another turn for a content with a token in it: it is shown contents that have none."""
    other = "{% if '<|endoftext|>' in m.content %}<|pad|>odd{% endif %}"
    tokenizer = in_chat(byte_tokenizer, EACH + other + CHAT.replace("CONTENT", "m.content").removeprefix(EACH))
    ids = encode_messages(tokenizer, MESSAGES)
    assert ids.count(tokenizer.eos_token_id) == 2 and tokenizer.pad_token_id not in ids
    assert tokenizer.decode(ids) == f"[system] be {END} {END}\n[user]a{END}{END} b?\n{END}\n[me]"


def test_a_content_that_the_template_leaves_out(byte_tokenizer: Any) -> None:
    tokenizer = in_chat(byte_tokenizer, "{{ messages[-1].content }}<|endoftext|>")
    assert tokenizer.decode(encode_messages(tokenizer, MESSAGES)) == f"a{END}{END} b?\n{END}"
    harmless = [MESSAGES[0], {"role": "user", "content": "who?"}]
    assert encode_messages(tokenizer, harmless) == list(encode_text(tokenizer, f"who?{END}"))


def test_a_template_that_hides_where_a_content_stands_is_refused(byte_tokenizer: Any) -> None:
    tokenizer = in_chat(byte_tokenizer, "{{ messages[-1].content[:13] }}!")
    assert tokenizer.decode(encode_messages(tokenizer, [{"role": "user", "content": "ab"}])) == "ab!"
    with pytest.raises(DataError, match="take the token out"):
        encode_messages(tokenizer, [{"role": "user", "content": END}])


def test_a_content_that_is_cut_into_a_token_by_the_template(byte_tokenizer: Any) -> None:
    """The template's text behind a content completes a token, and the content of the next message, too."""
    tokenizer = in_chat(byte_tokenizer, EACH + "{{ m.content }}endoftext|>{% endfor %}")
    messages = [{"role": "user", "content": "a <|"}, {"role": "user", "content": "b"}]
    ids = encode_messages(tokenizer, messages)
    assert tokenizer.eos_token_id not in ids and tokenizer.decode(ids) == "a <|endoftext|>bendoftext|>"
    tokenizer.chat_template = EACH + "{{ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": "a <|endof"}, {"role": "user", "content": "text|> b"}]
    ids = encode_messages(tokenizer, messages)
    assert tokenizer.eos_token_id not in ids and tokenizer.decode(ids) == "a <|endoftext|> b"


def test_a_content_that_takes_the_place_of_the_templates_token(byte_tokenizer: Any) -> None:
    """Its last letter makes the template's token part of a word, so that there is one token as expected, elsewhere."""
    tokenizer = in_chat(byte_tokenizer, "{{ messages[0].content }}STOP")
    tokenizer.add_tokens([AddedToken("STOP", single_word=True)])
    ids = encode_messages(tokenizer, [{"role": "user", "content": "a STOP b"}])
    assert [place for place, token in enumerate(ids) if token == len(tokenizer) - 1] == [len(ids) - 1]
    assert tokenizer.decode(ids) == "a STOP bSTOP"


def test_roles_and_further_fields(byte_tokenizer: Any) -> None:
    tokenizer = in_chat(byte_tokenizer, EACH + "[{{ m.role }} {{ m.name }}]{{ m.content }}<|endoftext|>{% endfor %}")
    message = {"role": "user", "name": f"x{END}", "content": "y", "calls": [{"role": END}], "none": None}
    ids = encode_messages(tokenizer, [message])
    assert ids.count(tokenizer.eos_token_id) == 1 and tokenizer.decode(ids) == f"[user x{END}]y{END}"
    with pytest.raises(DataError, match=r"messages\[0\] has the role '<.endoftext.>'; use one of system, user"):
        encode_messages(tokenizer, [message | {"role": END}])


def test_without_a_template_and_with_tags(byte_tokenizer: Any) -> None:
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<search>"]})
    messages = [{"role": "user", "content": f"write <search>, not {END}"}]
    ids = encode_messages(tokenizer, messages, ("<search>",))
    assert ids == list(encode_outside(tokenizer, messages[0]["content"], ("<search>",)))
    added = set(tokenizer.added_tokens_decoder)
    assert [tokenizer.decode([token]) for token in ids if token in added] == ["<search>"]
    assert not added & set(encode_messages(tokenizer, messages))
    outside = encode_prompt(
        tokenizer, [{"role": "user", "content": f"Q {END}"}], {"Q": f"<search>{END}"}, tags=("<search>",)
    )
    assert [tokenizer.decode([token]) for token in outside if token in added] == ["<search>", END]


def test_the_unknown_token_may_be_a_control_token(byte_tokenizer: Any) -> None:
    """GPT-2's ends a text, too."""
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.unk_token = END
    assert tokenizer.eos_token_id not in encode_outside(tokenizer, f"a{END}b")


def write(path: Path, contents: list[str]) -> str:
    others = {"data_source": "nq", "reward_model": {"ground_truth": {"target": ["x"]}}}
    rows = [{"prompt": [{"role": "user", "content": text}], **others} for text in contents]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def test_one_warning_for_each_file(tmp_path: Path, byte_tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    files = [
        write(tmp_path / "a.parquet", ["x", f"y<|pad|>{END}", f"z{END}"]),
        write(tmp_path / "b.parquet", ["x", "< |pad|>"]),
        write(tmp_path / "c.parquet", [END]),
    ]
    with caplog.at_level(logging.WARNING):
        source = PromptSource(files, byte_tokenizer, max_start_length=99)
    found = [record.getMessage() for record in caplog.records]
    assert len(found) == 2
    assert "a.parquet: 2 of its prompts" in found[0] and "first: row 1, '<|pad|>'" in found[0]
    assert "c.parquet: 1 of its prompts" in found[1] and "encoded by its characters" in found[1]
    assert byte_tokenizer.decode(source.all()[2].ids) == f"z{END}"


@pytest.mark.parametrize("count", [100, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "llama3.2"])
def test_ordinary_questions_keep_their_ids(name: str, count: int, tmp_path: Path) -> None:
    files = sorted((_DATA / "qa").glob("*/*.jsonl"))
    if not (_DATA / "tokenizers" / name).is_dir() or not files:
        pytest.skip(f"the real tokenizer {name} and questions are not beside the repository")
    tokenizer = AutoTokenizer.from_pretrained(_DATA / "tokenizers" / name)
    questions = [json.loads(line)["question"] for file in files for line in file.open().readlines()[:count]]
    template = load_template("search_r1")
    contents = [template.messages(question)[-1]["content"] for question in questions if question.strip()]
    file = write(tmp_path / "real.parquet", contents)
    source = PromptSource(file, tokenizer, max_start_length=9000, tags=template.grammar.tags)
    for content, prompt in zip(contents, source.all(), strict=True):
        messages = [{"role": "user", "content": content}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert prompt.ids == encode_text(tokenizer, text)
