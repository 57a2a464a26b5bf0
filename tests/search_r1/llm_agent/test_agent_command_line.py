"""Which settings infer.py, serve and evaluation take: those of a run, of a config, of flags."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from llm_agent_world import ROOT

import infer
from search_r1.evaluation.command_line import method_config
from search_r1.evaluation.command_line import parse_arguments as evaluation_arguments
from search_r1.llm_agent.command_line import agent_sampling
from search_r1.llm_agent.templates import TEMPLATE_FILE, load_template
from search_r1.serve.__main__ import checked_config
from search_r1.serve.__main__ import parse_arguments as serve_arguments
from verl.agent.environment import Sampling
from verl.agent.episode import EpisodeLimits
from verl.config import Config, load_config
from verl.errors import ConfigError, VerlError
from verl.run import saved_state
from verl.tracking.tracker import Tracker

URL = "http://127.0.0.1:8123/retrieve"
Compose = Callable[..., Config]


def of_infer(*arguments: str) -> Config:
    return infer.agent_config(infer.parse_arguments(list(arguments)))


def of_serve(*arguments: str) -> Config:
    return checked_config(serve_arguments(arguments))


def of_evaluation(*arguments: str) -> Config:
    return method_config(evaluation_arguments("", [*arguments, "--output_dir", "out"]))


PROGRAMS = [of_infer, of_serve, of_evaluation]


@pytest.fixture(params=PROGRAMS, ids=["infer", "serve", "evaluation"])
def compose(request: pytest.FixtureRequest) -> Compose:
    return request.param


def by_turns(cases: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Each case for one of the programs: what it is about is behind all of them."""
    return [(program, *case) for program, case in zip(cycle(PROGRAMS), cases)]  # noqa: B905


def make_run(folder: Path, *overrides: str) -> Config:
    """What a run with two checkpoints leaves, of which the first was validated as the better one."""
    config = load_config("tinywiki", [f"retriever.url={URL}", f"trainer.default_local_dir={folder}", *overrides])
    Tracker([], "p", "e", folder, dataclasses.asdict(config)).finish()
    for step in (20, 100):
        model = folder / "actor" / f"global_step_{step}"
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
    state = saved_state.state_path(folder, 100)
    saved_state.finish(saved_state.begin(state, ["actor"], {"best": 20}), state, {})
    return config


@pytest.fixture(scope="module")
def run_as_made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "a run"
    make_run(folder, "data.tokenizer=/gone", "max_turns=7", "agent.feedback=again", "retriever.topk=2")
    return folder


@pytest.fixture
def run_dir(run_as_made: Path, tmp_path: Path) -> Path:
    """Of this test alone."""
    return shutil.copytree(run_as_made, tmp_path / "a run")


def test_a_run_brings_its_model_and_its_settings(compose: Compose, run_dir: Path) -> None:
    config = compose("--run", str(run_dir))
    assert config.actor_rollout_ref.model.path == str(run_dir / "actor" / "global_step_100")
    assert config.data.tokenizer is None  # it is beside the model
    assert (config.retriever.url, config.retriever.topk, config.max_turns) == (URL, 2, 7)
    assert (config.agent.template, config.agent.feedback) == ("tinywiki", "again")
    assert EpisodeLimits.from_config(config) == EpisodeLimits(7, 40, 512, 552, 600.0)


@pytest.mark.parametrize(
    ("compose", "which", "step"), by_turns([("last", 100), ("best", 20), ("20", 20), ("100", 100)])
)
def test_which_checkpoint(compose: Compose, run_dir: Path, which: str, step: int) -> None:
    config = compose("--run", str(run_dir), "--checkpoint", which)
    assert Path(config.actor_rollout_ref.model.path).name == f"global_step_{step}"


def test_flags_win_over_the_run_and_overrides_over_flags(compose: Compose, run_dir: Path) -> None:
    flags = ["--template", "search_r1", "--max_turns", "1", "--max_prompt_length", "1024", "--model", "mine"]
    config = compose("max_turns=3", "--run", str(run_dir), *flags, "retriever.timeout_s=1.5")
    assert (config.agent.template, config.max_turns, config.retriever.timeout_s) == ("search_r1", 3, 1.5)
    assert config.actor_rollout_ref.model.path == "mine"
    assert EpisodeLimits.from_config(config).window == 1024 + 40  # the engine's window follows the flag
    assert config.retriever.url == URL


def test_a_run_that_was_moved_is_the_same_run(compose: Compose, run_dir: Path) -> None:
    moved = run_dir.rename(run_dir.with_name("moved"))
    assert compose("--run", str(moved)).actor_rollout_ref.model.path.startswith(str(moved))


def test_a_run_brings_its_template(compose: Compose, run_dir: Path, tmp_path: Path) -> None:
    """That of the config may be relative to where the run was started, or have changed since."""
    (run_dir / TEMPLATE_FILE).write_text("Theirs: {question}")
    template = compose("--run", str(run_dir)).agent.template
    assert load_template(template).text == "Theirs: {question}"
    assert compose("--run", str(run_dir), "--template", "r1").agent.template == "r1"
    assert compose("--run", str(run_dir), "agent.template=r1").agent.template == "r1"


