"""Ask a search agent a question and read how it finds the answer.

    .venv/bin/python infer.py --run RUN_DIR --question "Who wrote ...?"   # a run: its last model and settings
    .venv/bin/python infer.py --model DIR --config-name NAME              # asks for questions until an empty line

It uses the same code for prompt, stop rules, limits and the format of retrieved passages as training. Flags change
single settings, `key=value` changes any key of the training config (`--topk 5 retriever.timeout_s=30`). Transcripts and
answers go to standard output, the log to standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import signal
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from program_end import exit_status
from search_r1.llm_agent.command_line import add_agent_flags, agent_config, agent_sampling
from search_r1.llm_agent.grammar import Grammar
from search_r1.llm_agent.run_retriever import retriever_of_run
from search_r1.script_help import parser_of
from verl.agent.text import whole_characters
from verl.config import Config
from verl.process.startup import PLAIN, leave, log_to_stderr
from verl.process.storage import work_without_home

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.protocol import Trajectory

PROMPT = "\nQuestion (empty to leave): "
NO_ANSWER = 3  # exit status
# What a terminal obeys, as it is written in Python: a web page is not to speak to it. rich leaves out some others.
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n\a\b\v\f\r"}
STYLES = {"think": "dim", "search": "bold cyan", "information": "green", "answer": "bold yellow", "": ""} | {
    "call": "bold cyan",
    "text": "",
}


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status, as `exit_status` says, or `NO_ANSWER` if a question got no answer."""
    args = parse_arguments(arguments)
    log_to_stderr(PLAIN)
    work_without_home()
    # A byte of a question that is no text, or a character that the output's encoding lacks, ends no session.
    for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper) and stream.errors != errors:
            stream.reconfigure(errors=errors)

    def ask() -> int:
        config = agent_config(args)
        with retriever_of_run(args, config):
            return asyncio.run(run(args, config))

    return exit_status(ask, when_interrupted="")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--question", help="the question; without it, questions are read from the terminal")
    add_agent_flags(parser)
    return parser.parse_intermixed_args(arguments)


async def run(args: argparse.Namespace, config: Config) -> int:
    """Answer the question, or every question from the terminal. Returns 1 if the retriever failed in one, else
    `NO_ANSWER` if an episode ended without an answer, else 0.
    """
    from search_r1.llm_agent.agent import open_agent
    from verl.protocol import Status

    console, statuses = Console(highlight=False), set[Status | None]()
    async with open_agent(config, agent_sampling(args, config)) as agent:
        for question in questions(args.question):
            started = time.perf_counter()
            trajectory = await agent.play(agent.prompt(question), args.seed)
            show(console, question, trajectory, agent.tokenizer, agent.template.grammar, time.perf_counter() - started)
            statuses.add(trajectory.status)
    if Status.FAILED in statuses:
        return 1
    return NO_ANSWER if statuses - {Status.ANSWERED} else 0


def questions(question: str | None) -> Iterator[str]:
    """The one given, or lines from the terminal until an empty one or the end of input."""
    if question is not None:
        yield whole_characters(question)
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  with it `input` edits lines and knows earlier ones
    while line := _read_line():
        yield line


def _read_line() -> str:
    """Without a terminal there is nobody to prompt."""
    if not sys.stdin.isatty():
        return sys.stdin.readline().strip()
    if not sys.stdout.isatty():  # then it is for the answers alone
        print(PROMPT, end="", file=sys.stderr, flush=True)
    with _interruptible():
        try:
            return input(PROMPT if sys.stdout.isatty() else "").strip()
        except EOFError:
            return ""


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C ends a wait for input. asyncio's own handler only asks the task to end, once the event loop runs again."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def show(
    console: Console,
    question: str,
    trajectory: Trajectory,
    tokenizer: PreTrainedTokenizerBase,
    grammar: Grammar,
    seconds: float,
) -> None:
    """The episode as it went; coloured on a terminal, plain text elsewhere."""
    from search_r1.llm_agent.transcript import final_answer, read_turns

    body = Text()
    for text, style in parts(trajectory, tokenizer, grammar):
        body.append(text.translate(CONTROLS), style)
    console.print(Text(f"Question: {question}", "bold"), soft_wrap=True)
    console.print(body, soft_wrap=True)
    if trajectory.failure is not None:
        console.print(Text(f"The retriever failed: {trajectory.failure}".translate(CONTROLS), "red"), soft_wrap=True)
    answer = final_answer(read_turns(trajectory, tokenizer, grammar), grammar)
    said = "(none)" if answer is None else answer.translate(CONTROLS)
    console.print(Text(f"Answer: {said}", "bold"), soft_wrap=True)
    searches = f"{trajectory.num_searches} search{'' if trajectory.num_searches == 1 else 'es'}"
    console.print(Text(f"({trajectory.status}, {searches}, {trajectory.num_turns} turns, {seconds:.1f} s)", "dim"))


def parts(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase, grammar: Grammar) -> Iterator[tuple[str, str]]:
    """(text, style) pieces of everything after the prompt, in order; what another wrote begins on a line of its own."""
    from search_r1.llm_agent.transcript import chat_pieces, chat_reply
    from verl.agent.text import decode_turn, unwrapped
    from verl.protocol import WAITING, Source, turns_of_segments

    sampled: tuple[int, ...] = ()
    last = "\n"  # what was written so far
    # Each turn has an event, also one in which no token was sampled.
    events = dict(enumerate(trajectory.events))
    turns = turns_of_segments([segment.source for segment in trajectory.segments], trajectory.events)
    for segment, turn in zip(trajectory.segments, turns, strict=True):
        event, before = events.get(turn, {}), events.get(turn - 1, {})
        if segment.source is Source.POLICY:
            sampled = segment.ids
            text = decode_turn(tokenizer, sampled)
            if "calls" in event:
                pieces = [(part, STYLES[kind]) for kind, part in chat_pieces(tokenizer, sampled, event)]
                text = "".join(part for part, _ in pieces)
            else:
                pieces = [(part, STYLES[kind]) for part, kind in grammar.parts(text)]
        elif segment.source is Source.ENVIRONMENT and WAITING in event:  # the request for a summary
            text = decode_turn(tokenizer, unwrapped(tokenizer, sampled, segment.ids))
            pieces = [(text, STYLES["text"])]
        elif segment.source is Source.CONTEXT and WAITING in before:  # the reply that was held back for the summary
            text = f"\n{chat_reply(before)}\n\n" if "calls" in before else before[WAITING]
            pieces = [(text, STYLES["information"])]
        elif "calls" in event and segment.source is not Source.PROMPT:  # a further sequence has the results in it
            text = f"\n{chat_reply(event)}\n\n"
            pieces = [(text, STYLES["information"])]
        elif segment.source is Source.ENVIRONMENT:
            text = decode_turn(tokenizer, unwrapped(tokenizer, sampled, segment.ids))
            pieces = [(text, STYLES["information"])]
        else:
            continue
        if text and not last.endswith("\n") and not text.startswith("\n"):
            yield "\n", ""
        yield from pieces
        last = text or last


if __name__ == "__main__":
    leave(main())
