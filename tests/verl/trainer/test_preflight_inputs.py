"""What is checked before a model is loaded, by the trainer itself and by the preflight's whole command."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from preflight_run import QUESTION, small_run
from run_config import run_config
from tiny_models import qwen2_config, save_untrained
from transformers import PreTrainedTokenizerFast

from verl.agent.environment import Environment, Outcome
from verl.config import Config
from verl.engine.files.loading import ModelShape
from verl.errors import ConfigError, DataError, EnvironmentUnavailable, RewardError, RewardUnavailable
from verl.protocol import Prompt
from verl.trainer import main_ppo
from verl.trainer.preflight import main, parse
from verl.trainer.start_checks.inputs import check_inputs
from verl.trainer.start_checks.models import require_engines_share_heads

MODEL = "actor_rollout_ref.model"
ULYSSES = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"


@pytest.fixture
def wrong(prompt_file: Path, tmp_path: Path, tiny_model_dir: Path) -> Callable[..., Config]:
    """The config of a run without a retriever: what else is wrong is said before one is asked."""
    dead = "retriever.url=http://127.0.0.1:1/retrieve"
    return lambda *overrides: run_config(small_run(prompt_file, tmp_path / "run", tiny_model_dir, dead, *overrides))


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
    with pytest.raises(ConfigError, match="template: .*other.parquet: row 0: .* names <think>, but .* reads <answer>"):
        check("First <think> ... </think>, then answer. Who founded Osk?")


def test_a_run_that_can_start_leaves_no_trace(
    prompt_file: Path, tmp_path: Path, tiny_model_dir: Path, osk_url: str
) -> None:
    settings = small_run(prompt_file, tmp_path / "run", tiny_model_dir, f"retriever.url={osk_url}")
    check_inputs(run_config(settings))
    assert [path.name for path in tmp_path.iterdir()] == ["train.parquet"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        # The model was made for 1024 tokens; 910 of them are the prompt's.
        ("data.max_response_length=115", "= 1025 tokens, but .* was made for 1024"),
        (f"{MODEL}.lora_rank=4 {MODEL}.target_modules=[qproj]", "has no linear layer qproj. It has down_proj, gate_pr"),
        # The model has 3 attention heads, of one key and value head.
        (
            f"trainer.n_gpus_per_node=2 {ULYSSES}=2",
            f"{ULYSSES}=2 does not divide the 3 attention heads .* set it to one of 1, 3",
        ),
        ("trainer.default_local_dir=/dev/null/run", "run folder: /dev/null/run: /dev/null is a file"),
        ("data.tokenizer=/no/such/folder", "no tokenizer could be loaded"),
        ("reward.function=no.such.Reward", "no.such"),
        ("data.train_batch_size=3", r"=3 is more than the 2 prompts of .*train.parquet: .* set it to 2 or less"),
        ("data.train_batch_size=2 data.train_data_num=1", "is more than the 1 prompts of .*data_num=1"),
        # Made with search_r1, whose passages stand between <information> tags; research reads <result> and a box.
        (
            "agent.template=research",
            r"template: .*train.parquet: .*<information>.* as template search_r1, but agent.template=rese.* <result>",
        ),
        ("agent.template=r1", "template: .*<search>"),
    ],
)
def test_what_is_wrong_is_said(wrong: Callable[..., Config], overrides: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_inputs(wrong(*overrides.split()))


def test_a_window_that_is_widened(wrong: Callable[..., Config]) -> None:
    """It is large enough now, and the next thing is wrong."""
    wide = f"+{MODEL}.override_config={{max_position_embeddings: 1025}}"
    with pytest.raises(EnvironmentUnavailable, match="http://127.0.0.1:1/retrieve"):
        check_inputs(wrong("data.max_response_length=115", wide))


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


def half(data_source, solution_str, ground_truth, extra_info=None):
    return 0.5


def never_a_number(data_source, solution_str, ground_truth, extra_info=None):
    return math.nan


def knows_nq_alone(data_source, solution_str, ground_truth, extra_info=None):
    return {"nq": 1.0}[data_source]


def looks_elsewhere(data_source, solution_str, ground_truth, extra_info=None):
    return -0.0 * float(ground_truth.get("answers") == solution_str)


def unavailable(data_source, solution_str, ground_truth, extra_info=None):
    raise RewardUnavailable("the judge is down")


def named(function: Callable[..., object]) -> str:
    return f"reward.function={__name__}.{function.__name__}"


def test_a_reward_that_is_no_number_ends_the_run_at_its_start(wrong: Callable[..., Config]) -> None:
    with pytest.raises(RewardError) as caught:
        check_inputs(wrong(named(never_a_number)))
    for part in (f"{__name__}.never_a_number", "gave nan", "data_source 'nq'", f"question '{QUESTION}"):
        assert part in str(caught.value)


def test_a_reward_that_the_gold_answer_does_not_get_is_warned_of(
    prompt_file: Path, tmp_path: Path, tiny_model_dir: Path, osk_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = small_run(prompt_file, tmp_path / "run", tiny_model_dir, f"retriever.url={osk_url}")
    check_inputs(run_config([*arguments, named(looks_elsewhere)]))
    [warning] = [record.getMessage() for record in caplog.records if record.getMessage().startswith("reward: ")]
    for part in (f"{prompt_file}: row 0: '<think> I know it. </think><answer> ", "with the gold answer, gets 0, and"):
        assert part in warning
    caplog.clear()
    check_inputs(run_config(arguments))
    assert "gold answer" not in caplog.text


def test_a_judge_that_is_down_is_not_the_rewards_fault(wrong: Callable[..., Config]) -> None:
    with pytest.raises(RewardUnavailable, match="the judge is down"):
        check_inputs(wrong(named(unavailable)))


def test_every_data_source_is_tried(wrong: Callable[..., Config], prompt_file: Path) -> None:
    """Validation asks about sets that training has not; the first row of each is tried."""
    table = pq.read_table(prompt_file)
    other = table.set_column(table.column_names.index("data_source"), "data_source", pa.array(["nq", "musique"]))
    validation = prompt_file.with_name("validation.parquet")
    pq.write_table(other, validation)
    with pytest.raises(RewardError, match="knows_nq_alone raised KeyError: 'musique' .*data_source 'musique'"):
        check_inputs(wrong(named(knows_nq_alone), f"data.val_files={validation}"))


@pytest.mark.parametrize("files", ["train", "val", "test"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward_model": {"ground_truth": {"target": None}}}, "ground_truth.target=None is neither a text nor texts"),
        ({"reward_model": {"ground_truth": {"target": []}}}, r"target=\[\] is neither"),
        ({"reward_model": {"ground_truth": {"target": [None]}}}, r"target=\[None\] is neither"),
        ({"reward_model": {"ground_truth": {"target": ["Osk", None]}}}, r"target=\['Osk', None\] is neither"),
        ({"reward_model": {"ground_truth": None}}, "has no reward_model.ground_truth.target"),
        ({"reward_model": None}, "column 'reward_model': is null"),
        ({"data_source": None}, "column 'data_source': is null"),
        ({"prompt": []}, "column 'prompt': the prompt is empty"),
        ({"prompt": [{"role": "user", "content": None}]}, "column 'prompt': .* a message without content"),
        (
            {"prompt": [{"role": "user", "content": "<think> then <answer>. Who?"}]},
            "the prompt names <answer>, <think>",
        ),
    ],
)
def test_every_row_is_checked(
    files: str, change: dict, message: str, wrong: Callable[..., Config], prompt_file: Path
) -> None:
    rows = [pq.read_table(prompt_file).to_pylist()[0] | {"id": str(i)} for i in range(24)]
    pq.write_table(pa.Table.from_pylist(rows), prompt_file.with_name("good.parquet"))
    schema = pq.read_schema(prompt_file.with_name("good.parquet"))
    bad = prompt_file.with_name("bad.parquet")
    rows[17] |= change
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), bad)
    with pytest.raises((ConfigError, DataError), match=rf"{bad}: row 17.*{message}"):
        check_inputs(wrong(f"data.{files}_files={bad}"))


def answers_where_there_is_one(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth["target"][0] in solution_str)


class ReadsTheRow(Environment):
    """It needs what `extra_info` has in most rows."""

    async def step(self, prompt: Prompt, text: str, tools_allowed: bool) -> Outcome:
        return Outcome("answer", valid=True, done=prompt.row["extra_info"]["index"] + 1 > 0)


@pytest.mark.parametrize(
    ("setting", "change", "message"),
    [
        (
            f"reward.function={__name__}.answers_where_there_is_one",
            {"reward_model": {"ground_truth": {"target": []}}},
            "answers_where_there_is_one raised IndexError",
        ),
        (
            f"agent.environment={__name__}.ReadsTheRow",
            {"extra_info": {"index": None}},
            "step of .*ReadsTheRow raised TypeError",
        ),
    ],
)
def test_code_of_the_users_is_tried_on_a_row_of_each_kind(
    setting: str, change: dict, message: str, wrong: Callable[..., Config], prompt_file: Path
) -> None:
    rows = [pq.read_table(prompt_file).to_pylist()[0] for _ in range(24)]
    rows[17] |= change
    pq.write_table(pa.Table.from_pylist(rows, schema=pq.read_schema(prompt_file)), prompt_file)
    with pytest.raises((ConfigError, RewardError), match=rf"train.parquet: row 17: .*{message}"):
        check_inputs(wrong(setting))


def test_a_model_that_could_not_be_saved_is_refused(
    wrong: Callable[..., Config], tmp_path: Path, tiny_model_dir: Path
) -> None:
    own = Path(shutil.copytree(tiny_model_dir, tmp_path / "own"))
    (own / "own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n\n\nclass Own(PreTrainedTokenizerFast):\n"
        "    def save_pretrained(self, *args, **kwargs):\n        raise NotImplementedError('not written yet')\n"
    )
    settings = json.loads((own / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (own / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=rf"path={own} could not be saved again .* not written yet"):
        check_inputs(wrong(f"{MODEL}.path={own}", f"{MODEL}.trust_remote_code=true"))


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("Question", r"train.parquet: row 0, .* has token 299, but .* for 0 to 298"),
        (
            "<search>",
            r"the environment uses token 299 \('<search>'\), but the policy model has embeddings for 0 to 298",
        ),
        ("never read", None),
    ],
)
def test_tokens_without_an_embedding(
    token: str,
    message: str | None,
    wrong: Callable[..., Config],
    tmp_path: Path,
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Those that were added to a tokenizer, but not to its model, and that its chat template or the environment
    writes.
    """
    larger = copy.deepcopy(byte_tokenizer)
    larger.add_tokens([token])
    if token == "Question":
        larger.chat_template = "Question: {{ messages[0]['content'] }}"
    larger.save_pretrained(tmp_path / "larger")
    unreachable = pytest.raises(EnvironmentUnavailable)  # the next check
    with pytest.raises((ConfigError, DataError), match=message) if message else unreachable:
        check_inputs(wrong(f"data.tokenizer={tmp_path / 'larger'}", "retriever.deadline_s=1", "retriever.timeout_s=1"))


