"""Write rows of a warm start: episodes that search for the answers of questions and give them.

    .venv/bin/search-r1 data episodes --questions nq/train.jsonl --model models/smollm2 --output data/warm_start.parquet

A written policy asks the retriever with the question, with its key words, or with the titles of its gold passages, and
answers what it has read. The environment of a run plays the episodes, so rows have exactly the tokens of a rollout. A
question of which the answer is not in what was found is left out and counted.

With --from_trajectories, the rows are good trajectories of a run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from long_task import Progress
from program_end import exit_status
from search_r1.data.episodes.queries import STRATEGIES, Thoughts
from search_r1.data.qa.paragraphs import gold_titles
from search_r1.data.qa.records import kind_of
from search_r1.data.qa.source_files import BadRows, QuestionFile, named_file, read_questions
from search_r1.llm_agent.command_line import (
    EPISODE_FLAGS,
    add_episode_flags,
    agent_config,
    chooses,
    config_file_of,
    stored_agent,
)
from search_r1.script_help import parser_of
from verl.errors import ConfigError, DataError
from verl.process.startup import PLAIN, leave, log_to_stderr
from verl.process.storage import whole_file

if TYPE_CHECKING:
    from search_r1.data.episodes.demonstrator import Asked, EpisodeWriter
    from search_r1.llm_agent.grammar import Grammar
    from search_r1.llm_agent.templates import Template
    from verl.config import Config

_AT_ONCE = 32  # questions whose episodes are played at the same time: the retriever answers their searches in batches
_ROWS_A_GROUP = 1024
# Flags that trajectories have no use for: of the episodes' own, all but --run and --template.
_OF_QUESTIONS = ("format", "strategies", "thoughts", "seed", "skip_bad_rows", *EPISODE_FLAGS)
_OF_TRAJECTORIES = ("by", "at_least", "per_prompt")
_STRINGS = ("data_source", "question", "strategy")
_SEGMENT = pa.struct([("source", pa.string()), ("text", pa.string()), ("ids", pa.list_(pa.int32()))])
_CALL = pa.struct(
    [
        ("id", pa.string()),
        ("type", pa.string()),
        ("function", pa.struct([("name", pa.string()), ("arguments", pa.string())])),
    ]
)
_MESSAGE = pa.struct(
    [
        *((name, pa.string()) for name in ("role", "content", "reasoning_content", "name", "tool_call_id")),
        ("tool_calls", pa.list_(_CALL)),
    ]
)
SCHEMAS = {
    "tags": pa.schema([("segments", pa.list_(_SEGMENT)), *((name, pa.string()) for name in _STRINGS)]),
    "chat": pa.schema(
        [("messages", pa.list_(_MESSAGE)), ("tools", pa.string()), *((name, pa.string()) for name in _STRINGS)]
    ),
}
"""The columns of the rows, by `agent.format`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the rows; returns the exit status, as `exit_status` says. Unless it is 0, nothing is written."""
    args = parse_arguments(argv)
    log_to_stderr(PLAIN)

    def write() -> None:
        if args.from_trajectories:
            _from_trajectories(args)
        else:
            asyncio.run(_from_questions(args, config_of(args)))

    return exit_status(write, "nothing was written")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; ends the process on a wrong one."""
    parser = parser_of(__doc__, "python -m search_r1.data.episodes")
    add = parser.add_argument
    # questions, or trajectories
    add("--questions", metavar="[NAME=]FILE", help="question rows of any format that prompts are made of, or prompts")
    add("--from_trajectories", nargs="+", type=Path, metavar="FILE", help="trajectories/*.parquet of a run instead")
    add("--output", required=True, type=Path, help="the parquet file to write")
    # how the episodes go
    add("--format", choices=("tags", "chat"), help="how the policy acts (default: agent.format of the config: tags)")
    add(
        "--strategies",
        type=_strategies,
        default=STRATEGIES,
        help=f"what to search for, separated by commas (default: all of {','.join(STRATEGIES)})",
    )
    add("--thoughts", type=Path, metavar="FILE", help="sentences of your own, in lines such as 'search: I look it up.'")
    add("--seed", type=int, default=0, help="seed of strategies and thoughts (default: %(default)s)")
    add("--num_rows", type=_positive, help="write so many rows at most")
    add("--skip_bad_rows", action="store_true", help="leave broken question rows out instead of ending")
    # which trajectories are good enough
    add(
        "--by",
        choices=("reward", "em"),
        default="reward",
        help="with --from_trajectories: what has to reach --at_least",
    )
    add("--at_least", type=float, default=1.0, help="with --from_trajectories (default: %(default)s)")
    add("--per_prompt", type=_positive, metavar="K", help="with --from_trajectories: the K best of each prompt")
    add_episode_flags(parser)
    args = parser.parse_intermixed_args(argv)
    if (args.questions is None) == (args.from_trajectories is None):
        parser.error("give either --questions or --from_trajectories")
    source, unread = ("questions", _OF_TRAJECTORIES) if args.questions else ("from_trajectories", _OF_QUESTIONS)
    given = [
        f"--{name.replace('config_', 'config-')}" for name in unread if getattr(args, name) != parser.get_default(name)
    ]
    if given := given + (args.overrides if args.from_trajectories else []):
        parser.error(f"without effect with --{source}: {', '.join(given)}; leave it out")
    if args.output.suffix != ".parquet":
        parser.error(f"--output {args.output} has to be named .parquet")
    read = args.from_trajectories or [Path(args.questions), Path(args.questions.partition("=")[2])]
    if args.output.resolve() in [path.resolve() for path in read]:
        parser.error(f"--output {args.output} is also read; name another file")
    return args


