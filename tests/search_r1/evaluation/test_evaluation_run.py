"""`python -m search_r1.evaluation` against a model server of HTTP and a real retrieval server, to its end."""

from __future__ import annotations

import itertools
import json
import logging
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e_world import free_port
from evaluation_world import Answer, ModelServer, choice
from forked import forked
from served_app import served_corpus

import long_task
from search_r1.data.qa.build import PromptBuilder
from search_r1.data.qa.source_files import QuestionFile
from search_r1.evaluation.__main__ import main
from search_r1.evaluation.store import Store
from search_r1.llm_agent.templates import load_template
from verl.tracking.trajectory_store import read_trajectories

NAMES = [f"q{number}" for number in range(8)]


@pytest.fixture
def command(tmp_path: Path, byte_tokenizer, model_server: ModelServer, retriever_url: str) -> list[str]:
    """Arguments of an evaluation of eight questions; the model answers the name that stands in the question."""
    for set_name, names in (("odd", NAMES[1::2]), ("even", NAMES[::2])):
        rows = [{"id": name, "question": f"Say <{name}>", "golden_answers": [name, "\u2028"]} for name in names]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (tmp_path / f"{set_name}.jsonl").write_text(text)
    byte_tokenizer.save_pretrained(tmp_path / "tokenizer")
    model_server.answer = lambda body: choice(f"<answer>{asked(body, byte_tokenizer)}")
    return [
        *("--server", model_server.url, "--served_model", "m", "--tokenizer", str(tmp_path / "tokenizer")),
        *("--data", f"odd={tmp_path / 'odd.jsonl'}", f"even={tmp_path / 'even.jsonl'}", "--method", "direct"),
        *("--retriever_url", retriever_url, "--output_dir", str(tmp_path / "out"), "--concurrency", "2"),
    ]


def asked(body: dict[str, Any], tokenizer) -> str:
    return re.findall(r"<([qr]\d+)>", tokenizer.decode(body["prompt"]))[-1]


def asked_from_here(model_server: ModelServer, tokenizer) -> set[str]:
    """The names that are asked from here on. A request of an earlier run may come late, so names, not a count."""
    names: set[str] = set()

    def answer(body: dict[str, Any]) -> Answer:
        names.add(name := asked(body, tokenizer))
        return choice(f"<answer>{name}")

    model_server.answer = answer
    return names


def kept_parts(tmp_path: Path) -> set[str]:
    """The names whose records an ended run kept."""
    parts = (tmp_path / "out" / "parts").glob("records_*.jsonl")
    return {json.loads(line)["id"] for part in parts for line in part.read_text().split("\n") if line}


def results(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "out" / "results.json").read_text())


def records(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "out" / "records.jsonl").read_text().split("\n") if line]


def test_results_records_trajectories_and_page(command, tmp_path, model_server, byte_tokenizer, capsys):
    names = {"q1": "q9", "q0": "it is q0"}
    model_server.answer = lambda body: choice(f"<answer>{(n := asked(body, byte_tokenizer)) and names.get(n, n)}")
    assert main(command) == 0
    found = results(tmp_path)
    assert {name: row["metrics"]["em"]["mean"] for name, row in found["sets"].items()} == {"odd": 0.75, "even": 0.75}
    assert found["sets"]["even"]["metrics"]["cover_em"]["mean"] == 1
    assert found["sets"]["even"]["metrics"]["f1"]["mean"] == pytest.approx((3 + 0.5) / 4)
    assert found["micro"]["em"]["mean"] == found["macro"]["em"]["mean"] == 0.75
    assert found["micro"]["em"]["low"] <= 0.5 and 0.8 < found["micro"]["em"]["high"] < 1.0 and found["failed"] == 0
    assert [record["id"] for record in records(tmp_path)] == NAMES[1::2] + NAMES[::2]
    assert records(tmp_path)[0]["answer"] == "q9" and records(tmp_path)[0]["golden_answers"] == ["q1", "\u2028"]
    rows = read_trajectories(tmp_path / "out" / "trajectories.parquet")
    assert [row["group_id"] for row in rows] == [f"odd/{n}" for n in NAMES[1::2]] + [f"even/{n}" for n in NAMES[::2]]
    assert rows[0]["reward"] == 0 and rows[1]["reward"] == 1 and rows[1]["ground_truth"]["target"] == ["q3", "\u2028"]
    assert all(np.isnan(row["log_probs"][-1]) for row in rows)
    page = (tmp_path / "out" / "results.md").read_text()
    assert page in capsys.readouterr().out and "| odd | 4 | 75.0 [30.1, 95.4] |" in page  # Wilson
    assert "Wilson's: EM, F1, cover-EM, finished." in page and "within their sets: F1, searches, " in page
    assert "2 answered wrongly: [wrong_answers.md](wrong_answers.md)" in page and found["wrong"] == 2
    assert "text without token ids" in page and "| template.name | direct |" in page


