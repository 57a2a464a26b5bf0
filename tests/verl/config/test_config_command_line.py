"""The command line: options, what they print, and that a mistake is told before torch is imported."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from verl.config import Config, load_config, load_config_from_argv
from verl.config.docs import PAGE, page
from verl.config.sections.fields import UNITS, WARM_START_UNITS, is_known, is_number, leaves, unit_of
from verl.config.sections.schema import SftConfig

REPOSITORY = Path(__file__).resolve().parents[3]


def test_overrides_and_options_may_be_mixed(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text("defaults: [ppo_trainer, _self_]\nmax_turns: 3\n")
    argv = ["+trainer.val_only=true", "--config-name", "small", "--config-dir", str(tmp_path), "data.max_obs_length=9"]
    config = load_config_from_argv(argv)
    assert (config.max_turns, config.trainer.val_only, config.data.max_obs_length) == (3, True, 9)


def test_without_arguments_the_default_name_is_loaded() -> None:
    assert load_config_from_argv([], default_name="ppo_trainer") == load_config("ppo_trainer")


def test_help_lists_every_key_with_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        load_config_from_argv(["--help"])
    printed = capsys.readouterr().out
    assert exit_.value.code == 0
    assert not [key for key in leaves(Config) if f"  {key} = " not in printed]
    words = " ".join(printed.split())
    assert not [key.path for key in leaves(Config).values() if not key.meaning or key.meaning not in words]


def test_cfg_job_prints_what_would_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as exit_:
        load_config_from_argv(["--cfg", "job", "max_turns=7"])
    assert exit_.value.code == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    assert load_config("printed", [], str(tmp_path)) == load_config("ppo_trainer", ["max_turns=7"])


def test_an_unknown_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        load_config_from_argv(["--multiruns"])
    assert exit_.value.code == 2
    assert "--multiruns" in capsys.readouterr().err


ANSWERS = [
    ("actor_rollout_ref.actor.optim.lrr=1", 2, "did you mean 'actor_rollout_ref.actor.optim.lr'"),
    ("algorithm.adv_estimator=grpo", 2, "compares the trajectories of one prompt"),
    ("reward_model.enable=true", 2, "reward_model.enable=True is not available"),
    ("--help", 0, "actor_rollout_ref.actor.optim.lr = "),
]
# One process runs the program with each of its arguments, and says what each run returned and what is imported.
PROGRAM = """
import contextlib, io, json, runpy, sys
answers, module = [], sys.argv[1]
for argument in sys.argv[2:]:
    sys.argv = ["program", argument]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            runpy.run_module(module, run_name="__main__")
        except SystemExit as ended:
            answers.append((ended.code, said.getvalue()))
print(json.dumps([answers, [name for name in ("torch", "vllm", "ray", "transformers") if name in sys.modules]]))
"""


@pytest.mark.parametrize("module", ["main_ppo", "main_ppo_format"])
def test_an_entry_point_answers_before_anything_heavy_is_imported(module: str) -> None:
    command = [sys.executable, "-c", PROGRAM, f"verl.trainer.{module}", *(argument for argument, _, _ in ANSWERS)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    answers, heavy = json.loads(done.stdout)
    assert heavy == []
    for (found, said), (argument, status, words) in zip(answers, ANSWERS, strict=True):
        assert found == status and words in said, argument


def test_the_documentation_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m verl.config.docs"


PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
KEY = re.compile(
    rf"`((?:{'|'.join(sorted({key.partition('.')[0] for key in leaves(Config) if '.' in key}))})(?:\.\w+)+)[=`]"
)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_key_in_the_documentation_exists(path: Path) -> None:
    named = set(KEY.findall(path.read_text(encoding="utf-8")))
    assert not [key for key in named if not (is_known(Config, key) or is_known(SftConfig, key))]


def test_the_readme_names_keys() -> None:
    found = set(KEY.findall((REPOSITORY / "README.md").read_text(encoding="utf-8")))
    assert {"algorithm.adv_estimator", "trainer.logger", "reward.function"} <= found


# Units that a meaning names as well.
NAMED = {
    unit: re.compile(words, re.IGNORECASE)
    for unit, words in {
        "tokens": "token|length|longest",
        "prompts": "prompts",
        "trajectories": "trajector|sequences|samples",
        "RL steps": r"\bsteps?\b|versions",
        "share": "share|probability|ratio|first",
        "seconds": "seconds",
        "GiB": "GiB",
        "MiB": "MiB",
        "passages": "passages",
        "queries": "queries",
        "workers": "workers",
        "nodes": "nodes|machines",
        "threads": "threads",
    }.items()
}


@pytest.mark.parametrize(("schema", "units"), [(Config, UNITS), (SftConfig, WARM_START_UNITS)])
def test_every_number_has_a_unit_that_its_meaning_does_not_contradict(schema: type, units: dict[str, str]) -> None:
    numbers = [key for key in leaves(schema).values() if is_number(key)]
    assert len(numbers) > 15
    for key in numbers:
        unit = unit_of(key, units)
        assert unit
        if unit in NAMED and "Has no effect" not in key.meaning:
            assert NAMED[unit].search(key.meaning), f"{key.path}: {unit}, but {key.meaning}"
    assert not [key.path for key in leaves(schema).values() if not is_number(key) and unit_of(key, units)]