def config_of(args: argparse.Namespace) -> Config:
    """The config of the run that the episodes are like. Raises `ConfigError`, or `DataError` as `agent_config` does."""
    chat = args.format == "chat"
    formats = [f"agent.format={args.format}"] if args.format else []
    own_template = chooses(args, "template") or args.run is not None or args.config_name is not None
    config = agent_config(args, [*formats, *(["agent.template=chat"] if chat and not own_template else [])])
    if not config.do_search:
        raise ConfigError("do_search is false: an episode without a search finds nothing; leave that setting out")
    return config


async def _from_questions(args: argparse.Namespace, config: Config) -> None:
    from search_r1.llm_agent.templates import template_of

    source = named_file(args.questions) or _unnamed(args.questions)
    bad_rows = BadRows(args.skip_bad_rows)
    asked = enumerate(_asked(source, template_of(config.agent), config, bad_rows))
    thoughts = Thoughts() if args.thoughts is None else Thoughts.read(args.thoughts)
    written, left_out = Counter[str](), Counter[str]()
    async with (
        _open_writer(config, args.strategies, thoughts) as writer,
        aclosing(_rows(writer, asked, args.seed)) as found,
    ):
        schema, rows = SCHEMAS[config.agent.format], list[dict[str, Any]]()
        with (
            whole_file(args.output) as path,
            pq.ParquetWriter(path, schema) as file,
            Progress("episodes", args.num_rows, unit="rows") as progress,
        ):
            async for row in found:
                if isinstance(row, str):
                    left_out[row] += 1
                else:
                    written[row["strategy"]] += 1
                    rows.append(row)
                progress.reach(written.total(), f"{left_out.total()} questions left out")
                if len(rows) == _ROWS_A_GROUP:
                    file.write_table(pa.Table.from_pylist(rows, schema))
                    rows = []
                if written.total() == args.num_rows:
                    break
            file.write_table(pa.Table.from_pylist(rows, schema))
            if not written:
                raise DataError(f"no row could be made, and {args.output} is not written{_lines('left out', left_out)}")
    # The summary.
    for line in bad_rows.listed:
        print(f"skipped: {line}", file=sys.stderr)
    print(f"{args.output}: {written.total()} rows from {written.total() + left_out.total()} questions", end="")
    print(_lines("by strategy", written) + _lines("left out", left_out))


