"""How each kind of command is tried: run where that takes seconds, else up to where it would load an engine.

A script runs to its end in a copy of the repository where Python is a stand-in that writes down its calls; each call is
then tried like a command of its own. What needs a model to train or to answer runs in tests/e2e.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

from documented_commands import ROOT, Checkout, Command
from e2e_world import free_port, wait_until_up
from fastapi import FastAPI
from fastapi.testclient import TestClient
from ray.cloudpickle import register_pickle_by_value, unregister_pickle_by_value

import infer
from search_r1.command import programs
from search_r1.data.browsecomp import parse_arguments as browsecomp_arguments
from search_r1.data.episodes.__main__ import config_of as episodes_config
from search_r1.data.episodes.__main__ import parse_arguments as episodes_arguments
from search_r1.data.model import parse_arguments as model_arguments
from search_r1.evaluation import compare
from search_r1.evaluation.command_line import method_config
from search_r1.evaluation.command_line import parse_arguments as evaluation_arguments
from search_r1.http import process
from search_r1.llm_agent.command_line import agent_config
from search_r1.search import retrieval_server
from search_r1.serve.__main__ import ROUTE, checked_config, parse_arguments
from search_r1.serve.wire import parse_chat
from verl.config import Config, check_supported, load_config, load_config_from_argv
from verl.config.loading.command_line import combinations, is_sweep, load_from_argv
from verl.config.loading.command_line import parse_arguments as training_arguments
from verl.config.loading.run import load_sft_config
from verl.config.rules.rewards import with_format_reward
from verl.config.sections.schema import SftConfig
from verl.planning.dry_run.place import parse_gpus
from verl.single_controller import cluster
from verl.tracking.tracker import Tracker
from verl.trainer import dry_run, plan, preflight
from verl.trainer.sampling.scoring import make_reward

Rule = Callable[[Command, Checkout], object]

# Programs that are not tried, and why.
NOT_OURS = {
    "head": "shows the start of what another command prints",
    "git": "fetches code",
    "pip": "installs from the network",
    "ray": "starts a cluster",
    "kubectl": "asks a cluster; tests/test_cluster_scripts.py checks the files",
    "mkdir": "makes folders for a container",
    "docker": "needs a Docker daemon; tests/test_dockerfile.py looks up what the file names",
    "helm": "asks a cluster; tests/test_cluster_scripts.py checks the files",
    "sbatch": "asks a cluster; tests/test_cluster_scripts.py has a stand-in",
    "ruff": "runs beside this test in scripts/test.sh",
    "lint-imports": "runs beside this test in scripts/test.sh",
    "cp": "copies the reader's files, which the checkout has",
}


def try_typed(command: Command, checkout: Checkout) -> None:
    """As somebody types it in the root of a clone after set-up: its Python is that of the environment by name."""
    for position, word in enumerate(command.words):
        if re.fullmatch(r"(\S*/)?(python|pip)[\d.]*", word) and not word.endswith(
            (".venv/bin/python", ".venv/bin/pip")
        ):
            runs_on_the_system(command.words[position + 1 :])
    try_command(command, checkout)


def runs_on_the_system(arguments: tuple[str, ...]) -> None:
    """By a Python without our packages, as on a machine where nobody has activated the environment."""
    system = [str(Path(sys.base_prefix) / "bin/python3"), "-I", "-S"]
    done = subprocess.run([*system, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"python {' '.join(arguments)}: {done.stderr.strip()[-300:]}; type .venv/bin/python"


def try_command(command: Command, checkout: Checkout) -> None:
    """Raises when the command is wrong, or when no rule or more than one says how to try it."""
    for path in paths_of_ours(command):
        assert path.exists(), f"{command.where}: {path.relative_to(ROOT)} does not exist"
    if Path(command.words[0]).name in NOT_OURS:
        return
    if Path(command.words[0]).name == "search-r1":
        if command.words[1:] == ("--help",):
            return  # tests/search_r1/test_command.py reads what it shows
        command = started_by(command)
    fitting = rules_of(command)
    assert fitting, f"{command.where}: add a way to try `{command.line}` to RULES in {Path(__file__).name}"
    assert len(fitting) == 1, f"{command.where}: more than one rule fits `{command.line}`"
    fitting[0](command, checkout)


def rules_of(command: Command) -> list[Rule]:
    return [rule for pattern, rule in RULES if re.match(rf"(?:{pattern})(?=\s|$)", command.line, re.DOTALL)]


def needs_ray(command: Command) -> bool:
    """Whether Ray must have been started in this process before the command is tried."""
    return runs_on_ray in rules_of(command)


def started_by(command: Command) -> Command:
    """What a command of `search-r1` starts."""
    name, program = next((name, one) for name, one in programs().items() if command.words[1:][: len(name)] == name)
    words = program.words(command.words[1 + len(name) :])
    return replace(command, words=tuple(word.removeprefix(f"{ROOT}/") for word in words))


def paths_of_ours(command: Command) -> Iterator[Path]:
    folders = ("configs/", "docs/", "example/", "requirements/", "scripts/", "search_r1/", "tests/", "verl/")
    for word in command.words:
        value = word.rpartition("=")[2]
        if value.startswith(folders) or re.fullmatch(r"\w+\.(sh|py)", value):
            yield ROOT / value


def rehearses(command: Command, checkout: Checkout) -> list[Command]:
    """The script ends well, what it was given arrives at a program, and every program accepts its arguments."""
    calls = checkout.rehearse(command)
    assert calls, f"{command.line} calls no program"
    scripts = "".join(path.read_text() for path in checkout.folder.glob("**/*.sh"))
    for name in command.variables:
        assert f"${{{name}" in scripts, f"no script reads {name}"
    lines = " ".join(call.line for call in calls)
    for value in [*command.variables.values(), *(word for word in command.words if "=" in word)]:
        assert re.search(rf"(?<![\w.]){re.escape(value)}(?![\w.])", lines), f"{value} is lost in {lines}"
    for call in calls:
        if (line := call.line.replace(str(checkout.folder), "")) not in TRIED:
            try_command(call, checkout)
            TRIED.add(line)
    return calls


TRIED: set[str] = set()
"""Calls of scripts that were tried and are right: many scripts make the same ones, and all have the same checkout."""


def supervises(command: Command, checkout: Checkout) -> None:
    """It is rehearsed as it stands; each call of what it supervises goes on from the last state."""
    for call in rehearses(command, checkout):
        assert "trainer.resume_mode=auto" in call.words, f"{command.line} does not resume"


def fetches_tools(command: Command, _: Checkout) -> None:
    """They come from the network; tests/test_security_script.py runs it with stand-ins for them."""
    assert command.words == ("bash", "scripts/security.sh")


def reaches_machines(command: Command, _: Checkout) -> None:
    """By ssh; tests/test_cluster_scripts.py runs it with a stand-in for that."""
    assert command.words[2] == "start" and len(command.words) > 3


def understood_by(check: Callable[[list[str]], object]) -> Rule:
    """`check` takes the arguments, in a folder where the run of `--run` lies as training leaves it."""

    def understands(command: Command, _: Checkout) -> None:
        if "--run" in command.words:
            make_run(Path(command.words[command.words.index("--run") + 1]))
        with ends_well():
            check(command.arguments)

    return understands


def make_run(folder: Path) -> None:
    Tracker([], "p", "e", folder, asdict(load_config("tinywiki"))).finish()
    model = folder / "actor" / "global_step_60"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text("{}")


def composes_training(arguments: list[str]) -> None:
    if is_sweep(arguments, "ppo_trainer"):
        for run in combinations(Config, training_arguments(arguments, "ppo_trainer").overrides):
            composes_training(list(run.overrides))
        return
    config = load_config_from_argv(arguments)
    check_supported(config)
    make_reward(config, config.reward.function, config.reward.kwargs)
    make_reward(config, config.reward.function, config.reward.val_kwargs or config.reward.kwargs)


def composes_plan(arguments: list[str]) -> None:
    asked, changeable, kept = plan.parse(arguments)
    assert asked.gpus is None or parse_gpus(asked.gpus).gpus
    models = [f"actor_rollout_ref.model.path={asked.model}"] if asked.model else []
    load_config(asked.config_name, [*changeable, *models, *kept])


def asks_the_endpoint(command: Command, _: Checkout) -> None:
    """The request is understood; who answers it runs in tests/search_r1/llm_agent."""
    words = command.words
    assert words[-1].startswith("{") and any(word.endswith(ROUTE) for word in words)
    assert parse_chat(words[-1].encode()).question


def writes_a_page(command: Command, _: Checkout) -> None:
    with patch.object(Path, "write_text") as write:
        run_python(command)
    write.assert_called_once()


def runs(*more: str) -> Rule:
    """Runs it for real, with more arguments: those that keep it small."""
    return lambda command, _: run_python(command, *more)


def runs_on_ray(command: Command, _: Checkout) -> None:
    """Runs it with little to do, on this process's Ray. Its workers do not find data_plane.py: they are sent it."""
    folder = str((ROOT / command.words[1]).parent)
    with patch.object(sys, "path", [folder, *sys.path]):
        data_plane = importlib.import_module("data_plane")
    register_pickle_by_value(data_plane)
    try:
        with patch.object(cluster, "init_patiently") as started:
            run_python(command, "--trajectories", "10", "--tokens", "300", "--ranks", "2", "--rounds", "1")
    finally:
        unregister_pickle_by_value(data_plane)
    started.assert_called_once()


