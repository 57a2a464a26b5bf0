"""A judge of an evaluation: over HTTP, with a key, and with failures that pass or do not; settings without secrets."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from evaluation_world import Answer, ModelServer, choice

from search_r1.evaluation.__main__ import main
from search_r1.evaluation.command_line import method_config, parse_arguments, settings_of
from verl.tracking.trajectory_store import read_trajectories

KEY = "sk-hunter2-hunter2"
NAMES = [f"q{number}" for number in range(6)]


class Judge:
    """Grades 1, or 0.5 for `q5`; `troubles[name]` are HTTP statuses that come first. `asked` counts the requests."""

    def __init__(self) -> None:
        self.troubles: dict[str, list[int]] = {}
        self.asked: Counter[str] = Counter()
        self.messages: list[str] = []

    def __call__(self, body: dict[str, Any]) -> Answer:
        message = body["messages"][0]["content"]
        self.messages.append(message)
        [name] = set(re.findall(r"Say \\u003c(q\d)", message)) or {"check"}
        self.asked[name] += 1
        if self.troubles.get(name):
            return self.troubles[name].pop(0), {"error": {"message": "not now"}}
        content = json.dumps({"reason": "so it is", "score": 0.5 if name == "q5" else 1.0})
        return 200, {"choices": [{"message": {"role": "assistant", "content": content}, "finish_reason": "stop"}]}


@pytest.fixture
def judge(model_server: ModelServer) -> Judge:
    model_server.judge = judge = Judge()
    return judge


@pytest.fixture
def command(tmp_path: Path, byte_tokenizer, model_server: ModelServer, judge: Judge) -> list[str]:
    """Six questions; the model answers each one's name; a judge that is asked once for each verdict."""
    rows = [{"id": name, "question": f"Say <{name}>", "golden_answers": [name]} for name in NAMES]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    byte_tokenizer.save_pretrained(tmp_path / "tokenizer")

    def answer(body: dict[str, Any]) -> Answer:
        return choice(f"<answer>{re.findall(r'<(q.)>', byte_tokenizer.decode(body['prompt']))[-1]}")

    model_server.answer = answer
    return [
        *("--server", model_server.url, "--served_model", "m", "--tokenizer", str(tmp_path / "tokenizer")),
        *("--data", f"mine={tmp_path / 'mine.jsonl'}", "--method", "direct", "--output_dir", str(tmp_path / "out")),
        *("--judge_url", f"{model_server.url}/v1", "--judge_model", "j", "--judge_option", "retries=0"),
    ]


@pytest.fixture
def results(tmp_path: Path) -> Callable[[], dict[str, Any]]:
    return lambda: json.loads((tmp_path / "out" / "results.json").read_text())


def records(tmp_path: Path) -> dict[str, dict[str, Any]]:
    lines = (tmp_path / "out" / "records.jsonl").read_text().splitlines()
    return {record["id"]: record for record in map(json.loads, lines)}


def test_a_judge_behind_a_key(command, judge, model_server, tmp_path, monkeypatch, results, capfd) -> None:
    model_server.judge_key = KEY
    with_key = [*command, "--judge_api_key_env", "KEY_OF_THE_JUDGE"]
    assert main(command) == 2
    said = capfd.readouterr().err
    assert "HTTP 401" in said and "--judge_api_key_env" in said and model_server.requests == []
    monkeypatch.delenv("KEY_OF_THE_JUDGE", raising=False)
    assert main(with_key) == 2
    assert "set KEY_OF_THE_JUDGE in the environment" in capfd.readouterr().err
    monkeypatch.setenv("KEY_OF_THE_JUDGE", f"{KEY}-of-last-year")
    assert main(with_key) == 2
    said = capfd.readouterr()
    assert "HTTP 401" in said.err and "hunter2" not in said.out + said.err and model_server.requests == []
    monkeypatch.setenv("KEY_OF_THE_JUDGE", KEY)
    judge.troubles = {"q1": [503], "q2": [429, 500]}  # two passes of three
    assert main(with_key) == 0
    assert results()["micro"]["judge"]["mean"] == pytest.approx(5.5 / 6) and results()["failed"] == 0
    assert judge.asked == {"check": 1, "q1": 2, "q2": 3} | dict.fromkeys(("q0", "q3", "q4", "q5"), 1)
    said = capfd.readouterr()
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(b"hunter2" in text for text in [*written, said.out.encode(), said.err.encode()])