def _lines(what: str, counts: Counter[str]) -> str:
    return "".join(f"\n  {what}: {count} {name}" for name, count in counts.most_common())


async def _rows(
    writer: EpisodeWriter, asked: Iterator[tuple[int, Asked]], seed: int
) -> AsyncGenerator[dict[str, Any] | str, None]:
    """The row of each question in order, or the reason why it has none. Raises `EnvironmentUnavailable`.

    The draws for a question depend on the seed and its number alone.
    """
    from search_r1.data.episodes.demonstrator import LeftOut

    async def write(number: int, one: Asked) -> dict[str, Any] | str:
        try:
            return await writer.write(one, random.Random(f"{seed}/{number}"))
        except LeftOut as reason:
            return str(reason)

    while batch := list(islice(asked, _AT_ONCE)):
        for row in await asyncio.gather(*(write(number, one) for number, one in batch)):
            yield row


@asynccontextmanager
async def _open_writer(config: Config, strategies: Sequence[str], thoughts: Thoughts) -> AsyncIterator[EpisodeWriter]:
    """The writer for the environment of `config`, whose retriever has answered once."""
    from search_r1.data.episodes.demonstrator import ChatTurns, EpisodeWriter, TagTurns, Turns
    from search_r1.llm_agent.agent import limits_within, load_tokenizer, with_model_found
    from search_r1.llm_agent.environment import SearchEnvironment
    from search_r1.llm_agent.templates import template_of
    from search_r1.tools.environment import ChatSearchEnvironment
    from verl.agent.environment import make_environment

    # The environment of the run decides what a turn that searches looks like.
    config = with_model_found(config)
    tokenizer, window = load_tokenizer(config)
    environment = make_environment(config, tokenizer)
    turns: Turns
    if isinstance(environment, ChatSearchEnvironment):
        if "search" not in [tool.name for tool in environment.tools.tools]:
            raise ConfigError("agent.tools has no search, which the episodes call; add it")
        turns = ChatTurns(environment.format, environment.schemas, environment.answer_tag)
    elif isinstance(environment, SearchEnvironment) and environment.grammar.search is not None:
        template = template_of(config.agent)
        turns = TagTurns(tokenizer, environment.grammar, f"<{environment.grammar.think}>" in template.text)
    else:
        raise ConfigError(
            f"agent.environment={config.agent.environment} with agent.template={config.agent.template} has no search "
            "that a written policy knows; use the environments and a template that search"
        )
    try:
        await environment.check()
        limits, longest = limits_within(config, window), config.data.max_start_length
        yield EpisodeWriter(environment, tokenizer, limits, longest, turns, strategies, thoughts)
    finally:
        await environment.close()


# Questions, with the messages that a run would ask them with.


def _unnamed(text: str) -> QuestionFile:
    path = Path(text).expanduser()
    return QuestionFile(path.name.partition(".")[0], "train", path)


def _asked(source: QuestionFile, template: Template, config: Config, bad_rows: BadRows) -> Iterator[Asked]:
    from search_r1.data.episodes.demonstrator import Asked

    prompts, num_read = _prompts(source.path, config), 0
    for row in read_questions(source.path, source.split, bad_rows, sets_apart=True):
        if prompts is None:
            messages = template.messages(row.question)
        else:
            # Bad rows are missing among the questions, but not among the prompts: go on to the prompt of the same row.
            messages = next(islice(prompts, row.index - num_read, None))
            num_read = row.index + 1
        try:
            titles = gold_titles(json.loads(row.metadata or "null") or {})
        except ValueError as error:
            bad_rows.found(f"{source.path}: question {row.id}", str(error))
            continue
        yield Asked(row.question, messages, row.golden_answers, titles, source.data_source)


