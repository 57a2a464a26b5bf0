"""Every command of README.md, CONTRIBUTING.md and docs/ works as it stands. trying_commands.py says how it is tried."""

from __future__ import annotations

import ast
import asyncio
import json
import shlex
import shutil
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from documented_commands import PAGES, ROOT, Checkout, Command, all_commands, blocks, commands_of, files_of, parse
from trying_commands import needs_ray, server, try_command, try_typed

import infer
from search_r1.data.hub.artifacts import ARTIFACTS
from search_r1.data.qa.source_files import SETS
from search_r1.search.bm25.index import Bm25Retriever
from search_r1.search.corpus import Corpus
from verl.config import load_config_from_argv
from verl.errors import ConfigError

# What a reader has made or downloaded before.
PASSAGES = (
    "corpus.jsonl",
    "data/wiki-18.jsonl",
    "data/browsecomp_plus/corpus.jsonl",
    "runs/tinywiki_default_seed0/data/corpus.jsonl",
)
PROMPTS = (
    *("data/nq_search", "data/nq_hotpotqa_train", "data/nq_research", "data/nq_chat"),
    *("data/mine", "data/calculator", "data/german", "data/lights"),
)
QUESTIONS = ("nq/test.jsonl", "hotpotqa/dev.jsonl", "mine/light_questions.jsonl")
MODEL = "runs/lights_sft/global_step_100"


def of_a_reader(folder: Path) -> Checkout:
    """With the files of the reader."""
    made = Checkout(folder)
    shutil.copytree(ROOT / "tests/e2e/new_user", made.folder / "mine")
    for page in (ROOT / "docs").rglob("*.md"):
        for name, content in files_of(page.read_text()):
            (made.folder / name).write_text(content)
    for folder in PROMPTS:
        (made.folder / folder).mkdir(parents=True)
        for split in ("train", "test"):
            (made.folder / folder / f"{split}.parquet").touch()
    rows = [
        {"id": "river", "contents": "Lune\nThe Lune is a river."},
        {"id": "town", "contents": "Osk\nOsk is a town."},
    ]
    (made.folder / "my_documents").mkdir()
    (made.folder / "my_documents" / "lune.md").write_text("# Lune\n\nThe Lune is a river.\n")
    for name in PASSAGES:
        (made.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (made.folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    for corpus, index in (("data/wiki-18.jsonl", "data/bm25"), ("corpus.jsonl", "indexes/bm25")):
        Bm25Retriever.build(Corpus(made.folder / corpus)).save(made.folder / index)
    (made.folder / "data/e5_HNSW64.index").touch()
    question = {"question": "Which river?", "golden_answers": ["Lune"], "metadata": {"type": "bridge"}}
    for name in QUESTIONS:
        (made.folder / name).parent.mkdir(exist_ok=True)
        (made.folder / name).write_text(json.dumps(question) + "\n")
    for one in ARTIFACTS["contexts"]:
        for name in one.needed:
            path = made.folder / "data" / one.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            context = {"title": ["Lune"], "sentences": [["The Lune is a river."]]}
            asked = {"id": name, "question": "Which river?", "answer": "Lune", "context": context}
            pq.write_table(pa.Table.from_pylist([asked]), path)
    (made.folder / MODEL).mkdir(parents=True)
    (made.folder / MODEL / "config.json").write_text("{}")
    for name, qa_set in SETS.items():
        (made.folder / "data/qa" / name).mkdir(parents=True)
        for split in qa_set.splits:
            (made.folder / "data/qa" / name / f"{split}.jsonl").write_text(json.dumps(question) + "\n")
    return made


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    """That of a reader, as the current folder."""
    made = of_a_reader(tmp_path)
    monkeypatch.chdir(made.folder)
    monkeypatch.syspath_prepend(str(made.folder))  # as `python -m` has it
    return made


def distinct(commands: list[Command]) -> list[Command]:
    """Each once, with all the places where it stands."""
    places: dict[str, list[Command]] = {}
    for command in commands:
        places.setdefault(repr((command.words, sorted(command.variables.items()))), []).append(command)
    return [replace(same[0], where=" ".join(command.where for command in same)) for same in places.values()]


@pytest.mark.parametrize("command", distinct(all_commands()), ids=attrgetter("where"))
def test_documented_command(command: Command, checkout: Checkout, request: pytest.FixtureRequest) -> None:
    if needs_ray(command):
        with chdir(ROOT):  # where its workers find our packages
            request.getfixturevalue("ray_session")
    try_typed(command, checkout)


PYTHON_BLOCKS = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}:{line}")
    for page in PAGES
    for line, language, block in blocks(page.read_text())
    if language == "python"
]