def test_each_phase_is_told_and_how_far_it_is(
    command, tmp_path, model_server, retriever_url, caplog, capsys, monkeypatch
):
    """On standard error, for a person or a log file; the questions by their tenths, which eight all are."""
    monkeypatch.setattr(long_task, "SHORT_S", 0.0)  # lines of so short a task
    caplog.set_level(logging.INFO)
    assert main([*command, "--method", "search"]) == 0
    told = [
        re.sub(r"^\[ *\d+ s\] ", "", record.getMessage()) for record in caplog.records if "[" in record.getMessage()
    ]
    told_so_far = (re.sub(r"^\[ *\d+ s\] ", "", line) for line in capsys.readouterr().err.splitlines())
    questions = [text for text in told_so_far if text.startswith("questions: ")]
    assert told == [
        "reading the questions",
        "8 questions: 4 of odd, 4 of even",
        f"asking the retriever {retriever_url}",
        f"asking for the model m at {model_server.url}",
        "asking 8 of 8 questions, 2 at a time",
        "scoring 8 answers",
        f"{tmp_path / 'out'} has results.md, results.json, wrong_answers.md, records.jsonl, trajectories.parquet",
    ]
    assert len(questions) == 8 and all(f"questions: {n} of 8" in line for n, line in enumerate(questions, start=1))
    assert all(re.search(r" a second, .* left$", line) for line in questions[:-1])
    assert re.search(r"8 of 8, \S+ a second$", questions[-1])


def test_the_wrong_answers_are_a_page_to_read(command, tmp_path, model_server, byte_tokenizer):
    """Two searches and a wrong answer, an answer of several lines with tags, and an episode without an answer."""
    turns = {
        "q1": iter(["<search> Ildra river", "<search> Vonmark", "<answer> Otto *Brann*"]),
        "q2": iter(["<answer> <b>q1\nor</b> q2 "]),
        "q3": iter(["I would rather not."] * 9),
    }
    model_server.answer = lambda body: choice(
        next(turns.get(name := asked(body, byte_tokenizer), iter([f"<answer>{name}"])))
    )
    assert main([*command, "--method", "search", "--max_turns", "2"]) == 0
    page = (tmp_path / "out" / "wrong_answers.md").read_text()
    assert page.startswith("# Wrong answers\n\n3 of 8 questions have no exact match, 1 of them no answer at all.")
    odd, even = page.split("\n## odd: 2 of 4\n")[1].split("\n## even: 1 of 4\n")
    first, third = odd.split("\n### odd/q3\n")
    assert first.split("\n") == [
        "",
        "### odd/q1",
        "",
        "- question: Say \\<q1\\>?",
        "- gold answers: q1 | (empty)",
        "- answer: Otto \\*Brann\\* (answered)",
        "- searches: Ildra river | Vonmark",
        "- gold answer in the passages: no",
        "- F1 0.00, cover-EM 0.00",
        "",
    ]
    assert "- answer: none (turn_limit)" in third and "- searches: none" in third
    assert "- answer: \\<b\\>q1 or\\</b\\> q2 (answered)" in even and "cover-EM 1.00" in even
    assert records(tmp_path)[0]["queries"] == ["Ildra river", "Vonmark"]


