"""A grid of training runs, read from a YAML file: variants of the settings, each trained with several seeds."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from text_file import read_text
from verl.config import Config, load_config, to_yaml
from verl.config.loading.run import load_sft_config
from verl.errors import DataError
from verl.tracking.changed_settings import NOT_SET, changed_settings
from verl.tracking.jsonl_backend import FILE_NAME
from verl.tracking.run_data import RunData, load_run

ROOT = Path(__file__).resolve().parents[2]
WORLDS = Path("runs/experiments")
"""Data and warm starts by options of the data and seed, shared by all experiments."""
SFT_CONFIG = "tinywiki_sft"
SFT_STEPS = load_sft_config(SFT_CONFIG).trainer.total_training_steps
TEST_SCORE = "test/test_score/mean"
CHANGES_BY_ITSELF = {"retriever.url"}
"""Keys that differ from one start of the driver to the next."""

_KEYS = {"title", "config_name", "seeds", "data_options", "common", "runs"}
_RUN_KEYS = {"name", "label", "overrides"}
_FOLDER_NAME = re.compile(r"[a-z0-9_]+")
_NO_FILE_NAME = re.compile(r"[^a-z0-9.]+")


@dataclass(frozen=True)
class World:
    """What the runs of one seed share: `data/`, and the policy after its warm start.

    options: of `python -m search_r1.data.tinywiki`, which makes the data.
    """

    seed: int
    folder: Path
    options: tuple[str, ...] = ()

    @property
    def policy(self) -> Path:
        """It appears whole, as the last thing that the preparation makes."""
        return self.folder / "sft" / f"global_step_{SFT_STEPS}"


@dataclass(frozen=True)
class Variant:
    """One of the settings that are compared; `overrides` win over the experiment's common ones."""

    name: str
    label: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """One training: a variant with a seed."""

    variant: Variant
    world: World
    folder: Path
    config_name: str
    common: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.variant.name}, seed {self.world.seed}"

    def overrides(self, retriever_url: str) -> list[str]:
        """Everything that the training gets on its command line after `--config-name`."""
        data = self.world.folder / "data"
        return [
            *self.common,
            *self.variant.overrides,
            f"data.train_files={data}/train.parquet",
            f"data.val_files={data}/validation.parquet",
            f"data.test_files={data}/test.parquet",
            f"actor_rollout_ref.model.path={self.world.policy}",
            f"retriever.url={retriever_url}",
            f"trainer.seed={self.world.seed}",
            f"trainer.experiment_name={self.variant.name}_seed{self.world.seed}",
            f"trainer.default_local_dir={self.folder}",
            "trainer.overwrite=archive",
        ]

    @cached_property
    def config(self) -> Config:
        """Composed and checked. Raises ConfigError."""
        return load_config(self.config_name, self.overrides("http://127.0.0.1:8000/retrieve"))

    def finished(self) -> RunData:
        """What the run left. Raises DataError saying why it does not count as finished."""
        if not (self.folder / FILE_NAME).is_file():
            raise DataError(f"{self.folder} holds no run yet")
        run, config = load_run(self.folder), self.config
        last, wanted = max(run.metrics), config.trainer.total_training_steps
        changed = _changed(run.config, yaml.safe_load(to_yaml(config)))
        if changed:
            raise DataError(f"{self.folder} was trained with other values of {', '.join(changed)}")
        if last != wanted:
            raise DataError(f"{self.folder} ended at step {last} of {wanted}")
        if last not in run.curve(TEST_SCORE):
            raise DataError(f"{self.folder} has no test result")
        return run

    def why_unfinished(self) -> str | None:
        """None for a finished run."""
        try:
            self.finished()
        except DataError as error:
            return str(error)
        return None


@dataclass(frozen=True)
class Experiment:
    """`name` is that of the file; seeds and variants in the order of the table."""

    name: str
    title: str
    config_name: str
    seeds: tuple[int, ...]
    data_options: tuple[str, ...]
    common: tuple[str, ...]
    variants: tuple[Variant, ...]

    def runs(self, output_dir: Path, worlds: Path = WORLDS) -> list[Run]:
        """In the order in which they are trained: all variants with the first seed, then with the second."""
        shared = worlds / _NO_FILE_NAME.sub("_", "".join(self.data_options)).strip("_")
        return [
            Run(
                variant,
                World(seed, shared / f"seed{seed}", self.data_options),
                output_dir / variant.name / f"seed{seed}",
                self.config_name,
                self.common,
            )
            for seed in self.seeds
            for variant in self.variants
        ]


def read_experiment(path: Path, seeds: Sequence[int] | None = None, num_steps: int | None = None) -> Experiment:
    """The experiment of a YAML file; `seeds` and `num_steps` replace those it names.

    Raises ValueError for a file that is not one, naming the key.
    """
    tree = _mapping(yaml.safe_load(read_text(path, ValueError)), _KEYS, str(path))
    variants = tuple(_variant(entry, f"{path}, runs[{index}]") for index, entry in enumerate(tree["runs"]))
    names = [variant.name for variant in variants]
    if len(set(names)) != len(names) or not names:
        raise ValueError(f"{path}: give each of the runs a name of its own; the names are {', '.join(names) or 'none'}")
    common = tuple(tree["common"])
    if num_steps is not None:
        common += (f"trainer.total_training_steps={num_steps}",)
    return Experiment(
        name=path.stem,
        title=tree["title"],
        config_name=tree["config_name"],
        seeds=tuple(seeds or tree["seeds"]),
        data_options=tuple(tree["data_options"]),
        common=common,
        variants=variants,
    )


def _variant(entry: Any, where: str) -> Variant:
    fields = _mapping(entry, _RUN_KEYS, where)
    if not _FOLDER_NAME.fullmatch(str(fields["name"])):
        raise ValueError(f"{where}: name {fields['name']!r} becomes a folder; use small letters, digits and _")
    return Variant(fields["name"], fields["label"], tuple(fields["overrides"]))


def _mapping(value: Any, keys: set[str], where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) != keys:
        found = ", ".join(map(str, value)) if isinstance(value, dict) else repr(value)
        raise ValueError(f"{where}: needs exactly the keys {', '.join(sorted(keys))}, and has {found}")
    return value


def _changed(saved: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Keys with another value; a key that only one of the two knows came or went with a version of this project."""
    changes = (change for change in changed_settings(saved, wanted) if NOT_SET not in (change.old, change.new))
    return [change.key for change in changes if change.key not in CHANGES_BY_ITSELF]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that say which runs are meant and where they are."""
    parser.add_argument("experiment", type=Path, help="YAML file of the runs")
    parser.add_argument("--seeds", type=seed_list, help="seeds, as in 3,4,5 (default: those of the file)")
    parser.add_argument("--steps", type=positive, help="training steps (default: those of the file)")
    parser.add_argument("--output_dir", type=Path, help="folder of the runs (default: runs/NAME, NAME of the file)")
    parser.add_argument("--worlds_dir", type=Path, default=WORLDS, help="folder of data and warm starts (%(default)s)")
    parser.add_argument("--publish", action="store_true", help="copy table and figure to docs/results/")


def seed_list(text: str) -> tuple[int, ...]:
    """`3,4,5` as numbers. Raises what argparse turns into a message."""
    seeds = tuple(int(seed) for seed in text.split(","))
    if len(set(seeds)) != len(seeds):
        raise argparse.ArgumentTypeError(f"{text} names a seed twice")
    return seeds


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 on")
    return number
