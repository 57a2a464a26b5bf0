"""A user's own environment and reward, in files of the current folder: those of the documentation, as they stand."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from documented_commands import blocks
from e2e_world import ENV, ROOT
from preflight_run import small_run
from run_config import run_config

from verl.agent.environment import Environment, Generation, Outcome, Sampling, make_environment
from verl.agent.episode import EpisodeLimits, run_episode
from verl.agent.text import encode_text
from verl.config import Config
from verl.errors import ConfigError, EnvironmentUnavailable
from verl.protocol import Prompt, Status
from verl.tracking.trajectory_store import read_trajectories
from verl.trainer.start_checks.inputs import check_inputs

FEEDBACK = "Write <add> 1 + 2 </add>, or an answer."
OWN_CODE = ("agent.environment=my_env.Adder", "reward.function=my_rewards.compute_score")


def documented(page: str) -> str:
    return next(block for _, language, block in blocks((ROOT / "docs" / page).read_text()) if language == "python")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's, and the current one; it is on no path of Python's."""
    (tmp_path / "my_env.py").write_text(documented("environments.md"))
    (tmp_path / "my_rewards.py").write_text(documented("rewards.md"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    for name in ("my_env", "my_rewards", "theirs"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.fixture
def config_of(folder: Path, prompt_file: Path, tiny_model_dir: Path) -> Callable[..., Config]:
    return lambda *overrides: run_config(small_run(prompt_file, folder / "run", tiny_model_dir, *OWN_CODE, *overrides))


class Script:
    def __init__(self, tokenizer: Any, *lines: str) -> None:
        self.turns = iter([encode_text(tokenizer, line) for line in lines])

    async def generate(self, ids: Any, sampling: Sampling) -> Generation:
        turn = next(self.turns)
        return Generation(turn, (-1.0,) * len(turn), "stop")


def test_the_documented_environment_plays_and_starts(config_of: Callable[..., Config], byte_tokenizer: Any) -> None:
    config = config_of()
    check_inputs(config)
    policy = Script(byte_tokenizer, "<add> 1 + 2 </add>", "Hm.", "<answer> 3 </answer>")
    limits = EpisodeLimits(max_turns=3, max_response_length=128, max_context_length=2000)
    prompt = Prompt(encode_text(byte_tokenizer, "1 + 2?"), "sums", {})
    environment = make_environment(config, byte_tokenizer)
    played = run_episode(prompt, "g", policy, environment, byte_tokenizer, Sampling(), limits, 0)
    trajectory = asyncio.run(played)
    text = byte_tokenizer.decode(trajectory.ids)
    assert text == f"1 + 2?<add> 1 + 2 </add>\n3\nHm.\n{FEEDBACK}\n<answer> 3 </answer>"
    assert trajectory.status is Status.ANSWERED


IMPORTS = "from verl.agent.environment import Environment, Outcome\n"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("class Theirs:\n    def step(self): ...", "derives from verl.agent.environment.Environment"),
        ("def Theirs(): ...", "derives from verl.agent.environment.Environment"),
        ("class Theirs(Environment): ...", "lacks step"),
        ("class Theirs(Environment):\n    def step(self, prompt, text, tools_allowed): ...", "write `async def step`"),
        ("class Theirs(Environment):\n    async def step(self, prompt, text, tools_allowed): return 'hm'", "gave 'hm'"),
        ("class Theirs(Environment):\n    async def step(self, prompt, text): ...", r"raised TypeError.*arguments"),
        (
            "class Theirs(Environment):\n    async def step(self, prompt, text, tools_allowed): return {}['x']",
            r"step of theirs.Theirs raised KeyError: 'x' \(theirs.py:3\)",
        ),
        (
            "class Theirs(Environment):\n    async def step(self, *_): ...\n    def __init__(self, size): ...",
            "cannot be made: TypeError: .*'size'",
        ),
        ("import no_such_module", "No module named 'no_such_module'"),
        ("1 / 0", r"importing theirs raised ZeroDivisionError: division by zero \(theirs.py:2\)"),
        ("class Others: ...", "has no attribute 'Theirs'; give module.Name .* a module in the current folder"),
    ],
)
def test_what_an_environment_lacks_is_named_before_a_model_is_loaded(
    code: str, message: str, folder: Path, config_of: Callable[..., Config]
) -> None:
    (folder / "theirs.py").write_text(IMPORTS + code)
    with pytest.raises(ConfigError, match=message) as caught:
        check_inputs(config_of("agent.environment=theirs.Theirs"))
    assert "theirs.Theirs" in str(caught.value)


def test_each_tool_is_tried_that_has_an_example(folder: Path, config_of: Callable[..., Config]) -> None:
    step = """
    example_turns = ("<add> 1 </add>", "<divide> 0 </divide>")
    async def step(self, prompt, text, tools_allowed):
        return Outcome('add', True, False, str(1 / int(text[9:11]) if tools_allowed and 'divide' in text else 1))
"""
    (folder / "theirs.py").write_text(f"{IMPORTS}class Theirs(Environment):{step}")
    with pytest.raises(ConfigError, match="ZeroDivisionError.*for the turn '<divide> 0 </divide>'"):
        check_inputs(config_of("agent.environment=theirs.Theirs"))
    # but not where the run itself starts what may be behind the tools
    check_inputs(config_of("agent.environment=theirs.Theirs", "retriever.placement=per_node", "retriever.launch=serve"))


@pytest.mark.parametrize(
    ("example", "answer"),
    [
        ("I do not know.", "Paris"),
        ("<think> so </think><reply> Rome </reply>", "<think> so </think><reply> Paris </reply>"),
    ],
)
def test_an_answer_is_written_as_in_the_example(example: str, answer: str) -> None:
    class Theirs(Environment):
        example_turn = example

        async def step(self, prompt: Prompt, text: str, tools_allowed: bool) -> Outcome:
            return Outcome("answer", True, True)

    assert Theirs().answer_turn("Paris") == answer


def test_a_check_of_ones_own(folder: Path, config_of: Callable[..., Config]) -> None:
    step = "    async def step(self, *_): return Outcome('answer', True, True)\n"
    check = "    async def check(self): raise EnvironmentUnavailable('start it with: sums --serve')"
    code = f"from verl.errors import EnvironmentUnavailable\nclass Theirs(Environment):\n{step}{check}"
    (folder / "theirs.py").write_text(IMPORTS + code)
    with pytest.raises(EnvironmentUnavailable, match="sums --serve"):
        check_inputs(config_of("agent.environment=theirs.Theirs"))


def done_in(folder: Path, *command: str, status: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=ENV, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == status, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1900)
def test_training_and_inference_find_them(folder: Path, prompt_file: Path, tiny_model_dir: Path) -> None:
    """Ray's workers too; the policy knows nothing, so it is told again and again how to add."""
    settings = small_run(
        prompt_file, folder / "run", tiny_model_dir, *OWN_CODE, "trainer.total_training_steps=1",
        "data.max_response_length=8", "trainer.val_before_train=false", "max_turns=1", "trainer.save_freq=-1",
        "actor_rollout_ref.rollout.kv_cache_gib=0.125", "actor_rollout_ref.rollout.num_threads=1",
    )  # fmt: skip
    done_in(folder, "-m", "verl.trainer.main_ppo", *settings)
    rows = read_trajectories(folder / "run" / "trajectories" / "train_step_1.parquet")
    assert {row["reward"] for row in rows} == {0.0}
    assert all(FEEDBACK in row["response_text"] for row in rows)
    flags = ("--dtype", "float32", "--max_turns", "1", "--max_response_length", "8", "--max_prompt_length", "1000")
    asked = ("--question", "1 + 2?", OWN_CODE[0])
    infer = (str(ROOT / "infer.py"), "--model", str(tiny_model_dir), *flags, *asked)
    assert FEEDBACK in done_in(folder, *infer, status=3), "and there is no answer"
