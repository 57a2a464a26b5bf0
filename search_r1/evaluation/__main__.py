"""Evaluate a model on question-answer sets: the search agent, or a baseline under the same harness.

    .venv/bin/python -m search_r1.evaluation --model DIR --data_dir data/qa --retriever_url URL \\
        --output_dir results/mine
    .venv/bin/python -m search_r1.evaluation --server URL --served_model NAME --tokenizer DIR ...   # vLLM, SGLang

Writes results.json, results.md, wrong_answers.md, records.jsonl (one line per question) and trajectories.parquet. An
interrupted run resumes where it stopped; one with other settings in the same folder is refused.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from program_end import exit_status
from search_r1.evaluation.command_line import (
    METHODS,
    method_config,
    parse_arguments,
    retrieves,
    server_of,
    settings_of,
)
from search_r1.llm_agent.command_line import agent_sampling, chooses
from search_r1.llm_agent.run_retriever import retriever_of_run
from url_text import mask_text
from verl.errors import DataError
from verl.process.startup import PLAIN, leave, log_to_stderr, phase, tell
from verl.process.storage import work_without_home

if TYPE_CHECKING:
    from search_r1.evaluation.questions import Question
    from search_r1.evaluation.store import Store
    from search_r1.llm_agent.agent import SearchAgent
    from verl.agent.messages import Messages
    from verl.config import Config


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status, as `exit_status` says: 1 also if questions failed."""
    args = parse_arguments(__doc__, arguments)
    log_to_stderr(PLAIN)
    work_without_home()

    def run() -> int:
        config = method_config(args)
        with retriever_of_run(args, config) if retrieves(args.method, config) else nullcontext():
            return evaluate(args, config)

    return exit_status(run, f"the same command resumes from what is finished in {args.output_dir}")


def evaluate(args: argparse.Namespace, config: Config) -> int:
    from search_r1.evaluation.methods import text_of
    from search_r1.evaluation.questions import check_prompts, load_questions, stratified_subset
    from search_r1.evaluation.retriever_info import check_same_index, serves
    from search_r1.evaluation.store import SETTINGS, Store

    # Read and check the questions.
    with phase("reading the questions"):
        questions = load_questions(args.data, args.data_dir)
    if uses_own_prompts(args):
        check_prompts(questions, config)
    if args.subset is not None:
        questions = stratified_subset(questions, args.subset, args.subset_seed)
    if args.corpus_path is not None:  # what the audit at the end needs: better known now
        if not args.corpus_path.is_file():
            raise DataError(f"--corpus_path {args.corpus_path} is no file; name the one that the retriever serves")
        for question in questions:
            text_of(question)
    tell(f"{len(questions)} questions: {_counts(questions)}")
    # Ask the retriever which index it serves: the stored answers depend on it.
    served = None
    if retrieves(args.method, config):
        with phase(f"asking the retriever {mask_text(config.retriever.engine or config.retriever.url)}"):
            served = asyncio.run(serves(config.retriever))
    if not args.restart:
        check_same_index(args.output_dir / SETTINGS, served)
    # Open the folder, which refuses other settings than it was made with; then ask what is left, and write the results.
    settings = settings_of(args, config, served) | {"questions": _fingerprint(questions)}
    store = Store(args.output_dir, settings, args.restart)
    asyncio.run(run(args, config, questions, store))
    return conclude(args, config, questions, store, settings)


async def run(args: argparse.Namespace, config: Config, questions: Sequence[Question], store: Store) -> None:
    """Ask the model the remaining questions, then the judge. The judge's API key is checked first."""
    from search_r1.evaluation.judging import judge_answers, make_judge, unjudged
    from search_r1.evaluation.runner import unfinished

    keys = [question.key for question in questions]
    left = unfinished(questions, store)
    # Old answers may lack a verdict only. A judge that cannot be asked is found before the model is.
    judge = make_judge(args) if left or unjudged(keys, store) else None
    if judge is not None:
        with phase(f"asking the judge {args.judge_model} at {mask_text(args.judge_url)}"):
            await judge.check()
    if left:
        await play(args, config, questions, store)
    if judge is not None:
        await judge_answers(judge, keys, store, args.max_redraws)


