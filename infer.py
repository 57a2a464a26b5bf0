"""Ask a search agent a question and read how it finds the answer.

    python infer.py --model DIR --question "Who wrote ...?"
    python infer.py --model DIR                              # asks for questions until an empty line

The prompt, the stop rules, the limits and the layout of retrieved passages are those of training, by the same code. A
model trained on another template or with other limits than the published ones gets them by its training config,
`--config-name NAME`, or flag by flag (`--template tinywiki --max_turns 3 ...`).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from verl.config import Config, load_config
from verl.errors import ConfigError, VerlError

if TYPE_CHECKING:
    from search_r1.llm_agent.environment import SearchEnvironment
    from verl.agent.episode import EpisodeLimits
    from verl.protocol import Trajectory

PUBLISHED_MODEL = "PeterJinGo/SearchR1-nq_hotpotqa_train-qwen2.5-7b-em-ppo"
PUBLISHED_LIMITS = {"max_turns": 4, "max_prompt_length": 4096, "max_response_length": 500, "max_obs_length": 500}
STYLES = {"think": "dim", "search": "bold cyan", "information": "green", "answer": "bold yellow"}
_PART = re.compile(r"(<(think|search|answer)>.*?</\2>)", re.DOTALL)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 after an error that is printed."""
    args = parse_arguments(arguments)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        return run(args, build_config(args))
    except VerlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default=PUBLISHED_MODEL, help="folder in Hugging Face format, or hub name (default: %(default)s)")
    add("--question", help="without it, questions are read from the terminal")
    add("--config-name", help="a training config in configs/ whose limits, template and retriever apply")
    add("--template", help="name of a shipped prompt template (search_r1, tinywiki) or path of a text file")
    add("--retriever_url", help="address of the retrieval service")
    add("--topk", type=int, help="passages per search")
    add("--max_turns", type=int, help="most searches; one more turn without search follows")
    add("--max_prompt_length", type=int, help="longest context a turn starts from, in tokens")
    add("--max_response_length", type=int, help="most tokens of one turn")
    add("--max_obs_length", type=int, help="most tokens of one block of passages")
    add("--temperature", type=float, default=0.0, help="0: the most likely token each time (default: %(default)s)")
    add("--top_p", type=float, default=1.0, help="nucleus probability (default: %(default)s)")
    add("--seed", type=int, help="makes an answer at a temperature above 0 repeatable")
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), help="number format of the model")
    return parser.parse_args(arguments)


def build_config(args: argparse.Namespace) -> Config:
    """A training config with the flags applied. Raises `ConfigError` for a name or value that cannot be used."""
    flags = {name: value for name, value in vars(args).items() if value is not None}
    if args.config_name is None:
        flags = PUBLISHED_LIMITS | flags
    keys = {
        "model": "actor_rollout_ref.model.path",
        "dtype": "actor_rollout_ref.rollout.dtype",
        "template": "agent.template",
        "retriever_url": "retriever.url",
        "topk": "retriever.topk",
        "max_turns": "max_turns",
        "max_prompt_length": "data.max_prompt_length",
        "max_response_length": "data.max_response_length",
        "max_obs_length": "data.max_obs_length",
    }
    overrides = [f"{key}={_quoted(flags[name])}" for name, key in keys.items() if name in flags]
    return load_config(args.config_name or "ppo_trainer", overrides)


def _quoted(value: object) -> str:
    """A Hydra value: texts quoted, so that characters of its grammar stand for themselves.

    In a quoted text a backslash is an escape in front of a quote only.
    """
    if not isinstance(value, str):
        return str(value)
    escaped = re.sub(r"(\\*)('|$)", lambda match: 2 * match[1] + match[2].replace("'", "\\'"), value)
    return f"'{escaped}'"


def run(args: argparse.Namespace, config: Config) -> int:
    """Answer the question, or every question from the terminal."""
    from search_r1.llm_agent.environment import SearchEnvironment
    from search_r1.llm_agent.templates import load_template

    template = load_template(config.agent.template)
    tokenizer, window = load_tokenizer(args.model)
    environment = SearchEnvironment.from_config(config, tokenizer)
    limits = limits_within(config, window)
    with asyncio.Runner() as runner:
        try:
            runner.run(environment.check())
            with Agent(args, config, limits, template, tokenizer, environment) as agent:
                runner.run(agent.engine.start())
                return max((runner.run(agent.answer(question)) for question in questions(args.question)), default=0)
        finally:
            runner.run(environment.close())


