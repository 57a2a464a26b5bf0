"""Every published command line composes, validates, and puts each value where it belongs.

The commands are data: published_overrides.tsv says which override stands with which value in which of the 14 scripts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from verl.config import Config, check_supported, load_config
from verl.config.rules.config_warnings import config_warnings
from verl.config.rules.predicates import reasons_to_score_before
from verl.config.rules.rewards import with_format_reward
from verl.config.sections.fields import value_at
from verl.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[3]
SPECIFICATION = REPOSITORY.parent / "shared" / "spec" / "search_r1_interface.md"
TABLE = Path(__file__).with_name("published_overrides.tsv")
ALL_SCRIPTS = ("rG", "rP", "1G", "1P", "2G", "2P", "3G", "3P", "mnG32", "mnG72", "mnP32", "eval", "E", "E2")

# What the shell variables of the scripts stand for here.
SAMPLE_VALUES = {
    "$DATA_DIR": "data/nq_hotpotqa_train",
    "$TRAIN_DATA_DIR": "data/train",
    "$TEST_DATA_DIR": "data/test",
    "$BASE_MODEL": "Qwen/Qwen2.5-3B",
    "$EXPERIMENT_NAME": "nq_hotpotqa_train-search-r1-grpo-qwen2.5-3b-em",
    "$WAND_PROJECT": "Search-R1",
    "$N_NODES": "4",
    "<author's home>": "/home/author",
}

# The scripts that start main_ppo_format; the others start main_ppo.
FORMAT_SCRIPTS = ("3G", "3P")


@dataclass(frozen=True)
class PublishedOverride:
    """One value of one key, and the scripts that give it. `key` keeps its `+`."""

    key: str
    value: str
    scripts: tuple[str, ...]

    @property
    def sample(self) -> str:
        """The value with the shell variables replaced."""
        text = self.value
        for name, sample in SAMPLE_VALUES.items():
            text = text.replace(name, sample)
        return text

    @property
    def argument(self) -> str:
        return f"{self.key}={self.sample}"


def scripts_of(text: str) -> tuple[str, ...]:
    return ALL_SCRIPTS if text == "ALL" else tuple(text.split(","))


def read_table() -> list[PublishedOverride]:
    rows = (line.split("\t") for line in TABLE.read_text(encoding="utf-8").splitlines()[1:])
    return [PublishedOverride(key, value, scripts_of(scripts)) for key, value, scripts in rows]


def parse_specification(text: str) -> list[PublishedOverride]:
    """The rows of the section 'Every override key used by a shipped script' of the interface description."""
    section = text.split("## 2.3 ", 1)[1].split("\n# ", 1)[0]
    found = []
    for key, cell in re.findall(r"^\| `([^`]+)` \| (.*) \|$", section, flags=re.MULTILINE):
        uses = re.findall(r"`([^`]*)`: ([A-Za-z0-9,]+)", cell)
        found += [PublishedOverride(key, value, scripts_of(scripts)) for value, scripts in uses]
    return found


def overrides_of(script: str) -> list[PublishedOverride]:
    return [row for row in read_table() if script in row.scripts]


@cache
def config_of(script: str) -> Config:
    """What the arguments of a script give, among which `trainer.default_hdfs_dir=null` stands twice, as published."""
    arguments = [row.argument for row in overrides_of(script)]
    return load_config("ppo_trainer", [*arguments, "trainer.default_hdfs_dir=null"])


def parsed(text: str) -> Any:
    """What a value on the command line means."""
    if text.startswith("["):
        return [parsed(part) for part in text[1:-1].split(",") if part]
    if text.lower() in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[text.lower()]
    try:
        return float(text)
    except ValueError:
        return text


@pytest.mark.parametrize("script", ALL_SCRIPTS)
def test_published_command_validates_and_every_value_arrives(script: str) -> None:
    config = config_of(script)
    wrong = {}
    for row in overrides_of(script):
        arrived = value_at(config, row.key.lstrip("+"))
        arrived = list(arrived) if isinstance(arrived, tuple) else arrived
        if arrived != parsed(row.sample):
            wrong[row.key] = (row.sample, arrived)
    assert not wrong


def test_the_table_has_every_script_at_its_published_size() -> None:
    sizes = {script: len(overrides_of(script)) for script in ALL_SCRIPTS}
    assert min(sizes.values()) > 50
    assert {row.key for script in ALL_SCRIPTS for row in overrides_of(script)} == {row.key for row in read_table()}
    assert all(len({row.key for row in overrides_of(script)}) == size for script, size in sizes.items())


@pytest.mark.parametrize("script", ALL_SCRIPTS)
def test_this_version_has_what_a_published_command_asks_for(script: str) -> None:
    config = config_of(script)
    config = with_format_reward(config) if script in FORMAT_SCRIPTS else config
    check_supported(config)
    assert list(config_warnings(config)) == []


@pytest.mark.parametrize("script", FORMAT_SCRIPTS)
def test_published_format_scores_reach_the_reward_of_training_alone(script: str) -> None:
    config = config_of(script)
    with pytest.raises(ConfigError, match=r"reward_model.structure_format_score=0.2 .*main_ppo_format"):
        check_supported(config)
    reward = with_format_reward(config).reward
    assert reward.kwargs == {"structure_format_score": 0.2, "final_format_score": 0.1, "retrieval_score": 0.0}
    assert reward.val_kwargs == {}


@pytest.mark.parametrize("script", ["rP", "1P", "2P", "3P", "mnP32", "rG", "E"])
def test_published_ppo_commands_put_the_kl_into_the_reward_and_grpo_ones_do_not(script: str) -> None:
    config = config_of(script)
    assert config.algorithm.use_kl_in_reward is (config.algorithm.adv_estimator == "gae")


@pytest.mark.parametrize(("script", "steps"), [("rG", 10), ("E", 10), ("rP", 2)])
def test_published_batch_sizes_need_the_old_log_probs_before_the_update(script: str, steps: int) -> None:
    """docs/speed.md says so, and why."""
    reasons = list(reasons_to_score_before(config_of(script)))
    assert f"after the first of {steps} optimizer steps the policy has changed" in reasons[0]
    assert len(reasons) == (2 if script == "rP" else 1)


@pytest.mark.skipif(not SPECIFICATION.is_file(), reason="the interface description is not beside this checkout")
def test_the_table_equals_the_interface_description() -> None:
    assert read_table() == parse_specification(SPECIFICATION.read_text(encoding="utf-8"))
