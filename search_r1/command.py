"""`search-r1 COMMAND ...`: every program of the project behind one command.

Each command starts a program, which you can also start directly with the same arguments. This file lists the programs
without importing them, so that `search-r1 --help` answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

CLONE = Path(__file__).resolve().parents[1]  # of the repository, if this is one
AS_THEY_ARE = {"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []}
COMPLETION = """\
To complete commands with the Tab key in this shell (bash; for zsh or fish write that name instead of bash):

    eval "$(_SEARCH_R1_COMPLETE=bash_source search-r1)"
"""


@dataclass(frozen=True)
class Program:
    """What a command starts: a module (`verl.trainer.sft`), or a script of the repository (`scripts/quickstart.sh`)."""

    name: str
    target: str
    summary: str
    example: str

    @property
    def is_script(self) -> bool:
        return "/" in self.target

    @property
    def is_benchmark(self) -> bool:
        return self.target.startswith("scripts/bench/")

    def words(self, arguments: Sequence[str]) -> list[str]:
        """The whole command line. Raises ClickException for a script without a clone of the repository."""
        if not self.is_script:
            return [sys.executable, "-m", self.target, *arguments]
        script = CLONE / self.target
        if not script.is_file():
            raise click.ClickException(
                f"'search-r1 {self.name}' starts {self.target}, which is part of the repository and not of the "
                "installed package: clone the repository and start it there"
            )
        return ["bash" if script.suffix == ".sh" else sys.executable, str(script), *arguments]


RUN = "--config-name tinywiki actor_rollout_ref.model.path=MODEL data.train_files=A.parquet data.val_files=B.parquet"
WARM_START = "--config-name tinywiki_sft model.path=MODEL data.train_files=ROWS.parquet"
EVALUATION = "--run RUN --data B.parquet --output_dir RESULTS"
COMPARISON = "--before WARM_START --after TRAINED"
INDEX = "--retrieval_method bm25 --corpus_path WIKI.jsonl --save_dir INDEX"
EXPORT = "export STEP.parquet --output ROWS.parquet"
CONTEXTS = "--set hotpotqa/dev hotpot_dev_distractor_v1.json --output_dir data/multihop"
BROWSECOMP = "--queries browsecomp_plus_decrypted.jsonl --corpus corpus/*.parquet --output_dir data/browsecomp_plus"
SMALL_MODEL = "smollm2 --output_dir models/smollm2"
EPISODES = "--questions nq/train.jsonl --model models/smollm2 --output data/warm_start.parquet"
PROMPTS = "scripts/data_process"
AUDIT = "audit --corpus_path corpus.jsonl --questions nq/test.jsonl"

PROGRAMS = (
    Program("quickstart", "scripts/quickstart.sh", "Train a search agent end to end on this machine.", "--seed 3"),
    Program("train", "verl.trainer.main_ppo", "Train by reinforcement learning.", RUN),
    Program(
        "sft", "verl.trainer.sft", "Train on written trajectories by supervised learning (warm start).", WARM_START
    ),
    Program("preflight", "verl.trainer.preflight", "Check whether a run would start, and fit.", RUN),
    Program(
        "dry-run",
        "verl.trainer.dry_run",
        "Estimate memory and time of a run on GPUs, without a GPU.",
        f"--gpus 8x80 {RUN}",
    ),
    Program(
        "plan", "verl.trainer.plan", "Compare layouts of a run on a cluster.", "--model Qwen/Qwen2.5-7B --gpus 8xH100"
    ),
    Program("report", "verl.tracking.report", "Write a report about a run.", "RUN"),
    Program("eval", "search_r1.evaluation", "Evaluate a model on question sets.", EVALUATION),
    Program("compare", "search_r1.evaluation.compare", "Compare evaluations, paired by question.", COMPARISON),
    Program("infer", "infer", "Ask a search agent a question.", '--run RUN --question "Who wrote Ulysses?"'),
    Program("serve", "search_r1.serve", "Serve a search agent to chat clients.", "--run RUN"),
    Program("view", "search_r1.viewer", "View trajectories and curves in a browser.", "RUN"),
    Program("replay", "search_r1.replay", "Rescore or export stored trajectories.", EXPORT),
    Program("retriever", "search_r1.search.retrieval_server", "Start a retrieval server.", "--corpus_path WIKI.jsonl"),
    Program("index", "search_r1.search.index_builder", "Build a retrieval index.", INDEX),
    Program("doctor", "search_r1.doctor", "Check this installation.", ""),
)
DATA = (
    Program("tinywiki", "search_r1.data.tinywiki", "Write a TinyWiki folder.", "--output_dir data/tinywiki"),
    Program("download", "scripts/download.py", "Download corpus, indexes and questions.", "--save_path data --what qa"),
    Program(
        "documents", "search_r1.data.documents", "Make a corpus of your own documents.", "docs/ --output corpus.jsonl"
    ),
    Program(
        "contexts", "search_r1.data.contexts", "Make a corpus of the paragraphs that questions come with.", CONTEXTS
    ),
    Program("browsecomp", "search_r1.data.browsecomp", "Make corpus and questions of BrowseComp-Plus.", BROWSECOMP),
    Program("corpus", "search_r1.search.corpus_tool", "Count the answers that a corpus has, or complete it.", AUDIT),
    Program("model", "search_r1.data.model", "Make a small pretrained model or encoder.", SMALL_MODEL),
    Program("episodes", "search_r1.data.episodes", "Write warm-start rows from questions and a retriever.", EPISODES),
    Program("train", f"{PROMPTS}/qa_search_train_merge.py", "Write training prompts.", "--data_sources nq,hotpotqa"),
    Program("test", f"{PROMPTS}/qa_search_test_merge.py", "Write test prompts.", "--data_sources nq,triviaqa"),
)


class Group(click.Group):
    """Lists its commands in the order they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def benchmarks() -> tuple[Program, ...]:
    """The benchmark programs, if this is a clone of the repository."""
    found = []
    for path in sorted((CLONE / "scripts" / "bench").glob("*.py")):
        text = path.read_text()
        if '__name__ == "__main__"' in text:
            summary = text.split('"""')[1].partition("\n")[0]  # the first line of its docstring
            found.append(Program(path.stem.replace("_", "-"), f"scripts/bench/{path.name}", summary, ""))
    return tuple(found)