def test_a_verdict_that_is_missing_is_asked_for_alone_by_the_next_run(
    command, judge, model_server, tmp_path, results, capsys
) -> None:
    judge.troubles = {"q1": [503] * 3}
    assert main(command) == 1
    said = capsys.readouterr().err
    assert "1 questions failed" in said and "not now" in said
    found = results()
    assert (found["failed"], found["micro"]["em"]["count"], found["micro"]["judge"]["count"]) == (1, 5, 5)
    assert records(tmp_path)["q1"]["answer"] == "q1" and "not now" in records(tmp_path)["q1"]["failure"]
    assert main([*command, "--allow_failed"]) == 0
    assert judge.asked["q1"] == 4 and judge.asked["q0"] == 1
    assert len(model_server.requests) == len(NAMES), "the model has answered already"
    assert results()["failed"] == 0 and results()["micro"]["judge"]["mean"] == pytest.approx(5.5 / 6)
    rows = read_trajectories(tmp_path / "out" / "trajectories.parquet")
    assert [row["reward_components"]["judge"] for row in rows] == [1, 1, 1, 1, 1, 0.5]
    assert {row["status"] for row in rows} == {"answered"} and records(tmp_path)["q1"]["failure"] is None


def test_a_judge_that_is_gone_loses_no_answer(command, judge, model_server, results, capsys) -> None:
    model_server.judge = lambda body: (503, {}) if judge.asked else judge(body)  # it answers the check alone
    assert main(command) == 1
    assert "6 questions failed" in capsys.readouterr().err and results()["failed"] == 6
    model_server.judge = lambda body: (403, {}) if judge.asked["check"] > 1 else judge(body)
    assert main(command) == 2  # from the second request on nothing is allowed: an error, not a failure
    assert "HTTP 403" in capsys.readouterr().err
    model_server.judge = judge
    assert main(command) == 0
    assert len(model_server.requests) == len(NAMES) and results()["micro"]["judge"]["count"] == 6


def test_rubric_cache_and_further_options(command, judge, model_server, tmp_path, results, capsys) -> None:
    rubric = tmp_path / "mine.txt"
    rubric.write_text('As a pirate: {question} {targets}\nanswer to grade: {answer}\n{"score": 0 to 1}')
    options = ["--judge_rubric", str(rubric), "--judge_cache", str(tmp_path / "verdicts.sqlite")]
    options += ["--judge_option", "retries=0", "max_tokens=77", 'extra_body={"temperature": null, "top_k": 3}']
    assert main([*command, *options]) == 0
    assert all(message.startswith("As a pirate: ") for message in judge.messages)
    settings = results()["settings"]["judge"]
    assert settings["max_tokens"] == 77 and settings["extra_body"] == {"temperature": None, "top_k": 3}
    assert settings["rubric"]["name"] == str(rubric) and "cache" not in settings
    asked = judge.asked - Counter(check=9)
    assert main([*command, *options, "--restart"]) == 0
    assert judge.asked - Counter(check=9) == asked, "all verdicts are in the cache"
    assert results()["micro"]["judge"]["mean"] == pytest.approx(5.5 / 6)
    assert main([*command, *options, "--judge_option", "max_tokens=99"]) == 0, "with it, verdicts are cut or the same"
    rubric.write_text(rubric.read_text().replace("pirate", "judge"))
    assert main([*command, *options]) == 2
    assert "judge was" in capsys.readouterr().err, "another rubric is another evaluation"


def test_a_finished_evaluation_gets_a_judge_later_and_keeps_its_answers(
    command, judge, model_server, results, capsys
) -> None:
    assert main(command[: command.index("--judge_url")]) == 0
    assert "judge" not in results()["micro"] and len(model_server.requests) == len(NAMES) and not judge.messages
    assert main(command) == 0
    assert results()["micro"]["judge"]["count"] == 6 and len(model_server.requests) == len(NAMES)
    moved = command.copy()
    moved[moved.index("--judge_url") + 1] += "/"
    assert main(moved) == 0, "the same model at another address"
    moved[moved.index("--judge_model") + 1] = "other"
    assert main(moved) == 2
    assert "judge was" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--judge_option", "retries"], "NAME=VALUE"),
        (["--judge_option", "url=x"], "--judge_url"),
        (["--judge_api_key_env", "KEY", "--judge_url", ""], "--judge_url"),
    ],
)
def test_flags_that_cannot_be_meant(command, wrong, said, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main([*command, *wrong])
    assert end.value.code == 2 and said in capsys.readouterr().err


def test_an_option_that_the_judge_has_not(command, capsys) -> None:
    assert main([*command, "--judge_option", "retires=0"]) == 2
    assert "retires" in capsys.readouterr().err


SECRET = "hunter2"


def test_settings_hold_no_password() -> None:
    args = parse_arguments(
        None,
        [
            *("--server", f"http://user:{SECRET}@model:1/v1", "--served_model", "m", "--tokenizer", "t"),
            *("--retriever_url", f"http://user:{SECRET}@search:1/retrieve"),
            *("--output_dir", "out"),
        ],
    )
    settings = settings_of(args, method_config(args), {"retriever": "bm25"})
    assert SECRET not in str(settings)
    assert settings["model"]["server"] == "http://***@model:1/v1"
    assert settings["retriever"]["source"] == "http://***@search:1/retrieve"
    assert settings["max_turns"] > 0 and settings["retriever"]["topk"] == 3