def test_a_smaller_critic(
    wrong: Callable[..., Config], tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    save_untrained(qwen2_config(100, 16, 16, 1, (1, 1), 1024), tmp_path / "critic")
    byte_tokenizer.save_pretrained(tmp_path / "critic")
    critic = ("algorithm.adv_estimator=gae", f"critic.model.path={tmp_path / 'critic'}")
    with pytest.raises(ConfigError, match="the critic model has embeddings for 0 to 99; use its own tokenizer"):
        check_inputs(wrong(*critic))


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("generation_config.json", {"num_return_sequences": 2}, "from '.*/model': .*num_return_sequences"),
        ("generation_config.json", "[]", "from '.*/model': TypeError"),
        ("generation_config.json", {"eos_token_id": "</s>"}, "eos_token_id of its generation_config.json is '</s>'"),
        ("config.json", "{}", "from '.*/model': .*Unrecognized model"),
        ("config.json", "[]", "path=.*/model: "),
        ("config.json", {"num_attention_heads": 0}, "from '.*/model': ZeroDivisionError"),
        ("config.json", {"pad_token_id": 999}, "from '.*/model': AssertionError: Padding_idx"),
        ("config.json", {"dtype": "float8_e4m3fn"}, "from '.*/model': TypeError"),
        ("config.json", {"vocab_size": 100}, "the tokenizer uses token 298 .*, but .* embeddings for 0 to 99"),
        ("config.json", {"max_position_embeddings": "many"}, "path=.*/model: .*max_position_embeddings"),
        ("tokenizer.json", "{", "path=.*/model: no tokenizer could be loaded"),
        ("tokenizer.json", None, "path=.*/model: no tokenizer could be loaded: it has no vocabulary; add its files"),
        ("chat_template.jinja", "{% for x in messages %}", "row 0, column 'prompt': .* chat template .*SyntaxError"),
        ("chat_template.jinja", "{{ raise_exception('none') }}", "chat template of the tokenizer cannot .*: none"),
        ("chat_template.jinja", "{# nothing #}", "makes no token of the prompt"),
        ("model.safetensors", "{}", "path=.*/model: .*model.safetensors: names cannot be read"),
        (
            "model.safetensors",
            Path("gone"),
            "model.safetensors: names cannot be read: .* No such file .*model.safetensors'",
        ),
        ("model.safetensors", None, "path=.*/model has no weights"),
    ],
)
def test_model_folders_that_cannot_be_used(
    file: str,
    change: dict | str | Path | None,
    message: str,
    wrong: Callable[..., Config],
    tmp_path: Path,
    tiny_model_dir: Path,
) -> None:
    model = Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))
    if change is None:
        (model / file).unlink()
    elif isinstance(change, Path):
        (model / file).unlink()
        (model / file).symlink_to(tmp_path / change)
    elif isinstance(change, str):
        (model / file).write_text(change)
    else:
        (model / file).write_text(json.dumps(json.loads((model / file).read_text()) | change))
    with pytest.raises((ConfigError, DataError), match=message):
        check_inputs(wrong(f"{MODEL}.path={model}"))