@pytest.fixture(scope="module")
def retrieval_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    checkout = of_a_reader(tmp_path_factory.mktemp("served"))
    with server(only_call_of("bash retrieval_launch.sh", checkout), checkout) as url:
        yield url


@pytest.mark.parametrize("block", PYTHON_BLOCKS)
def test_documented_python_runs_against_a_server(block: str, checkout: Checkout, retrieval_url: str) -> None:
    code = block.replace("http://127.0.0.1:8000/retrieve", retrieval_url)
    names: dict[str, Any] = {}
    running = eval(compile(code, "<page>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    if running is not None:
        asyncio.run(running)
    assert "passages" not in names or names["passages"][0]["id"] == "river"


def test_what_comes_after_the_quickstart_finds_what_it_left(tmp_path: Path) -> None:
    """The run that README.md asks is the one that the quickstart trains, the default corpus the one it writes."""
    checkout = Checkout(tmp_path)
    calls = checkout.rehearse(next(parse("bash scripts/quickstart.sh")))
    training = next(call for call in calls if "verl.trainer.main_ppo" in call.words)
    trainer = load_config_from_argv(training.arguments).trainer
    questions = [command for command in all_commands() if command.line.startswith("python infer.py")]
    asked = {infer.parse_arguments(question.arguments).run for question in questions}
    assert asked - {None} == {Path(trainer.default_local_dir)}  # None: a model that is no run's
    assert only_call_of("bash retrieval_launch.sh", checkout).words[2] == "search_r1.search.retrieval_server"


def test_the_quickstart_makes_data_and_warm_start_once(tmp_path: Path) -> None:
    """Those of a run that is resumed are used, unless something that they depend on has changed."""

    def made(*arguments: str) -> list[str]:
        calls = checkout.rehearse(Command("", ("bash", "scripts/quickstart.sh", *arguments)))
        return [word for call in calls for word in MADE if call.words[1:3] == ("-m", word)]

    MADE = ("search_r1.data.tinywiki", "verl.trainer.sft", "verl.trainer.main_ppo")
    checkout = Checkout(tmp_path)
    again = ("--", "trainer.resume_mode=auto")
    data, warm_start, training = MADE
    assert made() == [data, warm_start, training]
    assert made(*again) == [training]
    (checkout.folder / "configs").mkdir()
    (checkout.folder / "configs/tinywiki_sft.yaml").write_text("optim: {lr: 1}")
    assert made(*again) == [warm_start, training]
    (checkout.folder / "runs/tinywiki_default_seed0/data/corpus.jsonl").write_text("edited")
    assert made(*again) == [data, training]
    assert made("--small", *again) == [data, warm_start, training], "in a folder of its own"


def test_the_quickstart_trains_a_chat_model_that_calls_tools(tmp_path: Path) -> None:
    """From its own data and warm start, in a folder of its own."""
    for size, folder in (("", "tinywiki_chat_seed0"), ("--small", "tinywiki_chat_small_seed0")):
        checkout = Checkout(tmp_path / folder)
        calls = checkout.rehearse(Command("", ("bash", "scripts/quickstart.sh", "--chat", *size.split())))
        data, warm_start, training = (
            next(call for call in calls if call.words[1:3] == ("-m", word))
            for word in ("search_r1.data.tinywiki", "verl.trainer.sft", "verl.trainer.main_ppo")
        )
        assert "--chat" in data.words and "tinywiki_sft_chat" in warm_start.words
        config = load_config_from_argv(training.arguments)
        assert config.trainer.default_local_dir == f"runs/{folder}/rl"
        assert (config.agent.format, config.agent.template) == ("chat", "tinywiki_chat")
        assert config.agent.tools == ["search", "open_page", "calculator"]


def test_a_recipe_goes_on_where_it_was(tmp_path: Path) -> None:
    """Its phases, in their order; started again, it makes none of them again whose inputs are as they were."""
    command = (
        "bash scripts/recipes/smollm2.sh --corpus corpus.jsonl --questions nq/test.jsonl hotpotqa/dev.jsonl --seed 3"
    )
    checkout = Checkout(tmp_path)
    evaluated = list[list[str]]()

    def made() -> list[str]:
        calls = [call.words for call in checkout.rehearse(next(parse(command))) if call.words[1:2] == ("-m",)]
        evaluated[:] = [
            [word for word in words if word.endswith(".jsonl")] for words in calls if words[2] == "search_r1.evaluation"
        ]
        return [
            words[2].removeprefix("search_r1.")
            for words in calls
            if not words[2].startswith(("verl.run", "pip", "venv"))
        ]

    rows, training = ["data.episodes"] * 3, ["verl.trainer.sft", "verl.trainer.main_ppo", "verl.trainer.sft"]
    served, compared = "search.retrieval_server", ["evaluation.compare"] * 2
    assert made() == ["data.model", served, "search.corpus_tool", *rows, *training, *["evaluation"] * 3, *compared]
    sets = ["direct=runs/smollm2_seed3/questions/direct/test.jsonl"]
    assert evaluated == [sets] * 3, "a subset without questions is left out"
    assert made() == [served, *compared]
    (checkout.folder / "runs/smollm2_seed3/rows/train.parquet").write_text("other rows")
    assert made() == [served, *rows[:1], *training[::2], *compared], "RL starts from the same model as before"


def test_a_small_recipe_with_tool_calls(tmp_path: Path) -> None:
    """Its config is valid, and all that is trained or evaluated is small."""
    command = "bash scripts/recipes/smollm2.sh --corpus corpus.jsonl --questions nq/test.jsonl --chat --dense --small"
    calls = [call for call in Checkout(tmp_path).rehearse(next(parse(command))) if call.words[1:2] == ("-m",)]
    by_module = {call.words[2]: call for call in calls}
    models = [call.words[3:4] + call.words[6:] for call in calls if call.words[2] == "search_r1.data.model"]
    assert models == [("smollm2", "--tool_calls"), ("minilm",)]
    training = load_config_from_argv(by_module["verl.trainer.main_ppo"].arguments)
    assert (training.agent.format, training.agent.template, training.retriever.topk) == ("chat", "chat", 1)
    assert training.trainer.default_local_dir == "runs/smollm2_chat_small_seed0/rl"
    assert training.trainer.total_training_steps == 3 and training.data.val_data_num == 8
    supervised = [call.words for call in calls if call.words[2] == "verl.trainer.sft"]
    assert ["trainer.total_training_steps=3" in words for words in supervised] == [True, True]
    assert "trainer.total_training_steps=40" in supervised[1], "the later one counts: as long as RL"
    evaluations = [call.words for call in calls if call.words[2] == "search_r1.evaluation"]
    assert len(evaluations) == 4 and all("--subset" in words for words in evaluations)
    servers = [call.words for call in calls if call.words[2] == "search_r1.search.retrieval_server"]
    names = [words[words.index("--retriever_name") + 1] for words in servers]
    assert names == ["bm25", "minilm"], "the last evaluation is with the dense index"


def test_the_quickstart_says_how_to_go_on_in_a_line_to_paste(tmp_path: Path) -> None:
    """With the options and overrides that it was given, quoted for a shell."""
    given = ("--small", "--output_dir", "my café/a run", "--", "data.train_batch_size=4")
    for words in (given, given[:3], ()):
        with pytest.raises(AssertionError) as refused:
            Checkout(tmp_path / str(len(words))).rehearse(
                Command("", ("bash", "scripts/quickstart.sh", *words), {"REFUSED": "2", "LC_ALL": "C.UTF-8"})
            )
        told = str(refused.value).partition("here that is: ")[2]
        again = shlex.split(told.partition(", --output_dir ANOTHER_FOLDER")[0])
        options, overrides = list(words[:3]), list(words[4:])
        assert again == ["bash", "scripts/quickstart.sh", *options, "--", *overrides, "trainer.resume_mode=auto"]


def only_call_of(line: str, checkout: Checkout) -> Command:
    [call] = checkout.rehearse(next(parse(line)))
    return call


@pytest.mark.parametrize(
    "line",
    [
        "bash scripts/quickstart.sh --short",
        "bash scripts/quickstart.sh --seed three",
        "bash scripts/quickstart.sh --chat --long",
        "bash scripts/quickstart.sh --marathon --chat",
        "bash scripts/setup.sh --tpu",
        "bash scripts/gone.sh",
        "bash scripts/test.sh tests/gone",
        "bash scripts/test.sh --no-such-option",
        "bash train_grpo.sh trainer.total_step=20",
        "bash scripts/run_with_restart.sh -- bash train_grpo.sh trainer.save_freq=20",
        "bash scripts/run_with_restart.sh -- bash train_ppo.sh trainer.default_local_dir=a trainer.resume_mode=disable",
        "bash scripts/run_with_restart.sh --restarts 2 -- bash train_grpo.sh trainer.default_local_dir=a",
        "bash scripts/security.sh --fast",
        "DATA_FOLDER=data/nq_search bash train_grpo.sh",
        "DATA_DIR=data/nq_hotpotqa_train bash retrieval_launch.sh",
        "DATA_DIR=data/gone bash train_grpo.sh",
        "TOPP=1 bash retrieval_launch.sh",
        "bash retrieval_launch.sh --address 127.0.0.1",
        "RETRIEVER_NAME=e5 bash retrieval_launch.sh --address 127.0.0.1",
        "file_path=gone bash example/retriever/retrieval_launch_bm25.sh",
        "bash example/retriever/retrieval_launch_serpapi.sh --engine bing",
        "index_path=data/bm25 bash example/retriever/retrieval_launch_bm25.sh",
        "bash search_r1/search/build_index.sh --retriever_name bm25",
        "python -m search_r1.search.index_builder --retrieval_method bm25 --corpus_path gone.jsonl",
        "python -m search_r1.search.index_builder --retrieval_method e5 --passages corpus.jsonl",
        "python -m search_r1.search.corpus_tool audit --corpus_path corpus.jsonl --questions gone.jsonl",
        "python -m search_r1.search.corpus_tool audit --corpus_path corpus.jsonl --url http://127.0.0.1:8000/retrieve",
        "python scripts/bench/retrieval_quality.py --corpus_path corpus.jsonl --questions nq/test.jsonl",
        "python -m search_r1.data.tinywiki --output_dir data/tinywiki --hops 2",
        "python scripts/data_process/nq_search.py --input_dir gone",
        "python scripts/data_process/nq.py --input_dir data/qa --data_sources nq",
        "python scripts/download.py --savepath data",
        "bash scripts/nq_hotpotqa/data_process.sh --input_dir data/qa --topk 3",
        "python3 -m verl.trainer.main_ppo --config-name gone --cfg job",
        "python3 -m verl.trainer.main_ppo reward.function=search_r1.rewards.presets.ResearchReward reward.kwargs={x:1}",
        "python3 -m verl.trainer.sft model.pth=x",
        "python infer.py --model x --config-name gone",
        "python infer.py --ask x",
        "python -m verl.trainer.gone",
        "unheard-of --option",
    ],
)
def test_a_wrong_command_is_noticed(line: str, checkout: Checkout) -> None:
    with pytest.raises((AssertionError, ConfigError)):
        try_command(next(parse(line)), checkout)


@pytest.mark.parametrize(
    "line",
    [
        "python -m verl.trainer.main_ppo --cfg job",
        "python3 scripts/download.py --help",
        "pip install -e .",
        ".venv/bin/python scripts/bench/soak.py --run_dir a -- python -m verl.trainer.main_ppo",
    ],
)
def test_a_python_without_our_packages_is_noticed(line: str, checkout: Checkout) -> None:
    with pytest.raises(AssertionError, match="type .venv/bin/python"):
        try_typed(next(parse(line)), checkout)


def test_commands_are_found_in_a_page() -> None:
    page = """\
Run `A=1 bash x.sh [--long] --seed N`, or
`python -m
module`. Not `bash` and not `x.sh y`.

```bash
B="a b" python3 one \\
  --two   # why
three | head > file
```

```
no command
```

```text
$ four
output
```
"""
    found = [(command.where, command.line, command.variables) for command in commands_of(page, "p")]
    assert found == [
        ("p:6", "python one --two", {"B": "a b"}),
        ("p:8", "three", {}),
        ("p:8", "head", {}),
        ("p:16", "four", {}),
        ("p:1", "bash x.sh --long --seed 3", {"A": "1"}),
        ("p:2", "python -m module", {}),
    ]