def accepts_options(command: Command, _: Checkout) -> None:
    """Runs the program until its own parser has taken the arguments."""
    real = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser: argparse.ArgumentParser, *given: list[str]) -> None:
        real(parser, *given)
        raise OptionsAccepted

    with patch.object(argparse.ArgumentParser, "parse_args", parse_and_stop):
        try:
            run_python(command)
        except OptionsAccepted:
            return
    raise AssertionError(f"{command.line} parses no options")


class OptionsAccepted(Exception):
    pass


def serves(command: Command, checkout: Checkout) -> None:
    """It loads and listens; what it would serve is asked in this process."""
    corpus = checkout.folder / command.words[command.words.index("--corpus_path") + 1]
    first = json.loads(corpus.read_text().splitlines()[0])
    answers = []

    def ask(app: FastAPI, listener: socket.socket) -> None:
        with closing(listener), TestClient(app) as client:
            answers.append(client.post("/retrieve", json={"queries": [first["contents"]]}).json()["result"][0])

    with patch.object(process, "serve", ask), ends_well():
        assert retrieval_server.main([*command.arguments, "--port", "0"]) == 0, f"{command.line} does not start"
    [found] = answers
    assert found and found[0] == first, f"{first} is not found but {found}"


def accepts_stages(command: Command, _: Checkout) -> None:
    """tests/test_first_run.py runs them."""
    folders = [str(ROOT / "scripts" / "gpu"), str(ROOT / "scripts" / "experiments")]
    with patch.object(sys, "path", [*folders, *sys.path]), ends_well():
        importlib.import_module("first_run.__main__").parse(command.arguments)


