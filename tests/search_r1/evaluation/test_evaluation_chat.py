"""Evaluations of chat models that call tools, behind a model server that returns token ids."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from e2e_world import free_port
from evaluation_world import QUESTION, Answer, ModelServer, choice
from format_models import model_format, tokenizer_of

from search_r1.evaluation.__main__ import main
from verl.tracking.trajectory_store import read_trajectories

NAME = "default-system"
CALLS = [
    {"type": "function", "function": {"name": "search", "arguments": {"queries": ["Ildra river", "Vonmark city"]}}},
    {"type": "function", "function": {"name": "search", "arguments": {"query": "Otto Brann"}}},
    {"type": "function", "function": {"name": "look", "arguments": {}}},
]


def turn(content: str, calls: list[dict[str, Any]]) -> Answer:
    ids = list(model_format(NAME).turn({"role": "assistant", "content": content, "tool_calls": calls}))
    return choice(content, token_ids=ids, logprobs={"token_logprobs": [-0.5] * len(ids)})


@pytest.fixture
def command(tmp_path: Path, model_server: ModelServer, retriever_url: str) -> list[str]:
    """Arguments of an evaluation of one question, which the model answers after a turn of calls and an empty one."""
    row = {"id": "q", "question": QUESTION, "golden_answers": ["Sael"]}
    (tmp_path / "set.jsonl").write_text(json.dumps(row) + "\n")
    tokenizer_of(NAME).save_pretrained(tmp_path / "tokenizer")
    model_server.models = [{"id": "m", "max_model_len": 6000}]

    def answer(body: dict[str, Any]) -> Answer:
        text = tokenizer_of(NAME).decode(body["prompt"])
        if "# Tools" in text and "<tool_response>" not in text:
            return turn("", CALLS)
        if "# Tools" in text and "neither a tool call nor an answer" not in text:
            return turn("", [])
        return turn("It is <answer> Sael </answer>.", [])

    model_server.answer = answer
    return [
        *("--server", model_server.url, "--served_model", "m", "--tokenizer", str(tmp_path / "tokenizer")),
        *("agent.format=chat", "--max_prompt_length", "4000", "--retriever_url", retriever_url),
        *("--data", f"set={tmp_path / 'set.jsonl'}", "--output_dir", str(tmp_path / "out")),
    ]


def test_searches_calls_and_invalid_turns_are_counted(
    command: list[str], tmp_path: Path, model_server: ModelServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--template", "chat", "--max_turns", "3"]) == 0
    [record] = [json.loads(line) for line in (tmp_path / "out" / "records.jsonl").read_text().splitlines()]
    metrics = record["metrics"]
    assert (record["answer"], metrics["em"], metrics["retrieval_recall"], record["exact_ids"]) == ("Sael", 1, 1, True)
    assert (metrics["searches"], metrics["calls"], metrics["invalid_actions"]) == (2, 2, 1)
    assert record["queries"] == ["Ildra river", "Vonmark city", "Otto Brann"], "one call has two of them"
    page = (tmp_path / "out" / "results.md").read_text()
    assert re.search(r"\| searches \| calls \| policy tokens \|", page) and "| chat.max_calls_per_turn | 8 |" in page
    assert {tuple(body["stop_token_ids"]) for body in model_server.requests} == {model_format(NAME).stop_token_ids}
    [row] = read_trajectories(tmp_path / "out" / "trajectories.parquet")
    assert row["num_searches"] == 2
    # the same command goes on, one with other tools is refused
    assert main([*command, "--template", "chat", "--max_turns", "3"]) == 0 and len(model_server.requests) == 3
    assert main([*command, "--template", "chat", "--max_turns", "3", "agent.max_calls=1"]) == 2
    assert main([*command, "--template", "chat", "--max_turns", "3", "agent.compact_at=3000"]) == 2
    assert "other settings: summaries was None and is {'compact_at': 3000, " in capsys.readouterr().err


def test_no_retriever_is_asked_where_no_tool_searches(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The retriever of this command is not there."""
    nobody = ("--retriever_url", f"http://127.0.0.1:{free_port()}/retrieve")
    assert main([*command, *nobody, "--template", "chat", "agent.tools=[calculator]"]) == 0
    [record] = [json.loads(line) for line in (tmp_path / "out" / "records.jsonl").read_text().splitlines()]
    assert record["answer"] == "Sael" and record["metrics"]["retrieval_recall"] is None
    assert "retriever" not in capsys.readouterr().err
    at_once = ["retriever.deadline_s=1", "retriever.timeout_s=1"]
    assert main([*command, *nobody, "--template", "chat", "--restart", *at_once]) == 1


@pytest.mark.parametrize(("method", "searches"), [("direct", 0), ("cot", 0), ("rag", 1)])
def test_baselines_ask_in_the_chat_without_tools(
    command: list[str], tmp_path: Path, model_server: ModelServer, method: str, searches: int
) -> None:
    assert main([*command, "--method", method]) == 0
    [record] = [json.loads(line) for line in (tmp_path / "out" / "records.jsonl").read_text().splitlines()]
    assert record["answer"] == "Sael" and record["metrics"]["searches"] == searches and record["metrics"]["calls"] == 0
    [body] = model_server.requests
    assert tokenizer_of(NAME).decode(body["prompt"]).endswith("<|im_start|>assistant\n")


def test_a_method_that_reads_tags_is_refused(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--method", "ircot"]) == 2
    assert "leave agent.format=chat out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (choice("It is Sael."), "gave text without token ids"),
        ((400, {"error": "unknown field return_token_ids"}), "refused return_token_ids"),
        ((400, {"error": "unknown field stop_token_ids"}), "takes stop_token_ids"),
    ],
)
def test_a_server_without_token_ids_is_refused(
    command: list[str], model_server: ModelServer, capsys: pytest.CaptureFixture[str], answer: Answer, says: str
) -> None:
    model_server.answer = lambda body: answer
    assert main([*command, "--template", "chat"]) == 1
    said = capsys.readouterr().err
    assert says in said and "agent.format=chat needs the token ids" in said