def load_tokenizer(model: str) -> tuple[Any, int | None]:
    """The tokenizer, and how many tokens the model was made for if it says so. Raises `ConfigError` without a model."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        positions = getattr(AutoConfig.from_pretrained(model), "max_position_embeddings", None)
        return AutoTokenizer.from_pretrained(model), positions
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {model}: no model could be loaded from it: {error}") from error


def limits_within(config: Config, window: int | None) -> EpisodeLimits:
    """The limits of training, with no sequence longer than the model's `window`."""
    from verl.agent.episode import EpisodeLimits

    limits = EpisodeLimits.from_config(config)
    return limits if window is None else replace(limits, max_model_length=min(limits.window, window))


def questions(question: str | None) -> Iterator[str]:
    """The one given, or lines from the terminal until an empty one or the end of input."""
    if question is not None:
        yield question
        return
    while line := _read_line():
        yield line


def _read_line() -> str:
    try:
        return input("\nQuestion (empty to leave): ").strip()
    except EOFError:
        return ""


class Agent:
    """A loaded model in front of its environment; answers one question after another."""

    def __init__(
        self,
        args: argparse.Namespace,
        config: Config,
        limits: EpisodeLimits,
        template: str,
        tokenizer: Any,
        environment: SearchEnvironment,
    ) -> None:
        from verl.agent.environment import Sampling
        from verl.rollout.engine import VLLMEngine

        rollout = config.actor_rollout_ref.rollout
        self.limits, self.template, self.tokenizer, self.environment = limits, template, tokenizer, environment
        self.sampling = Sampling(temperature=args.temperature, top_p=args.top_p)
        self.seed = args.seed
        self.console = Console(highlight=False)
        self.engine = VLLMEngine(
            args.model,
            max_model_len=limits.window,
            dtype=rollout.dtype,
            kv_cache_gib=rollout.kv_cache_gib,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            num_threads=rollout.num_threads,
        )

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.shutdown()

    async def answer(self, question: str) -> int:
        """Print the episode of one question. Returns 1 when the retriever failed in it, else 0."""
        from search_r1.llm_agent.templates import render
        from verl.agent.episode import run_episode
        from verl.data.prompts import encode_prompt
        from verl.protocol import Prompt, Status

        ids = tuple(encode_prompt(self.tokenizer, render(self.template, question)))
        started = time.perf_counter()
        trajectory = await run_episode(
            Prompt(ids, "infer", {"question": question}),
            "infer",
            self.engine,
            self.environment,
            self.tokenizer,
            self.sampling,
            self.limits,
            self.seed,
        )
        show(self.console, question, trajectory, self.tokenizer, time.perf_counter() - started)
        return int(trajectory.status is Status.FAILED)


def show(console: Console, question: str, trajectory: Trajectory, tokenizer: Any, seconds: float) -> None:
    """The episode as it went; coloured on a terminal, plain text elsewhere."""
    from search_r1.rewards.exact_match import extract_trajectory_answer

    body = Text()
    for text, style in parts(trajectory, tokenizer):
        body.append(text, style)
    console.print(Text(f"Question: {question}", "bold"), soft_wrap=True)
    console.print(body, soft_wrap=True)
    if trajectory.failure is not None:
        console.print(Text(f"The retriever failed: {trajectory.failure}", "red"), soft_wrap=True)
    answer = extract_trajectory_answer(trajectory, tokenizer)
    console.print(Text(f"Answer: {answer if answer is not None else '(none)'}", "bold"), soft_wrap=True)
    searches = f"{trajectory.num_searches} search{'' if trajectory.num_searches == 1 else 'es'}"
    console.print(Text(f"({trajectory.status}, {searches}, {trajectory.num_turns} turns, {seconds:.1f} s)", "dim"))


def parts(trajectory: Trajectory, tokenizer: Any) -> Iterator[tuple[str, str]]:
    """(text, style) pieces of everything after the prompt, in order."""
    from verl.agent.text import decode_turn
    from verl.protocol import Source

    for segment in trajectory.segments:
        text = decode_turn(tokenizer, segment.ids)
        if segment.source is Source.ENVIRONMENT:
            yield text, STYLES["information"]
        elif segment.source is Source.POLICY:
            yield from _policy_parts(text)


def _policy_parts(text: str) -> Iterator[tuple[str, str]]:
    end = 0
    for match in _PART.finditer(text):
        yield text[end : match.start()], ""
        yield match.group(1), STYLES[match.group(2)]
        end = match.end()
    yield text[end:], ""


if __name__ == "__main__":
    sys.exit(main())
