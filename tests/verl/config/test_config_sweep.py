"""Which runs `-m` asks for, and what Hydra's own settings and options mean."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from run_config import run_config

from verl.config import Config, load_config, load_config_from_argv
from verl.config.loading.command_line import combinations, is_sweep
from verl.errors import ConfigError

LR = "actor_rollout_ref.actor.optim.lr"


def test_every_combination_the_last_key_changes_fastest() -> None:
    found = combinations(Config, ["max_turns=3", "trainer.seed=0,1", f"{LR}=1e-6,5e-7"])
    assert [one.name for one in found] == ["seed=0,lr=1e-06", "seed=0,lr=5e-07", "seed=1,lr=1e-06", "seed=1,lr=5e-07"]
    assert found[1].values == {"trainer.seed": "0", LR: "5e-07"}
    assert found[1].overrides == ("max_turns=3", "trainer.seed=0", f"{LR}=5e-07")
    config = run_config(found[1].overrides)
    assert (config.trainer.seed, config.actor_rollout_ref.actor.optim.lr, config.max_turns) == (0, 5e-7, 3)


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["trainer.seed=range(1,4)"], ["seed=1", "seed=2", "seed=3"]),
        (["trainer.seed=choice(7,9)"], ["seed=7", "seed=9"]),
        (["trainer.seed=1,2", "trainer.seed=5,6"], ["seed=5", "seed=6"]),
        (["trainer.seed=1,2", "max_turns=1,2", "max_turns=4"], ["seed=1", "seed=2"]),
        (["actor_rollout_ref.model.path=org/a,'b c'"], ["path=org_a", "path=b_c"]),
        (["actor_rollout_ref.model.path=~/a,~/b"], ["path=_a", "path=_b"]),
        (["actor_rollout_ref.model.path=mod\u00e8les/a, mod\u00e8les/b"], ["path=mod_les_a", "path=mod_les_b"]),
        (["critic.optim.lr=1,2", f"{LR}=3,4"][:1], ["lr=1", "lr=2"]),
        (["critic.optim.lr=1,2", f"{LR}=3"], ["lr=1", "lr=2"]),
        (["critic.optim.lr=1,2", f"{LR}=3,4"], [f"critic.optim.lr={a},{LR}={b}" for a in (1, 2) for b in (3, 4)]),
        (["agent.template='a?','a!'"], ["run_0", "run_1"]),
        (["agent.stop_strings=[a,b],[c]"], ["stop_strings=_a_b_", "stop_strings=_c_"]),
    ],
)
def test_values_and_the_names_of_their_folders(overrides: list[str], names: list[str]) -> None:
    assert [one.name for one in combinations(Config, overrides)] == names


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["max_turns=3"], "a key needs several values"),
        (["trainer.seed=interval(0,1)"], "its values one by one"),
        (["trainer.seed=glob(*)"], "its values one by one"),
        (["trainer.seed=range(3,0)"], "its values one by one"),
        (["actor_rollout_ref.model.path=~/a,'~/b'"], "cannot be read .* quote a value with special characters"),
    ],
)
def test_what_is_no_sweep(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        combinations(Config, overrides)


@pytest.mark.parametrize("folder", ["hydra.run.dir", "+hydra.run.dir", "hydra.sweep.dir"])
def test_hydras_folder_is_the_run_folder(folder: str) -> None:
    assert load_config(overrides=[f"{folder}=/a/b", "hydra.job.chdir=False"]).trainer.default_local_dir == "/a/b"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["hydra.run.dir=x", "trainer.default_local_dir=y"], "hydra.run.dir and trainer.default_local_dir both name"),
        (["hydra.job.chdir=true"], "stays in the folder that it was started in"),
        (["hydra/launcher=submitit_slurm"], "started one after the other"),
        (["hydra.job.name=x"], "trainer.experiment_name names a run"),
        (["hydra/job_logging=disabled"], "results are in trainer.default_local_dir"),
    ],
)
def test_hydras_other_settings_are_told_from_ours(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(overrides=overrides)


def test_a_tilde_gives_the_default_again(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\nmax_turns: 9\nreward: {kwargs: {a: 1, b: 2}}\n"
        "actor_rollout_ref: {rollout: {prompt_length: 7}}\n"
    )
    given = ["~max_turns", "~reward.kwargs.a", "~actor_rollout_ref.rollout.prompt_length", "data.max_prompt_length=999"]
    config = load_config("mine", given, str(tmp_path))
    assert (config.max_turns, config.reward.kwargs) == (load_config().max_turns, {"b": 2})
    assert config.actor_rollout_ref.rollout.prompt_length == 999  # follows again


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("~max_turns=3", "write ~max_turns, without a value"),
        ("~reward.kwargs.absent", "does not exist"),
        ("~reward", "is a section"),
        ("~max_turn", "did you mean 'max_turns'?"),
    ],
)
def test_a_tilde_that_means_nothing(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(overrides=[override])


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        load_config_from_argv(list(argv))
    assert exit_.value.code == 0
    return capsys.readouterr().out


def test_a_section_of_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--cfg", "job", "--resolve", "-p", "algorithm.kl_ctrl", "algorithm.kl_ctrl.kl_coef=0.25"]
    lines = printed(capsys, *argv).splitlines()
    assert lines[0] == "# @package algorithm.kl_ctrl" and "kl_coef: 0.25" in lines and len(lines) < 8
    with pytest.raises(ConfigError, match="no such section; there are data, actor_rollout_ref"):
        load_config_from_argv(["--cfg", "job", "-p", "algorithms"])


def test_where_the_settings_come_from(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [tinywiki, _self_]\nmax_turns: 9\n")
    text = printed(capsys, "--info", "--config-path", str(tmp_path), "--config-name=mine", "max_turns=3")
    files = [Path(line).name for line in text.splitlines() if line.endswith(".yaml")]
    assert files == ["ppo_trainer.yaml", "tinywiki.yaml", "mine.yaml"]
    assert str(tmp_path) in text and "++max_turns=3" in text


def test_options_that_do_not_go_together(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_config_from_argv(["--resolve"])
    assert "--cfg job" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="takes one configuration"):
        load_config_from_argv(["-m", "trainer.seed=0,1"])


@pytest.mark.parametrize("shown", [("--cfg", "job"), ("--info",)])
def test_what_shows_one_configuration_starts_no_sweep(
    shown: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        is_sweep(["-m", "trainer.seed=0,1", *shown], "ppo_trainer")
    assert exit_.value.code == 2 and "show one configuration: leave out -m" in capsys.readouterr().err
    assert is_sweep(["-m", "trainer.seed=0,1"], "ppo_trainer") and not is_sweep(["-m", "--help"], "ppo_trainer")
