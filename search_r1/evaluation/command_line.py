"""The flags of `python -m search_r1.evaluation`, and what they mean: among them, the methods by name."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from search_r1.evaluation.judging import add_judge_flags, check_judge_flags, judge_settings
from search_r1.llm_agent.command_line import add_agent_flags, agent_config, agent_sampling, chooses
from search_r1.llm_agent.templates import template_of
from search_r1.script_help import parser_of
from verl.agent.tools.loading import uses_retriever
from verl.config import AgentConfig, Config
from verl.config.rules.without_effect import SUMMARIES, TEMPLATE, TOOLS
from verl.config.sections.fields import is_known
from verl.errors import ConfigError
from verl.process.secrets import mask_secrets

if TYPE_CHECKING:
    from search_r1.evaluation.openai_sampler import Server


@dataclass(frozen=True)
class MethodTraits:
    """`template` None: that of the agent's settings. `retrieves`: it uses a retriever; `loops`: more than one turn."""

    template: str | None
    retrieves: bool
    loops: bool
    needs_context: bool = False


METHODS = {
    "search": MethodTraits(None, retrieves=True, loops=True),
    "direct": MethodTraits("direct", retrieves=False, loops=False),
    "cot": MethodTraits("r1", retrieves=False, loops=False),
    "rag": MethodTraits("rag", retrieves=True, loops=False, needs_context=True),
    "ircot": MethodTraits("ircot", retrieves=True, loops=True, needs_context=True),
}


OF_TURNS = {name: getattr(AgentConfig(), name) for name in ("environment", "feedback")}
"""Settings of the agent's turns that are recorded where they are not these, the defaults."""


def retrieves(method: str, config: Config) -> bool:
    """Whether the retriever of `config` is asked by the method: `search` does so by the tools of a chat model."""
    traits = METHODS[method]
    return traits.retrieves and (traits.needs_context or uses_retriever(config))


def overrides_of(method: str, own_template: bool) -> tuple[str, ...]:
    """Config overrides of a method; with `own_template` the user chose the template."""
    traits, overrides = METHODS[method], []
    if traits.template is not None and not own_template:
        overrides.append(f"agent.template={traits.template}")
    if not traits.loops:
        overrides.append("do_search=false")
    return tuple(overrides)


def check_template(method: str, config: Config) -> None:
    """Raises `ConfigError` for a template that the method cannot fill."""
    template = template_of(config.agent)
    if template.needs_context != METHODS[method].needs_context:
        kind = "with {context}" if METHODS[method].needs_context else "without {context}"
        raise ConfigError(f"--method {method} needs a template {kind}; {template.name} is none")


