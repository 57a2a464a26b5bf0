"""Templates, tags, lengths and one real query, with real tokenizers and the project's retrieval server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from preflight_run import QUESTION, levels
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from search_r1.llm_agent.environment import SearchEnvironment
from search_r1.llm_agent.grammar import Grammar
from tests.chaos.fault_proxy import FaultProxy, Kind
from verl.config import Config
from verl.errors import ConfigError, DataError
from verl.trainer.start_checks import prompts
from verl.trainer.start_checks.finding import Finding
from verl.trainer.start_checks.retrieval import check_environment, question_in


def asked(config: Config, tokenizer: PreTrainedTokenizerFast) -> Finding:
    environment = SearchEnvironment.from_config(config, tokenizer)
    return check_environment(config, environment, prompts.load_prompts(config, tokenizer, environment))


def test_template_of_a_prompt_file(make_config: Callable[..., Config], byte_tokenizer: PreTrainedTokenizerFast) -> None:
    """tinywiki has the tags of search_r1 in other words; research has other tags."""
    for name, level in (("search_r1", "ok"), ("tinywiki", "warn"), ("research", "FAIL")):
        config = make_config(f"agent.template={name}")
        found = list(prompts.check_templates(config, SearchEnvironment.from_config(config, byte_tokenizer)))
        assert levels(found) == [level, level]
        if level != "ok":
            assert "search_r1" in found[0].found and f"agent.template={name}" in found[0].found


def test_a_question_may_name_any_tag(
    make_config: Callable[..., Config], prompt_file: Path, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = pq.read_table(prompt_file).to_pylist()
    for message in rows[1]["prompt"]:
        message["content"] = message["content"].replace(rows[1]["question"], "What does <result> mean")
    rows[1]["question"] = "What does <result> mean"
    pq.write_table(pa.Table.from_pylist(rows), prompt_file)
    config = make_config()
    found = list(prompts.check_templates(config, SearchEnvironment.from_config(config, byte_tokenizer)))
    assert levels(found) == ["ok", "ok"]


def test_prompt_lengths(make_config: Callable[..., Config], byte_tokenizer: PreTrainedTokenizerFast) -> None:
    def found(window: int, *overrides: str) -> list[str]:
        config = make_config("data.max_start_length=2000", "data.max_prompt_length=2000", *overrides)
        return levels(
            prompts.check_lengths(
                config,
                prompts.load_prompts(config, byte_tokenizer, SearchEnvironment.from_config(config, byte_tokenizer)),
                window,
            )
        )

    assert found(4096) == ["ok", "ok", "ok"]
    assert found(1024) == ["ok", "ok", "FAIL"]
    with pytest.raises(ConfigError, match="more than the 2 prompts"):
        found(4096, "data.train_batch_size=3")
    with pytest.raises(DataError, match="data.max_start_length is 10"):
        found(4096, "data.max_start_length=10")


def failing_tags(tokenizer: PreTrainedTokenizerFast, grammar: Grammar) -> list[str]:
    environment = SearchEnvironment(None, tokenizer, 300, "That was no action.", grammar)
    found = list(prompts.check_tags(environment, tokenizer))
    assert len(found) == 8
    return [finding.found.split(" is ")[0] for finding in found if finding.level == "FAIL"]


def test_tags(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    lower = Tokenizer.from_str(byte_tokenizer.backend_tokenizer.to_str())
    lower.normalizer = normalizers.Lowercase()
    lowering = PreTrainedTokenizerFast(tokenizer_object=lower)
    mixed = Grammar(search="Search")
    assert failing_tags(byte_tokenizer, mixed) == []
    assert failing_tags(lowering, mixed) == ["<Search>", "</Search>"]
    assert failing_tags(lowering, Grammar()) == []


def test_tags_of_a_tokenizer_that_splits_words() -> None:
    """As BERT's: words and signs apart, and spaces between them when they are decoded."""
    entries = ["[UNK]", "<", ">", "/", "think", "search", "information", "answer"]
    wordpiece = Tokenizer(models.WordPiece({entry: i for i, entry in enumerate(entries)}, unk_token="[UNK]"))
    wordpiece.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    wordpiece.decoder = decoders.WordPiece()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=wordpiece, unk_token="[UNK]")
    assert failing_tags(tokenizer, Grammar()) == list(Grammar().tags)