def test_a_second_run_asks_nothing_and_says_the_same(command, tmp_path, model_server):
    assert main(command) == 0
    before, count = results(tmp_path), len(model_server.requests)
    assert main(command) == 0
    assert len(model_server.requests) == count == 8 and results(tmp_path) == before


def test_other_settings_are_refused_by_name_or_start_anew(command, tmp_path, model_server, capsys):
    assert main(command) == 0
    assert main([*command, "--temperature", "0.5"]) == 2
    assert "sampling was {'temperature': 0.0" in capsys.readouterr().err
    assert main([*command, "--subset", "2"]) == 2
    message = capsys.readouterr().err
    assert "subset was None and is {'size': 2, 'seed': 0}" in message and "--restart" in message
    for changed, named in (
        ("agent.feedback=Once more.", "'feedback': 'Once more.'"),
        ("agent.environment=evaluation_world.Other", "'environment': 'evaluation_world.Other'"),
    ):
        assert main([changed, *command]) == 2
        assert f"agent was None and is {{{named}}}" in capsys.readouterr().err
    assert main([*command, "--subset", "2", "--restart"]) == 0
    assert results(tmp_path)["questions"] == 4 and len(model_server.requests) == 12
    (tmp_path / "odd.jsonl").write_text('{"id": "q1", "question": "Say <q1>", "golden_answers": ["other"]}\n')
    assert main([*command, "--subset", "2"]) == 2
    assert "questions was {'odd': '2, sha256" in capsys.readouterr().err