@pytest.mark.usefixtures("no_dry_run")
def test_the_command_says_what_the_reward_gave(
    prompt_file: Path, tmp_path: Path, tiny_model_dir: Path, osk_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = small_run(prompt_file, tmp_path / "run", tiny_model_dir, f"retriever.url={osk_url}")
    assert main([*arguments, named(half)]) == 0
    assert f"warn reward: {__name__}.half gave 0.5" in capsys.readouterr().out
    main(arguments)
    said = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("ok   reward: "))
    assert "0 for 'I do not know.' (nq), 1 for '<think> I know it. </think><answer> " in said
    assert "</answer>' with the gold answer (nq)" in said
    assert main([*arguments, named(never_a_number)]) == 1
    out = capsys.readouterr().out
    assert (
        f"FAIL reward: {prompt_file}: row 0: reward {__name__}.never_a_number gave nan" in out
        and "ok   environment" in out
    )


FORMAT = ("reward_model.structure_format_score=0.2", "reward_model.final_format_score=0.1")


def lines(level: str, out: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith(level)]


def test_the_whole_command(
    prompt_file: Path, tmp_path: Path, tiny_model_dir: Path, osk_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = small_run(prompt_file, tmp_path / "run", tiny_model_dir, f"retriever.url={osk_url}")
    status = main(arguments)
    out = capsys.readouterr().out
    failures = lines("FAIL", out)
    assert [line for line in failures if "not installed" not in line and "is needed" not in line] == []
    assert status == bool(failures)
    assert "mask 0" in out and "mask 1" in out and "memory: fits" in out and "workers on CPU" in out
    assert "for verl.trainer.main_ppo\n" in out
    assert f"passages for {QUESTION!r}" in out and "the first is 'Osk'" in out
    assert {line.split(":")[0] for line in lines("ok", out)} >= {"ok   ports", "ok   ray", "ok   retriever host"}


@pytest.mark.usefixtures("no_dry_run")
def test_no_check_hides_another(
    prompt_file: Path, tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    hidden = "retriever.url=http://user:hunter2@no-such-host.invalid:8000/retrieve"
    quick = ("retriever.timeout_s=1", "retriever.deadline_s=1", "data.max_prompt_length=1000")
    assert main(small_run(prompt_file, tmp_path / "file" / "run", tiny_model_dir, hidden, *quick)) == 1
    out = capsys.readouterr().out
    whats = {line[5:].split(":")[0] for line in lines("FAIL", out)}
    assert whats >= {"run folder", "retriever host", "environment", "window"}
    assert "hunter2" not in out


@pytest.mark.usefixtures("no_dry_run")
def test_settings_of_the_format_reward(
    prompt_file: Path, tmp_path: Path, tiny_model_dir: Path, osk_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = small_run(prompt_file, tmp_path / "run", tiny_model_dir, f"retriever.url={osk_url}", *FORMAT)
    asked = parse(arguments)
    assert asked.entry_point == "verl.trainer.main_ppo_format"
    assert asked.config.reward.kwargs == {
        "structure_format_score": 0.2, "final_format_score": 0.1, "retrieval_score": 0.0
    }  # fmt: skip
    main(arguments)
    out = capsys.readouterr().out
    assert "ok   config: for verl.trainer.main_ppo_format\n" in out and "ok   inputs" in out
    with pytest.raises(ConfigError, match="brings its own reward"):
        parse([*arguments, "reward.function=mine.Reward"])


@pytest.mark.usefixtures("no_dry_run")
def test_what_will_hardly_do_what_was_meant_is_told_before_anything_starts(
    tmp_path: Path,
    tiny_model_dir: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("signal.signal", lambda number, handler: None)  # main sets one for the process
    loss = ("actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_type=kl")
    arguments = small_run(tmp_path / "gone.parquet", tmp_path / "run", tiny_model_dir, *loss)
    assert main_ppo.main(arguments) == 2
    assert "gone.parquet: no such file" in capsys.readouterr().err
    assert [record.getMessage().split(":")[0] for record in caplog.records if record.levelname == "WARNING"] == [
        "actor_rollout_ref.actor.kl_loss_type=kl has a gradient of zero on average"
    ]
    assert main(arguments) == 1
    out = capsys.readouterr().out
    assert "warn config: actor_rollout_ref.actor.kl_loss_type=kl has a gradient" in out
    assert "FAIL inputs" in out and "gone.parquet: no such file" in out
