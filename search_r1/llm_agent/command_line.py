"""The command line of inference, evaluation and serving: which model, retriever and prompt, and within which limits.

All of this makes up a training config. `--run` loads the config in the folder of a training run, `--config-name` one
from configs/ or `--config-dir`; flags are short names for some of its keys, and any key can be set as `key=value`.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from search_r1.llm_agent.templates import TEMPLATE_FILE, stored_template
from verl.agent.environment import Sampling, sampling_of
from verl.config import Config, load_config, load_stored_config
from verl.config.sections.agent import AgentConfig
from verl.errors import ConfigError, DataError
from verl.process.secrets import MASK
from verl.run.last_checkpoint import best_checkpoint, last_checkpoint
from verl.run.saved_state import PREFIX, step_folders
from verl.tracking.tracker import CONFIG_FILE

PUBLISHED = {
    "actor_rollout_ref.model.path": "PeterJinGo/SearchR1-nq_hotpotqa_train-qwen2.5-7b-em-ppo",
    "max_turns": 4,
    "data.max_prompt_length": 4096,
    "data.max_response_length": 500,
    "data.max_obs_length": 500,
}
"""Defaults without `--run` and `--config-name`; the model is the default with the latter, too."""
KEYS = {
    "model": "actor_rollout_ref.model.path",
    "dtype": "actor_rollout_ref.rollout.dtype",
    "tensor_parallel_size": "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "template": "agent.template",
    "retriever_url": "retriever.url",
    "search_engine": "retriever.engine",
    "topk": "retriever.topk",
    "max_turns": "max_turns",
    "max_prompt_length": "data.max_prompt_length",
    "max_response_length": "data.max_response_length",
    "max_obs_length": "data.max_obs_length",
}


_OTHER_KEYS = ("dtype", "tensor_parallel_size", "template")
EPISODE_FLAGS = ("checkpoint", "config_name", "config_dir", *(name for name in KEYS if name not in _OTHER_KEYS))
"""What `add_episode_flags` adds beside `--run` and `--template`."""


def add_agent_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags. Call the parser's `parse_intermixed_args`, since overrides may be anywhere among the flags."""
    add_episode_flags(parser)
    add = parser.add_argument
    # sampling, and the engine that does it
    add(
        "--temperature",
        type=_number(lambda number: number >= 0, "a number of at least 0"),
        help="sampling temperature; 0 is greedy (default: as in validation, which is 0)",
    )
    add(
        "--top_p",
        type=_number(lambda number: 0 < number <= 1, "a number above 0 and at most 1"),
        help="nucleus probability (default: as in validation, which is 1)",
    )
    add("--seed", type=int, help="makes answers at a temperature above 0 reproducible")
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), help="number format of the model")
    add("--tensor_parallel_size", type=int, help="number of GPUs for the model (default: 1)")


def add_episode_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for what an episode is, whoever samples it: model, retriever, prompt and limits.

    Call the parser's `parse_intermixed_args`, since overrides may be anywhere among the flags.
    """
    add = parser.add_argument
    add("overrides", nargs="*", metavar="key=value", help="keys of the training config; they override everything else")
    # where settings and model come from
    add("--run", type=Path, metavar="RUN_DIR", help="folder of a training run, whose model and settings are used")
    add("--checkpoint", metavar="best|last|N", help="which model of the run (default: last)")
    add("--config-name", help="training config whose limits, template and retriever are used")
    add("--config-dir", help="folder that is searched for --config-name before configs/")
    add("--model", help=f"folder in Hugging Face format, or hub name (default: {PUBLISHED[KEYS['model']]})")
    # the prompt, the search, and the limits of an episode
    add("--template", help="name of a shipped prompt template (search_r1, tinywiki, ...) or path of a text file")
    add("--retriever_url", help="address of the retrieval service")
    add("--search_engine", help="dotted name of a class with search(query), used instead of the service")
    add("--topk", type=int, help="passages per search")
    add("--max_turns", type=int, help="maximum number of searches; one more turn without search follows")
    add("--max_prompt_length", type=int, help="maximum context before a turn, in tokens")
    add("--max_response_length", type=int, help="maximum number of tokens per turn")
    add("--max_obs_length", type=int, help="maximum number of tokens per block of passages")


def agent_config(args: argparse.Namespace, overrides: Sequence[str] = ()) -> Config:
    """The training config that the command line describes; the user's overrides come after `overrides`.

    Raises `ConfigError` for an invalid name or value, and `DataError` for a run without the checkpoint.
    """
    _check_sources(args)
    flags = {"tensor_parallel_size": 1} | {name: value for name, value in vars(args).items() if value is not None}
    chosen = {key: flags[name] for name, key in KEYS.items() if name in flags}
    if args.run is not None:
        return _config_of_run(args, chosen, overrides)
    base = PUBLISHED if args.config_name is None else {KEYS["model"]: PUBLISHED[KEYS["model"]]}
    texts = [*_texts(base | chosen), *overrides, *args.overrides]
    return load_config(args.config_name or "ppo_trainer", texts, args.config_dir)


def agent_sampling(args: argparse.Namespace, config: Config) -> Sampling:
    """The config's sampling parameters for validation, overridden by the flags."""
    flags = {"temperature": args.temperature, "top_p": args.top_p}
    chosen: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    return replace(sampling_of(config, "val"), **chosen)