def selects_tests(command: Command, _: Checkout) -> None:
    """With a path the tests are collected. Without one only the options are tried: the whole suite is running."""
    words = command.arguments
    only = "--collect-only" if any(word.startswith("tests/") for word in words) else "--markers"
    run_pytest(only, *words)
    if "-m" not in words:
        return
    marker = words[len(words) - words[::-1].index("-m")]  # the last -m wins
    sources = [path.read_text() for path in ROOT.glob("tests/**/test_*.py")]
    assert marker.startswith("not ") or any(f"pytest.mark.{marker}" in text for text in sources), f"no test is {marker}"


@cache
def run_pytest(*arguments: str) -> None:
    program = [sys.executable, "-m", "pytest", "--noconftest", "-p", "tiers", "-p", "no:cacheprovider"]
    paths = os.pathsep.join([str(ROOT / "tests/helpers"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths}  # for tiers.py, which has options of its own
    done = subprocess.run([*program, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"pytest {arguments} ended with {done.returncode}: {done.stdout}{done.stderr}"


def part_of_set_up(_: Command, __: Checkout) -> None:
    """What scripts/setup.sh and scripts/test.sh do to the machine they run this test on."""


def is_written_by_a_page(command: Command, checkout: Checkout) -> None:
    """A program of the reader's; the test of its tutorial runs it."""
    assert (checkout.folder / f"{command.words[2].replace('.', '/')}.py").is_file()


def run_python(command: Command, *more: str) -> None:
    """`python ...` in this process: a new one would first import torch."""
    file = ROOT / command.words[1]
    argv, path = [command.words[1], *command.arguments, *more], [str(file.parent), *sys.path]
    with patch.object(sys, "argv", argv), patch.object(sys, "path", path), ends_well():
        if command.words[1] == "-m":
            runpy.run_module(command.words[2], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(file), run_name="__main__")


@contextmanager
def ends_well() -> Iterator[None]:
    try:
        yield
    except SystemExit as end:
        assert not end.code, f"exit status {end.code}"


@contextmanager
def server(command: Command, checkout: Checkout) -> Iterator[str]:
    """The server that the command starts, on a free port."""
    port = free_port()
    arguments = [sys.executable, *command.words[1:], "--port", str(port)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    started = subprocess.Popen(arguments, cwd=checkout.folder, env=environment)
    try:
        wait_until_up(started, f"http://127.0.0.1:{port}/healthz")
        yield f"http://127.0.0.1:{port}/retrieve"
    finally:
        started.terminate()
        started.wait(timeout=120)


SMALL_WIKI = ("--num_passages", "600", "--num_train", "2", "--num_test", "2", "--num_sft_rows", "8")

OPTIONS_ONLY = (
    r"-m verl\.(planning\.plan\.calibrate|run\.last_checkpoint|tracking\.report)",
    r"-m search_r1\.doctor",  # tests/search_r1/test_doctor.py runs it
    r"-m search_r1\.(evaluation\.example_question|viewer \S+|replay (score|log_probs|export))",
    r"-m search_r1\.search\.(index_builder .*--retrieval_method|retrieval_server .*--retriever_name) (?!bm25)\S+",
    r"-m search_r1\.search\.(rerank_server|retrieval_rerank_server|google_search_server|serp_search_server|mcp_tool)",
    r"-m search_r1\.search\.corpus_tool .*--url",
    r"scripts/data_process/(qa_search_\w+_merge\.py(?!.*(=(example|mine)/|--input_dir))|nq_rag\.py)",
    r"scripts/(download|experiments/collect|gpu/engine_step)\.py",
    r"scripts/bench/(retrieval_\w+|published_server|soak|packing|dry_run_table|weight_sync|update|viewer)\.py",
    r"scripts/bench/(rollouts|async_rollout|collect)\.py",
)
RULES: list[tuple[str, Rule]] = [
    *((rf"python {program}", accepts_options) for program in OPTIONS_ONLY),
    (r"bash (?!scripts/(run_with_restart|security|cluster/ssh)\.sh)\S+\.sh", rehearses),
    (r"bash scripts/cluster/ssh\.sh", reaches_machines),
    (r"bash scripts/run_with_restart\.sh", supervises),
    (r"bash scripts/security\.sh", fetches_tools),
    (r"python -m verl\.(trainer\.main_ppo|run\.resuming)", understood_by(composes_training)),
    (
        r"python -m verl\.trainer\.main_ppo_format",
        understood_by(lambda arguments: check_supported(with_format_reward(load_config_from_argv(arguments)))),
    ),
    (r"python -m verl\.trainer\.preflight", understood_by(preflight.parse)),
    (r"python -m verl\.trainer\.dry_run", understood_by(dry_run.parse)),
    (r"python -m verl\.trainer\.plan", understood_by(composes_plan)),
    (
        r"python -m verl\.trainer\.sft",
        understood_by(lambda arguments: load_from_argv(SftConfig, load_sft_config, arguments, "sft")),
    ),
    (r"python -m first_run", accepts_stages),
    (r"python -m verl\.run\.finished_phase", runs()),
    (r"python -m verl\.config\.docs", writes_a_page),
    (
        r"python (infer\.py|-m infer)",
        understood_by(lambda arguments: agent_config(infer.parse_arguments(arguments))),
    ),
    (r"python -m search_r1\.evaluation\.compare", understood_by(compare.parse_arguments)),
    (r"python -m search_r1\.serve", understood_by(lambda arguments: checked_config(parse_arguments(arguments)))),
    (
        r"python -m search_r1\.evaluation",
        understood_by(lambda arguments: method_config(evaluation_arguments("", arguments))),
    ),
    (r"python -m search_r1\.data\.tinywiki", runs(*SMALL_WIKI)),
    (r"python -m search_r1\.data\.tinywiki\.difficulty", runs()),
    (r"python scripts/experiments/topk_kl_bias\.py", runs("--vocabulary", "64", "--k", "4", "--draws", "1")),
    (r"python scripts/experiments/grid\.py", runs("--dry_run", "--seeds", "3")),
    (r"python scripts/bench/memory_tiers\.py", runs()),
    (r"python scripts/bench/door\.py", runs("--sessions", "4", "--calls", "12", "--rounds", "1")),
    (r"python scripts/bench/long_rollout\.py", runs("--turns", "20", "40", "--repeats", "1")),
    (r"python scripts/bench/chat_throughput\.py", runs("--episodes", "4", "--rounds", "1")),
    (r"python scripts/data_process/(nq|nq_search|qa_search_\w+_merge)\.py(?=.*--input_dir)", runs("--limit", "1")),
    (r"python scripts/data_process/qa_search_\w+_merge\.py(?=.*=(example|mine)/)", runs()),
    (r"python -m search_r1\.(viewer|replay|search\.retrieval_server)$", runs("--help")),
    (r"python -m search_r1\.search\.index_builder .*--retrieval_method bm25", runs()),
    (r"python -m search_r1\.search\.retrieval_server .*--retriever_name bm25", serves),
    (r"python -m search_r1\.search\.corpus_tool(?!.*--url)", runs()),
    (r"python -m search_r1\.data\.(contexts|documents)", runs()),
    (r"python -m search_r1\.data\.browsecomp", understood_by(browsecomp_arguments)),
    (
        r"python -m search_r1\.data\.episodes",
        understood_by(lambda arguments: episodes_config(episodes_arguments(arguments))),
    ),
    (r"python -m search_r1\.data\.model", understood_by(model_arguments)),
    (r"python scripts/bench/(driver_step|data_plane)\.py", runs_on_ray),
    (r"python -m mine\.\w+", is_written_by_a_page),
    (r"python -m pytest", selects_tests),
    (r"curl -N http://127\.0\.0\.1:8001/\S+", asks_the_endpoint),
    (r"python (-|-c|-V|-m venv|-m pip|-m mypy|-m openenv\.cli)", part_of_set_up),
]