async def play(args: argparse.Namespace, config: Config, questions: Sequence[Question], store: Store) -> None:
    """Ask the model the remaining questions."""
    from search_r1.evaluation.methods import make_method
    from search_r1.evaluation.runner import Pace, Runner
    from search_r1.evaluation.store import Measurer
    from search_r1.llm_agent.search_engine import Searcher

    traits, own = METHODS[args.method], uses_own_prompts(args)
    own_prompts = [question.messages for question in questions if own and question.messages is not None]
    searcher = Searcher.from_config(config.retriever) if traits.needs_context else None
    try:
        async with _open(args, config, own_prompts) as agent:
            method = make_method(args.method, agent, config, searcher, own_prompts=own)
            # Asked anew for each record: only its replies show whether a server gives ids. Others always have them.
            is_exact = partial(getattr, agent.sampler, "is_exact", True)
            measurer = Measurer(agent.tokenizer, agent.template.grammar, retrieves(args.method, config), is_exact)
            pace = Pace(args.concurrency, args.max_redraws)
            await Runner(method, measurer, store, agent.tokenizer.decode, pace, args.seed).run(questions)
    finally:
        if searcher is not None:
            await searcher.close()


def uses_own_prompts(args: argparse.Namespace) -> bool:
    """Whether the prompts of a prompt file are used as they are: a template was not chosen, and no baseline writes its
    own.
    """
    return args.method == "search" and not chooses(args, "template")


def conclude(
    args: argparse.Namespace,
    config: Config,
    questions: Sequence[Question],
    store: Store,
    settings: dict[str, Any],
) -> int:
    """Write the results and print them. Returns the exit status."""
    from search_r1.evaluation.report import is_wrong, report, wrong_answers
    from search_r1.evaluation.retriever_info import corpus_coverage
    from search_r1.evaluation.store import PAGE, RESULTS, WRONG_ANSWERS, summarize

    # Merge the parts, and read the records back in the questions' order.
    tell(f"scoring {len(questions)} answers")
    store.finish([question.key for question in questions])
    found = store.records()
    records = [found[question.key] for question in questions]
    # Everything in one object, from which the page is made.
    exact = all(record.exact_ids for record in records)
    results = summarize(records) | {"wrong": sum(map(is_wrong, records)), "settings": settings}
    results["run"] = {"concurrency": args.concurrency, "exact_token_ids": exact}
    if args.corpus_path is not None:
        asks = retrieves(args.method, config) and config.retriever.engine is None
        url = config.retriever.url if asks else None
        with phase(f"looking for the gold answers in {args.corpus_path}"):
            results["coverage"] = corpus_coverage(args.corpus_path, questions, url, config.retriever.topk)
    # The files of the results; the page also goes to standard output.
    page = report(results)
    store.write(RESULTS, json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    store.write(PAGE, page)
    store.write(WRONG_ANSWERS, wrong_answers(records))
    print(page)
    tell(f"{args.output_dir} has {PAGE}, {RESULTS}, {WRONG_ANSWERS}, records.jsonl, trajectories.parquet")
    return _status(args, [record.failure for record in records if record.failed])


def _status(args: argparse.Namespace, failures: Sequence[str | None]) -> int:
    if not failures:
        return 0
    print(
        f"{len(failures)} questions failed and are left out of all means; the same command asks them again. "
        f"The first failure: {mask_text(str(failures[0]))}",
        file=sys.stderr,
    )
    return 0 if args.allow_failed else 1


def _open(
    args: argparse.Namespace, config: Config, own_prompts: Sequence[Messages]
) -> AbstractAsyncContextManager[SearchAgent]:
    from search_r1.evaluation.openai_sampler import open_served_agent
    from search_r1.llm_agent.agent import open_agent

    server, sampling = server_of(args), agent_sampling(args, config)
    if server is None:
        return open_agent(config, sampling, own_prompts)
    return open_served_agent(config, sampling, server, own_prompts)


def _counts(questions: Sequence[Question]) -> str:
    """`500 of nq, 500 of hotpotqa in 3 strata`."""
    strata: dict[str, list[str]] = {}
    for question in questions:
        strata.setdefault(question.set_name, []).append(question.stratum)
    sizes = ((name, len(found), len(set(found))) for name, found in strata.items())
    return ", ".join(f"{size} of {name}" + f" in {kinds} strata" * (kinds > 1) for name, size, kinds in sizes)


def _fingerprint(questions: Sequence[Question]) -> dict[str, str]:
    """For each set, the number of its questions and a hash of them that does not depend on their order."""
    rows: dict[str, list[str]] = {}
    for question in questions:
        evidence = [question.evidence] if question.evidence else []
        row = json.dumps([question.id, question.text, question.golden_answers, question.messages, *evidence])
        rows.setdefault(question.set_name, []).append(row)
    return {
        name: f"{len(lines)}, sha256 {hashlib.sha256(chr(10).join(sorted(lines)).encode()).hexdigest()[:16]}"
        for name, lines in rows.items()
    }


if __name__ == "__main__":
    leave(main())