def test_what_starts_anew_has_nothing_of_the_earlier_results(command, tmp_path):
    """Not even if it is stopped before it has results of its own."""
    assert main(command) == 0
    (tmp_path / "out" / "notes.txt").touch()
    Store(tmp_path / "out", {"model": "new"}, restart=True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["notes.txt", "parts", "settings.json"]


def test_an_engine_s_options_name_what_it_searches(command, capsys):
    command = [part for part in command if not part.startswith("http") or part == command[1]]
    command.remove("--retriever_url")
    search = [*command, "--method", "rag", "--search_engine", f"{__name__}.Engine"]
    assert main(search) == 0
    assert main(["retriever.engine_kwargs={index: other}", *search]) == 2
    assert "'engine_kwargs': {'index': 'other'}" in capsys.readouterr().err


def test_a_run_that_was_killed_goes_on(command, tmp_path, model_server, byte_tokenizer):
    """Killed without a chance to tidy up, after a part was written and while others were being asked."""
    names = [f"r{number}" for number in range(64 + 8)]
    rows = [{"id": name, "question": f"Say <{name}>", "golden_answers": [name]} for name in names]
    (tmp_path / "odd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first_part, blocked, number = threading.Event(), threading.Event(), itertools.count()

    def answer(body):
        if next(number) >= 66:
            first_part.set()
            blocked.wait(600)
        return choice(f"<answer>{asked(body, byte_tokenizer)}")

    model_server.answer = answer
    run = forked().Process(target=main, args=(command,))
    run.start()
    try:
        assert first_part.wait(300)
        while not (tmp_path / "out" / "parts" / "records_0.jsonl").exists():
            assert run.is_alive()
            time.sleep(0.01)
    finally:
        run.kill()
        run.join(60)
        blocked.set()
    kept = kept_parts(tmp_path)
    assert len(kept) == 64 and not (tmp_path / "out" / "results.json").exists()
    again = asked_from_here(model_server, byte_tokenizer)
    assert main(command) == 0
    everything = {*names, *NAMES[::2]}
    assert again == everything - kept
    assert results(tmp_path)["questions"] == len(everything) and results(tmp_path)["micro"]["em"]["mean"] == 1
    assert len(read_trajectories(tmp_path / "out" / "trajectories.parquet", ["group_id"])) == len(everything)


def test_a_model_server_that_goes_down_keeps_what_is_finished(command, tmp_path, model_server, byte_tokenizer, capsys):
    number = itertools.count()

    def answer(body):
        return (400, {"error": "enough"}) if next(number) >= 5 else choice(f"<answer>{asked(body, byte_tokenizer)}")

    model_server.answer = answer
    assert main(command) == 1
    assert "enough" in capsys.readouterr().err
    kept = kept_parts(tmp_path)
    assert 1 <= len(kept) <= 5
    again = asked_from_here(model_server, byte_tokenizer)
    assert main(command) == 0
    assert again == set(NAMES) - kept and results(tmp_path)["micro"]["em"]["mean"] == 1


class Engine:
    """A search engine that knows one query."""

    failures: list[str] = []

    def __init__(self, index: str = "") -> None:
        self.index = index

    def search(self, query: str) -> list[str]:
        if query != "health check" and self.failures:
            raise OSError(self.failures.pop())
        return ["q1 q3 q5 q7"]


def test_failed_questions_are_asked_again_then_counted_and_left_out(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.modules[__name__], "Engine", Engine)
    monkeypatch.setitem(sys.modules, "engine_of_this_test", sys.modules[__name__])
    rag = [*command, "--method", "rag", "--search_engine", "engine_of_this_test.Engine", "--max_redraws", "1"]
    rag[rag.index("--concurrency") + 1] = "1"
    Engine.failures = ["down"]
    assert main(rag) == 0  # drawn again
    assert results(tmp_path)["failed"] == 0 and Engine.failures == []
    assert results(tmp_path)["sets"]["odd"]["metrics"]["retrieval_recall"]["mean"] == 1
    assert results(tmp_path)["sets"]["even"]["metrics"]["retrieval_recall"]["mean"] == 0
    Engine.failures = ["down"] * 3  # the first question twice, the second one once
    assert main([*rag, "--restart"]) == 1
    assert "1 questions failed" in capsys.readouterr().err
    found = results(tmp_path)
    assert (found["failed"], found["sets"]["odd"]["failed"], found["micro"]["em"]["count"]) == (1, 1, 7)
    assert "| odd | 3 | 100.0 [" in (tmp_path / "out" / "results.md").read_text()
    assert records(tmp_path)[0]["status"] == "failed" and "down" in records(tmp_path)[0]["failure"]
    Engine.failures = ["down"] * 2
    assert main([*rag, "--allow_failed"]) == 0  # asked again, and down again
    assert main(rag) == 0
    assert results(tmp_path)["failed"] == 0 and results(tmp_path)["micro"]["em"]["count"] == 8
    assert len(read_trajectories(tmp_path / "out" / "trajectories.parquet", ["group_id"])) == 8


def test_what_the_corpus_and_the_retriever_hold_is_in_the_report(command, tmp_path, model_server, corpus):
    rows = [
        {"id": "a", "question": "Where does the Ildra flow?", "golden_answers": ["Vonmark"]},
        {"id": "b", "question": "Who is mayor of Vonmark?", "golden_answers": ["nobody at all"]},
        {"id": "c", "question": "Is the Ildra a river?", "golden_answers": ["yes"]},
    ]
    (tmp_path / "odd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model_server.answer = lambda body: choice("<answer>yes")
    assert main([*command, "--method", "search", "--corpus_path", str(corpus)]) == 0
    coverage = results(tmp_path)["coverage"]
    assert coverage["passages"] == 3
    assert coverage["sets"]["odd"] | {"recall": None} == {
        **{"questions": 3, "yes_no": 1, "empty": 0, "span": 2, "covered": 1, "coverage": 0.5, "recall": None}
    }
    assert coverage["sets"]["odd"]["recall"]["3"] == {"hits": 1, "of_all": 0.5, "of_covered": 1.0}
    assert coverage["sets"]["even"]["recall"]["3"]["hits"] == 0
    assert coverage["total"]["questions"] == 7 and coverage["total"]["covered"] == 1
    served = results(tmp_path)["settings"]["retriever"]["serves"]
    assert served["retriever"] == "bm25" and served["corpus_size"] == 3
    page = (tmp_path / "out" / "results.md").read_text()
    assert "| odd | 3 | 1 | 2 | 1 (50.0%) |" in page


def test_a_method_without_searches_looks_for_answers_in_the_corpus_alone(command, tmp_path, corpus, capsys):
    gone = ["--retriever_url", "http://127.0.0.1:9/retrieve"]
    assert main([*command, *gone, "--corpus_path", str(tmp_path / "corpus")]) == 2
    assert f"--corpus_path {tmp_path / 'corpus'} is no file" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main([*command, *gone, "--corpus_path", str(corpus)]) == 0
    coverage = results(tmp_path)["coverage"]
    assert coverage["passages"] == 3 and "recall" not in coverage["total"]


def test_another_index_of_the_same_size_is_refused(command, tmp_path, model_server, corpus, capsys):
    model_server.answer = lambda body: choice("<answer>yes")
    other = tmp_path / "other.jsonl"
    other.write_text(corpus.read_text().replace("Ildra", "Oldra"))
    assert other.stat().st_size == corpus.stat().st_size
    port = free_port()
    search = [*command, "--method", "search", "--retriever_url", f"http://127.0.0.1:{port}/retrieve"]
    with served_corpus(corpus, port):
        assert main(search) == 0
    made = results(tmp_path)["settings"]["retriever"]["serves"]["index_version"]
    with served_corpus(other, port):
        assert main(search) == 2
        told = capsys.readouterr().err
        assert f"an evaluation over another index: it was version {made} (bm25, 3 passages)" in told
        assert "Serve the earlier one again, give another --output_dir, or start over with --restart" in told
        assert main([*search, "--restart"]) == 0
    assert results(tmp_path)["settings"]["retriever"]["serves"]["index_version"] != made
    with served_corpus(other) as first, served_corpus(corpus) as second:
        assert main([*search, "--retriever_url", f"{first},{second}"]) == 2
    assert "the servers of retriever.url hold different indexes" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [["--model", "x"], ["--judge_url", "http://x"], ["--subset", "0"], ["--method", "magic"], ["--max_redraws", "-1"]],
)
def test_arguments_that_contradict_each_other(wrong, command, capsys):
    with pytest.raises(SystemExit) as end:
        main([*command, *wrong])
    assert end.value.code == 2 and "usage:" in capsys.readouterr().err


def test_errors_are_told_without_a_traceback(command, tmp_path, capsys):
    at_once = ("retriever.timeout_s=0.3", "retriever.deadline_s=0.3")
    assert main([*at_once, *command, "--retriever_url", "http://127.0.0.1:9/retrieve", "--method", "search"]) == 1
    assert "retrieval_launch.sh" in capsys.readouterr().err
    assert main([*command, "--tokenizer", str(tmp_path / "absent")]) == 2
    assert "--tokenizer" in capsys.readouterr().err
    assert main([*command, "--method", "rag", "--template", "direct"]) == 2
    assert "needs a template with {context}" in capsys.readouterr().err


def test_prompts_that_ask_for_other_tags_than_are_read_are_refused(
    command, tmp_path, model_server, byte_tokenizer, capsys
):
    """By those of a prompt file that it is asked with; what a question says is no instruction."""
    template = tmp_path / "german.txt"
    template.write_text(
        "---\ntags: {search: suche, answer: antwort}\n---\nDenke in <think>, nutze <suche> und <antwort>. {question}"
    )
    questions = tmp_path / "even.jsonl"
    builder = PromptBuilder(load_template(str(template)))
    builder.write(tmp_path / "german.parquet", [QuestionFile("even", "test", questions)], "test")
    arguments = [*command, "--method", "search"]
    data = arguments.index("--data")
    arguments[data + 1 : data + 3] = [str(tmp_path / "german.parquet")]
    asked = asked_from_here(model_server, byte_tokenizer)
    assert main(arguments) == 2 and not asked
    said = capsys.readouterr().err
    assert "the prompt names <antwort>, <suche>, <think>, but agent.template=search_r1 reads <answer>" in said
    assert "give the template that the prompt file was made with: --template" in said
    model_server.answer = lambda body: choice(
        f"<antwort>{re.findall(r'<(q[0-9])>', byte_tokenizer.decode(body['prompt']))[-1]}"
    )
    assert main([*arguments, "--template", str(template)]) == 0
    assert results(tmp_path)["micro"]["em"]["mean"] == 1