def parse_arguments(description: str | None, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Exits with status 2 for invalid arguments."""
    parser = parser_of(description, "python -m search_r1.evaluation")
    add_agent_flags(parser)
    _add_flags(parser)
    args = parser.parse_intermixed_args(arguments)
    if args.server is None and args.run is None and not chooses(args, "model"):
        parser.error("give --run RUN_DIR, --model DIR, or --server URL with --served_model NAME")
    if args.server is not None and args.model is not None:
        parser.error("the model is at --server: leave --model out")
    for text in args.data:
        if is_known(Config, text.partition("=")[0].lstrip("+")):
            parser.error(f"{text} is among the files of --data: put it before --data, or after another flag")
    if args.server is not None and (args.served_model is None or args.tokenizer is None):
        parser.error("--server needs --served_model NAME and --tokenizer DIR")
    check_judge_flags(parser, args)
    return args


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--output_dir", type=Path, required=True, help="folder for the results; an interrupted evaluation resumes there"
    )
    # where the model is, if at a server
    add("--server", help="address of an OpenAI-compatible server (vLLM, SGLang) that serves the model")
    add("--served_model", help="name of the model at that server")
    add("--tokenizer", help="folder or hub name of the model's tokenizer, with --server")
    add(
        "--request_deadline_s",
        type=float,
        default=600.0,
        help="maximum wait for a turn, in seconds (default: %(default)s)",
    )
    # what is asked
    add("--method", choices=list(METHODS), default="search", help="the agent or a baseline (default: %(default)s)")
    add("--data", nargs="+", default=[], metavar="NAME=FILE", help="jsonl(.gz) file of a set, or a parquet prompt file")
    add("--data_dir", type=Path, help="folder with <set>/<split>.jsonl; of each set it uses test, else dev, else train")
    add(
        "--subset",
        type=_positive,
        help="evaluate a fixed stratified subset of this size of each set (default: all questions)",
    )
    add("--subset_seed", type=int, default=0, help="seed that selects another subset (default: %(default)s)")
    add("--corpus_path", type=Path, help="jsonl(.gz) file of the retriever's passages; adds the coverage audit")
    # who judges, and how the run goes on
    add_judge_flags(parser)
    add("--concurrency", type=_positive, default=64, help="number of questions at once (default: %(default)s)")
    add(
        "--max_redraws",
        type=_natural,
        default=2,
        help="number of further attempts at a failed question (default: %(default)s)",
    )
    add("--allow_failed", action="store_true", help="exit with status 0 even if questions failed")
    add("--restart", action="store_true", help="discard earlier results in --output_dir")


def method_config(args: argparse.Namespace) -> Config:
    """The agent's settings for the method. Raises `ConfigError`."""
    config = agent_config(args, overrides_of(args.method, own_template=chooses(args, "template")))
    check_template(args.method, config)
    if args.method == "ircot" and config.agent.format == "chat":
        raise ConfigError(
            "--method ircot reads thoughts between tags, turn by turn: leave agent.format=chat out, or use --method rag"
        )
    return config


def server_of(args: argparse.Namespace) -> Server | None:
    from search_r1.evaluation.openai_sampler import Server  # imports torch

    if args.server is None:
        return None
    return Server(args.server, args.served_model, args.tokenizer, args.request_deadline_s, args.concurrency)


def settings_of(args: argparse.Namespace, config: Config, retriever: Any) -> dict[str, Any]:
    """What the answers depend on besides the questions, without secrets; `retriever` describes the service's index."""
    template, rollout = template_of(config.agent), config.actor_rollout_ref.rollout
    settings: dict[str, Any] = {
        "method": args.method,
        "model": _model(args, config),
        "dtype": rollout.dtype if args.server is None else None,
        "template": {"name": template.name, "fingerprint": template.fingerprint}
        | ({"tags_in_thoughts": True} if template.grammar.tags_in_thoughts else {}),
        "sampling": asdict(agent_sampling(args, config)) | {"seed": args.seed},
        "max_turns": config.max_turns if METHODS[args.method].loops else 0,
        "max_prompt_length": config.data.max_prompt_length,
        "max_response_length": config.data.max_response_length,
        "max_obs_length": config.data.max_obs_length,
        "subset": None if args.subset is None else {"size": args.subset, "seed": args.subset_seed},
        "judge": judge_settings(args),
    }
    # Without what is set for each turn; with the tools of a chat model, and the index, if the method uses one.
    for name in ("max_tokens", "stop", "stop_token_ids", "ignore_eos"):
        del settings["sampling"][name]
    of_turns = {name: getattr(config.agent, name) for name in OF_TURNS}
    if of_turns != OF_TURNS:
        settings["agent"] = {name: value for name, value in of_turns.items() if value != OF_TURNS[name]}
    if config.agent.compact_at is not None:
        settings["summaries"] = {name: getattr(config.agent, name) for name in SUMMARIES}
    if config.agent.format == "chat":
        settings["chat"] = {name: getattr(config.agent, name) for name in (*TOOLS, *TEMPLATE)}
    if config.agent.program is not None:
        settings["program"] = config.agent.program
    if retrieves(args.method, config):
        source = config.retriever.engine or config.retriever.url
        settings["retriever"] = {"source": source, "topk": config.retriever.topk, "serves": retriever}
        if config.retriever.engine is not None and config.retriever.engine_kwargs:
            settings["retriever"]["engine_kwargs"] = config.retriever.engine_kwargs
    return dict(mask_secrets(settings))


def _model(args: argparse.Namespace, config: Config) -> dict[str, Any]:
    if args.server is not None:
        return {"server": args.server, "name": args.served_model, "tokenizer": args.tokenizer}
    folder = config.actor_rollout_ref.model.path
    files = sorted(path for end in ("safetensors", "bin") for path in Path(folder).glob(f"*.{end}"))
    weights = {path.name: [path.stat().st_size, int(path.stat().st_mtime)] for path in files}
    tokenizer = {} if config.data.tokenizer is None else {"tokenizer": config.data.tokenizer}
    return {"path": folder, "weights": weights or None} | tokenizer


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _natural(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError
    return number