def _prompts(path: Path, config: Config) -> Iterator[list[dict[str, str]]] | None:
    """The column `prompt` of a prompt file, row by row; None for a file of another kind.

    Raises `DataError` if its prompts ask for other tags than the config's template, and for an empty prompt.
    """
    if kind_of(path) != ".parquet" or not path.is_file():
        return None
    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be read as parquet: {error}") from error
    if "prompt" not in file.schema_arrow.names:
        return None

    # A generator of its own: whether the file has prompts is known at the call, not at the first row.
    def read() -> Iterator[list[dict[str, str]]]:
        from verl.agent.environment import environment_class

        metadata = {key.decode(): value.decode() for key, value in (file.schema_arrow.metadata or {}).items()}
        for number, messages in enumerate(
            messages for batch in file.iter_batches(columns=["prompt"]) for messages in batch.column(0).to_pylist()
        ):
            if not messages:
                raise DataError(f"{path}: row {number}, column 'prompt': it is empty; make the prompt file again")
            text = "\n".join(message["content"] for message in messages)
            # A file is made with one template, so its first prompt stands for all.
            problem = None if number else environment_class(config).check_prompt_file(config, metadata, text)
            if problem is not None and problem.contradicts:
                raise DataError(f"{path}: {problem.found}; give the template that the file was made with: --template")
            yield messages

    return read()


# Trajectories of a run.


def _from_trajectories(args: argparse.Namespace) -> None:
    from search_r1.replay.rejection import Criteria, choose, sft_table
    from search_r1.replay.rescoring import read_stored
    from search_r1.rewards.metrics import exact_match
    from search_r1.rewards.reading import gold_answers
    from verl.tracking.trajectory_store import write_trajectory_table

    stored = read_stored(args.from_trajectories)
    # Exact match takes the place of the stored rewards, which may be those of another reward function.
    if args.by == "em":
        grammars = {str(file): _grammar_of(file, args) for file in args.from_trajectories}
        for trajectory, place in zip(stored.trajectories, stored.places, strict=True):
            said = str((trajectory.events or [{}])[-1].get("answer") or "")
            # A chat model's answer is all that it said in its last turn.
            answer = grammars[place.rpartition(": row ")[0]].extract_answer(said)
            targets = gold_answers(trajectory.prompt)
            trajectory.reward = float(exact_match(said if answer is None else answer, targets))
    choice = choose(stored, Criteria(args.at_least, args.per_prompt, dedupe=True))
    left_out = _lines("left out", choice.dropped)
    if not choice.kept:
        raise DataError(f"no trajectory is good enough, and {args.output} is not written{left_out}")
    table = sft_table(stored, choice.kept, text_only=False).slice(0, args.num_rows)
    write_trajectory_table(args.output, table)
    by_source = _lines("of", Counter(table["data_source"].to_pylist()))
    print(f"{args.output}: {len(table)} rows from {len(stored.trajectories)} trajectories{by_source}{left_out}")


def _grammar_of(file: Path, args: argparse.Namespace) -> Grammar:
    """The grammar by which the trajectories of `file` are read: that of --template, else that of their run."""
    from search_r1.llm_agent.grammar import SEARCH_R1
    from search_r1.llm_agent.templates import load_template, template_of
    from verl.tracking.trajectory_store import run_of_file

    if args.template is not None:
        return load_template(args.template).grammar
    agent = stored_agent(run_of_file(file) if args.run is None else config_file_of(args.run).parent)
    return SEARCH_R1 if agent is None else template_of(agent).grammar


def _strategies(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names or not set(names) <= set(STRATEGIES):
        raise argparse.ArgumentTypeError(f"{text!r} has to name some of {','.join(STRATEGIES)}, with commas between")
    return names


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


if __name__ == "__main__":
    leave(main())