def chooses(args: argparse.Namespace, flag: str) -> bool:
    """Whether the user set the value of `flag`, with the flag or with its config key."""
    keys = (text.partition("=")[0].lstrip("+") for text in args.overrides)
    return getattr(args, flag) is not None or KEYS[flag] in keys


def _check_sources(args: argparse.Namespace) -> None:
    if args.run is not None and (args.config_name or args.config_dir):
        raise ConfigError("--run has settings of its own: give it, or --config-name, but not both")
    if args.config_dir and not args.config_name:
        raise ConfigError(f"--config-dir {args.config_dir}: give --config-name NAME too, a file in that folder")
    if args.checkpoint and (args.run is None or chooses(args, "model")):
        raise ConfigError("--checkpoint chooses among the models of a --run, so it needs that, and no --model")


def _config_of_run(args: argparse.Namespace, chosen: dict[str, Any], overrides: Sequence[str]) -> Config:
    file = config_file_of(args.run)
    # The tokenizer is saved beside each model; the one that training started from may be gone.
    settings: dict[str, Any] = {"data.tokenizer": None}
    if not chooses(args, "model"):
        settings[KEYS["model"]] = str(checkpoint_of(args.run, args.checkpoint or "last"))
    template = file.with_name(TEMPLATE_FILE)  # that of the config is relative to where the run was started
    if not chooses(args, "template") and template.is_file():
        settings[KEYS["template"]] = str(template)
    config = load_stored_config(file, [*_texts(settings | chosen), *overrides, *args.overrides])
    if MASK in config.retriever.url:
        raise ConfigError(f"{file} holds retriever.url without its secret: give the address, --retriever_url URL")
    return config


def _texts(settings: dict[str, Any]) -> list[str]:
    return [f"{key}={_quoted(value)}" for key, value in settings.items()]


def _quoted(value: object) -> str:
    """A Hydra value: texts quoted, so that characters of its grammar stand for themselves.

    In a quoted text a backslash is an escape in front of a quote only.
    """
    if value is None:
        return "null"
    if not isinstance(value, str):
        return str(value)
    escaped = re.sub(r"(\\*)('|$)", lambda match: 2 * match[1] + match[2].replace("'", "\\'"), value)
    return f"'{escaped}'"


def _number(holds: Callable[[float], bool], words: str) -> Callable[[str], float]:
    """The type of an argument: a finite number for which `holds` is true; `words` describe it in the error."""

    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not (math.isfinite(number) and holds(number)):
            raise argparse.ArgumentTypeError(f"{text} is not {words}")
        return number

    return read


# Find the settings and checkpoints in the folder of a training run.


def stored_agent(folder: Path) -> AgentConfig | None:
    """How the run in `folder` reads what its policy wrote, by its own copy of its template; None if there is no run."""
    if not (folder / CONFIG_FILE).is_file():
        return None
    agent = load_stored_config(folder / CONFIG_FILE).agent
    return replace(agent, template=stored_template(folder, agent.template))


def config_file_of(run_dir: Path) -> Path:
    """The run's config file. Raises `ConfigError` if the folder is not that of a run."""
    folder = run_dir.expanduser()
    if not folder.is_dir():
        raise ConfigError(f"--run {run_dir}: there is no such folder; give that of a run (trainer.default_local_dir)")
    if not (folder / CONFIG_FILE).is_file():
        # perhaps a checkpoint was given, whose run is one or two folders above
        above = next((parent for parent in folder.absolute().parents[:2] if (parent / CONFIG_FILE).is_file()), None)
        hint = "" if above is None else f", perhaps {above}"
        raise ConfigError(f"--run {run_dir}: no {CONFIG_FILE} in it; give the folder of a run{hint}")
    return folder / CONFIG_FILE


def checkpoint_of(run_dir: Path, which: str) -> Path:
    """The policy's `best` or `last` checkpoint, or that of a step. Raises `ConfigError`, or `DataError` without it."""
    if which == "best":
        return best_checkpoint(run_dir)
    last = last_checkpoint(run_dir)
    if which == "last":
        return last
    if not which.isdigit():
        raise ConfigError(f"--checkpoint {which}: give best, last, or the number of a step")
    # The models of all saved steps lie side by side.
    path = last.parent / f"{PREFIX}{int(which)}"
    if not (path / "config.json").is_file():
        steps = ", ".join(found.name.removeprefix(PREFIX) for found in step_folders(last.parent))
        raise DataError(f"--checkpoint {which}: {run_dir} has no such step saved; there are {steps}")
    return path