def programs() -> dict[tuple[str, ...], Program]:
    """Every program, keyed by the words of its command: `("data", "tinywiki")`."""
    groups: dict[tuple[str, ...], tuple[Program, ...]] = {(): PROGRAMS, ("data",): DATA, ("bench",): benchmarks()}
    return {(*group, one.name): one for group, found in groups.items() for one in found}


def group_of(name: str, summary: str, programs: Sequence[Program]) -> click.Group:
    """A command group with one command for each of the programs."""
    group = Group(name, help=summary, no_args_is_help=True, context_settings={"max_content_width": 120})
    for program in programs:
        group.add_command(_command(program))
    return group


def _command(program: Program) -> click.Command:
    def start(arguments: tuple[str, ...]) -> None:
        if {"--help", "-h"} & set(arguments[:1]):
            example = f"{click.get_current_context().command_path} {program.example}".rstrip()
            click.echo(f"{program.summary}\n\n    {example}\n")
            if program.is_benchmark:
                from search_r1.script_help import help_of

                click.echo(help_of(CLONE / program.target))
                return
        words = program.words(arguments)
        sys.stdout.flush()
        os.execvp(words[0], words)

    everything = click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)
    return click.Command(
        program.name,
        callback=start,
        params=[everything],
        short_help=program.summary,
        context_settings=AS_THEY_ARE,
        add_help_option=False,
    )


def make() -> click.Group:
    """The whole command tree."""
    summary = "Train language models to search while they reason, by reinforcement learning."
    group = group_of("search-r1", f"{summary}\n\n\b\n{COMPLETION}", PROGRAMS)
    group.add_command(group_of("data", "Make or download data.", DATA))
    group.add_command(group_of("bench", "Run a benchmark.", benchmarks()))
    return group


def main() -> None:
    make()(prog_name="search-r1")