def test_sampling_is_that_of_validation_unless_a_flag_says_otherwise(tmp_path: Path, run_dir: Path) -> None:
    def sampling(*arguments: str) -> Sampling:
        args = infer.parse_arguments(list(arguments))
        return agent_sampling(args, infer.agent_config(args))

    sampled = tmp_path / "sampled"
    values = ("do_sample=true", "temperature=0.6", "top_p=0.9", "top_k=20")
    make_run(sampled, *(f"actor_rollout_ref.rollout.val_kwargs.{value}" for value in values))
    assert sampling("--run", str(run_dir)) == sampling("--config-name", "tinywiki") == sampling() == Sampling(0.0)
    assert sampling("--run", str(sampled)) == Sampling(0.6, 0.9, 20)
    assert sampling("--run", str(sampled), "--temperature", "0", "--top_p", "1") == Sampling(0.0, 1.0, 20)


def test_a_config_of_ones_own_is_found_in_its_folder(compose: Compose, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [tinywiki, _self_]\nmax_turns: 9\n")
    config = compose("--config-dir", str(tmp_path), "--config-name", "mine", "--model", "m", "--topk", "4")
    assert (config.max_turns, config.agent.template, config.retriever.topk) == (9, "tinywiki", 4)


NO_RUN = "give that of a run|give the folder of a run"


@pytest.mark.parametrize(
    ("compose", "arguments", "message"),
    by_turns(
        [
            (["--run", "{tmp}/gone"], NO_RUN),
            (["--run", "{tmp}"], NO_RUN),
            (["--run", "{run}/actor/global_step_20"], "perhaps .*a run$"),
            (["--run", "{run}", "--checkpoint", "30"], "there are 20, 100"),
            (["--run", "{run}", "--checkpoint", "newest"], "best, last, or the number"),
            (["--run", "{run}", "--model", "m", "--checkpoint", "20"], "no --model"),
            (["--model", "m", "--checkpoint", "last"], "of a --run"),
            (["--run", "{run}", "--config-name", "tinywiki"], "not both"),
            (["--model", "m", "--config-dir", "configs"], "give --config-name"),
            (["--model", "m", "--config-dir", "{tmp}", "--config-name", "gone"], "no config 'gone.yaml'"),
            (["--run", "{run}", "max_turn=3"], "did you mean 'max_turns'"),
            (["--run", "{run}", "who is it?"], "write key=value"),
            (["--run", "{run}", "--topk", "0"], "retriever.topk: must be at least 1"),
        ]
    ),
)
def test_what_cannot_be_meant(
    compose: Compose, run_dir: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    with pytest.raises(VerlError, match=message):
        compose(*(text.format(tmp=tmp_path, run=run_dir) for text in arguments))


def test_a_run_without_a_checkpoint_yet(compose: Compose, run_as_made: Path, tmp_path: Path) -> None:
    young = shutil.copytree(run_as_made, tmp_path / "young", ignore=lambda _, names: {*names} - {"config.yaml"})
    with pytest.raises(VerlError, match="no saved actor"):
        compose("--run", str(young))


@pytest.mark.parametrize(
    ("compose", "text"),
    by_turns(
        [("model:\n  path: a warm start's\n",), ("{config}\nunheard_of: 1\n",), ("- a list\n",), ("a: [\n",), ("",)]
    ),
)
def test_a_config_that_no_rl_run_wrote(compose: Compose, run_dir: Path, text: str) -> None:
    config = run_dir / "config.yaml"
    config.write_text(text.replace("{config}", config.read_text()))
    with pytest.raises(ConfigError, match="config.yaml (was not written by an RL run|cannot be read)"):
        compose("--run", str(run_dir))


def test_a_secret_that_the_run_did_not_store_has_to_be_given(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "retriever.url=http://me:hunter2@host/retrieve")
    for compose in PROGRAMS:
        with pytest.raises(ConfigError, match="--retriever_url"):
            compose("--run", str(tmp_path / "run"))
    assert of_infer("--run", str(tmp_path / "run"), "--retriever_url", URL).retriever.url == URL


@pytest.mark.parametrize("parse", [infer.parse_arguments, serve_arguments, evaluation_arguments])
@pytest.mark.parametrize("flags", [("--temperature", "-1"), ("--temperature", "nan"), ("--top_p", "0")])
def test_sampling_that_is_impossible_is_refused_before_anything_is_loaded(
    parse: Callable, flags: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("", [*flags]) if parse is evaluation_arguments else parse([*flags])
    assert caught.value.code == 2 and f"argument {flags[0]}: {flags[1]} is not a number" in capsys.readouterr().err


def test_an_override_behind_the_files_of_an_evaluation_is_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        of_evaluation("--model", "m", "--data", "nq=nq.jsonl", "retriever.topk=5")
    assert "retriever.topk=5 is among the files of --data" in capsys.readouterr().err
    config = of_evaluation("--model", "m", "retriever.topk=5", "--data", "nq=nq.jsonl")
    assert config.retriever.topk == 5


def test_a_model_that_is_not_there_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    program = """
import sys
import infer
from search_r1.evaluation.__main__ import main as evaluate
from search_r1.serve.__main__ import main as serve

absent, data = sys.argv[1:]
assert infer.main(["--model", absent, "--question", "who"]) == 2
assert serve(["--model", absent, "--port", "0"]) == 2
assert evaluate(["--model", absent, "--data", f"nq={data}", "--method", "direct", "--output_dir", f"{absent}.out"]) == 2
assert not {"torch", "transformers", "vllm"} & set(sys.modules)
"""
    data = tmp_path / "nq.jsonl"
    data.write_text('{"question": "Who?", "golden_answers": ["me"]}\n')
    command = [sys.executable, "-c", program, str(tmp_path / "absent"), str(data)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(f"error: model {tmp_path}/absent: there is no such folder") == 3
