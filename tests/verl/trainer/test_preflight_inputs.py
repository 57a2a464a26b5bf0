"""What the trainer checks first."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from preflight_run import small_run
from run_config import run_config

from verl.errors import ConfigError, EnvironmentUnavailable
from verl.trainer.model_shape import ModelShape
from verl.trainer.preflight.inputs import check_inputs
from verl.trainer.preflight.models import require_engines_share_heads


def test_a_prompt_that_names_no_tags_or_is_worded_differently_is_warned_of(
    prompt_file: Path, tmp_path: Path, tiny_model_dir: Path, osk_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    def check(text: str) -> str:
        rows = pq.read_table(prompt_file).to_pylist()
        for row in rows:
            row["prompt"] = [{"role": "user", "content": text}]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "other.parquet")
        settings = small_run(tmp_path / "other.parquet", tmp_path / "run", tiny_model_dir, f"retriever.url={osk_url}")
        caplog.clear()
        check_inputs(run_config(settings))
        return caplog.text

    assert "names none of the tags" in check("Who founded Osk?") and "agent.template=search_r1" in caplog.text
    named = "First <think> ... </think>, ask <search> ... </search>, read <information> ... </information>, then "
    assert check(named + "<answer> ... </answer>. Who founded Osk?") == "", "other words, the same tags: as published"
    renamed = named.replace("information", "tool_response") + "<answer> ... </answer>. Who founded Osk?"
    assert "names <answer>, <search>, <think>, <tool_response>, but agent.template=search_r1 reads" in check(renamed)
    with pytest.raises(ConfigError, match="template: .*other.parquet: the prompt names <think>, but .* reads <answer>"):
        check("First <think> ... </think>, then answer. Who founded Osk?")


def test_a_run_that_can_start_leaves_no_trace(
    prompt_file: Path, tmp_path: Path, tiny_model_dir: Path, osk_url: str
) -> None:
    settings = small_run(prompt_file, tmp_path / "run", tiny_model_dir, f"retriever.url={osk_url}")
    check_inputs(run_config(settings))
    assert [path.name for path in tmp_path.iterdir()] == ["train.parquet"]


@pytest.mark.parametrize(
    ("overrides", "kind", "message"),
    [
        # The model was made for 1024 tokens; 910 of them are the prompt's.
        (["data.max_response_length=115"], ConfigError, "= 1025 tokens, but .* was made for 1024"),
        (
            [
                "data.max_response_length=115",
                "+actor_rollout_ref.model.override_config={max_position_embeddings: 1025}",
            ],
            EnvironmentUnavailable,  # the window is large enough now, and the next thing is wrong
            "http://127.0.0.1:1/retrieve",
        ),
        (
            ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.target_modules=[qproj]"],
            ConfigError,
            "has no linear layer qproj. It has down_proj, gate_proj, ",
        ),
        # The model has 3 attention heads, of one key and value head.
        (
            ["trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"],
            ConfigError,
            "actor.ulysses_sequence_parallel_size=2 does not divide the 3 attention heads .* set it to one of 1, 3",
        ),
        (["trainer.default_local_dir=/dev/null/run"], ConfigError, "run folder: /dev/null/run: /dev/null is a file"),
        (["data.tokenizer=/no/such/folder"], ConfigError, "no tokenizer could be loaded"),
        (["reward.function=no.such.Reward"], ConfigError, "no.such"),
        (
            ["data.train_batch_size=3"],
            ConfigError,
            r"data.train_batch_size=3 is more than the 2 prompts of .*train.parquet: .* set it to 2 or less",
        ),
        (
            ["data.train_batch_size=2", "data.train_data_num=1"],
            ConfigError,
            "is more than the 1 prompts of .*data_num=1",
        ),
        # Made with search_r1, whose passages stand between <information> tags; research reads <result> and a box.
        (
            ["agent.template=research"],
            ConfigError,
            r"template: .*train.parquet: .*<information>.* as template search_r1, but agent.template=rese.* <result>",
        ),
        (["agent.template=r1"], ConfigError, "template: .*<search>"),
    ],
)
def test_what_is_wrong_is_said(
    overrides: list[str], kind: type[Exception], message: str, prompt_file: Path, tmp_path: Path, tiny_model_dir: Path
) -> None:
    url = "retriever.url=http://127.0.0.1:1/retrieve"
    settings = small_run(prompt_file, tmp_path / "run", tiny_model_dir, url, *overrides)
    with pytest.raises(kind, match=message):
        check_inputs(run_config(settings))


@pytest.mark.parametrize(
    ("heads", "key_heads", "size", "message"),
    [
        (12, 3, 1, None),
        (16, 8, 8, None),
        (16, 2, 8, None),
        (14, 2, 4, "size=4 does not divide the 14 attention heads of the model; set it to one of 1, 2, 7, 14"),
        (12, 3, 4, "size=4 is neither a divisor nor a multiple of the 3 key and value heads"),
    ],
)
def test_engines_share_heads(heads: int, key_heads: int, size: int, message: str | None) -> None:
    config = run_config([f"actor_rollout_ref.rollout.tensor_model_parallel_size={size}"])
    shape = ModelShape(1000, 2, 8, 8, 8, None, num_heads=heads, num_key_heads=key_heads)
    expected = pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext()
    with expected:
        require_engines_share_heads(config, shape)