def test_the_first_question_is_asked(
    make_config: Callable[..., Config], byte_tokenizer: PreTrainedTokenizerFast, osk_url: str
) -> None:
    with FaultProxy(osk_url) as proxy:
        found = asked(make_config(f"retriever.url={proxy.url}", "retriever.topk=2"), byte_tokenizer)
    assert found.level == "ok"
    assert found.found.startswith(f"2 passages for {QUESTION!r} in ") and found.found.endswith("the first is 'Osk'")
    assert [request.queries for _, request in proxy.seen][-1] == (QUESTION,)


@pytest.mark.parametrize("kind", ["silence", "error_500", "reset", "garbage", "truncated_json"])
def test_a_retriever_that_fails_at_the_question(
    kind: Kind, make_config: Callable[..., Config], byte_tokenizer: PreTrainedTokenizerFast, osk_url: str
) -> None:
    """It is well until it is asked something real."""
    with FaultProxy(osk_url, lambda request: kind if QUESTION in request.queries else "none") as proxy:
        quick = ("retriever.timeout_s=1", "retriever.deadline_s=3")
        found = asked(make_config(f"retriever.url={proxy.url}", *quick), byte_tokenizer)
    assert proxy.count(kind) > 0 and found.level == "FAIL"
    assert proxy.url in found.found


def test_a_retriever_that_is_gone(make_config: Callable[..., Config], byte_tokenizer: PreTrainedTokenizerFast) -> None:
    gone = make_config("retriever.url=http://127.0.0.1:9/retrieve", "retriever.deadline_s=1", "retriever.timeout_s=1")
    found = asked(gone, byte_tokenizer)
    assert found.level == "FAIL" and "retrieval_launch.sh" in found.found


def test_an_engine_that_finds_nothing(
    make_config: Callable[..., Config], byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    found = asked(make_config(f"retriever.engine={__name__}.Shelf"), byte_tokenizer)
    assert found.level == "warn" and found.found.startswith(f"0 passages for {QUESTION!r}")


def test_a_run_without_a_tool(make_config: Callable[..., Config], byte_tokenizer: PreTrainedTokenizerFast) -> None:
    groups = ("actor_rollout_ref.rollout.n_agent=1", "actor_rollout_ref.rollout.n=2")
    found = asked(make_config("do_search=false", *groups), byte_tokenizer)
    assert found.level == "ok"
    assert found.found.startswith("answers its example turns: '<think>") and found.found.endswith("' is 'answer'")


class Shelf:
    """A user's own engine over an empty shelf."""

    def search(self, query: str) -> list[str]:
        return []


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"question": ["Of the row", None]}, "Of the row"),
        ({"extra_info": [{"question": "Of its extra"}, {"question": "x"}]}, "Of its extra"),
        ({}, "Question: who?"),
    ],
)
def test_where_the_question_stands(
    columns: dict,
    expected: str,
    make_config: Callable[..., Config],
    prompt_file: Path,
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    prompt = [[{"role": "user", "content": "Answer by searching.\nQuestion: who?\n"}]] * 2
    others = {"data_source": ["nq"] * 2, "reward_model": [{"ground_truth": {"target": ["x"]}}] * 2}
    write(prompt_file, {"prompt": prompt, **others, **columns})
    config = make_config()
    environment = SearchEnvironment.from_config(config, byte_tokenizer)
    first = prompts.load_prompts(config, byte_tokenizer, environment).train.all()[0]
    assert question_in(first, "prompt") == expected


def test_the_curriculum_is_that_of_the_config_and_of_the_training_prompts_alone(
    make_config: Callable[..., Config], byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    """Of the file's two prompts, both of which it would skip, an epoch draws at least a batch: one."""
    grpo = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n_agent=2")
    never = [f"data.curriculum.{name}=1e-12" for name in ("keep_probability", "min_keep_probability")]
    sizes = ("data.train_batch_size=1", "actor_rollout_ref.actor.ppo_mini_batch_size=2")
    for switch, epochs in (("true", 3), ("false", 1)):
        config = make_config(f"data.curriculum.enable={switch}", *grpo, *never, *sizes)
        found = prompts.load_prompts(config, byte_tokenizer, SearchEnvironment.from_config(config, byte_tokenizer))
        for source in found[:2]:
            for prompt in source.all():
                source.observe(prompt, True)
            source.next(4)
        assert found.train.state_dict()["epoch"] == epochs and found.val.state_dict()["epoch"] == 1


def write(path: Path, columns: dict) -> None:
    pq.write_table(pa.Table.from_pydict(columns), path)
