"""The flags by which inference, evaluation and serving choose a model, a retriever, a prompt and its limits.

They are keys of the training config under shorter names: `--config-name` takes over all settings of a training run.
"""

from __future__ import annotations

import argparse
import re

from verl.agent.environment import Sampling
from verl.config import Config, load_config

PUBLISHED_MODEL = "PeterJinGo/SearchR1-nq_hotpotqa_train-qwen2.5-7b-em-ppo"
PUBLISHED_LIMITS = {"max_turns": 4, "max_prompt_length": 4096, "max_response_length": 500, "max_obs_length": 500}
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


def add_agent_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default=PUBLISHED_MODEL, help="folder in Hugging Face format, or hub name (default: %(default)s)")
    add("--config-name", help="a training config in configs/ whose limits, template and retriever apply")
    add("--template", help="name of a shipped prompt template (search_r1, tinywiki, ...) or path of a text file")
    add("--retriever_url", help="address of the retrieval service")
    add("--search_engine", help="dotted name of a class with search(query), asked instead of the service")
    add("--topk", type=int, help="passages per search")
    add("--max_turns", type=int, help="most searches; one more turn without search follows")
    add("--max_prompt_length", type=int, help="longest context a turn starts from, in tokens")
    add("--max_response_length", type=int, help="most tokens of one turn")
    add("--max_obs_length", type=int, help="most tokens of one block of passages")
    add("--temperature", type=float, default=0.0, help="0: the most likely token each time (default: %(default)s)")
    add("--top_p", type=float, default=1.0, help="nucleus probability (default: %(default)s)")
    add("--seed", type=int, help="makes answers at a temperature above 0 repeatable")
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), help="number format of the model")
    add("--tensor_parallel_size", type=int, default=1, help="GPUs of the model (default: %(default)s)")


def agent_config(args: argparse.Namespace, overrides: tuple[str, ...] = ()) -> Config:
    """A training config with the flags applied. Raises `ConfigError` for a name or value that cannot be used."""
    flags = {name: value for name, value in vars(args).items() if value is not None}
    if args.config_name is None:
        flags = PUBLISHED_LIMITS | flags
    chosen = [f"{key}={_quoted(flags[name])}" for name, key in KEYS.items() if name in flags]
    return load_config(args.config_name or "ppo_trainer", [*chosen, *overrides])


def agent_sampling(args: argparse.Namespace) -> Sampling:
    return Sampling(temperature=args.temperature, top_p=args.top_p)


def _quoted(value: object) -> str:
    """A Hydra value: texts quoted, so that characters of its grammar stand for themselves.

    In a quoted text a backslash is an escape in front of a quote only.
    """
    if not isinstance(value, str):
        return str(value)
    escaped = re.sub(r"(\\*)('|$)", lambda match: 2 * match[1] + match[2].replace("'", "\\'"), value)
    return f"'{escaped}'"
