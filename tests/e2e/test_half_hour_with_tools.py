"""The tutorial of a chat model with tools of one's own, typed as it stands, in a folder with a space and an accent."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from documented_commands import Command, blocks, commands_of, files_of
from e2e_world import ENV, ROOT, free_port, metrics_by_step, wait_until_up

from verl.tracking.trajectory_store import read_trajectories

# Slow: test_chat_run.py trains with tools, test_serve_chat.py and test_evaluation_chat.py have their seams.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]  # six programs that load a model or start Ray

PAGE = (ROOT / "docs" / "tutorials" / "chat_tools.md").read_text()
COMMANDS = list(commands_of("\n".join(f"```{kind}\n{block}```" for _, kind, block in blocks(PAGE)), "chat_tools.md"))
SEARCH_R1 = "from search_r1.command import main; main()"  # of the script that an installation writes


class Reader:
    """Types what the page says, and keeps what each command printed, in the order of the page."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, str(free_port())
        (folder / "mine").mkdir(parents=True)
        (folder / ".venv").symlink_to(sys.prefix)
        for name, content in files_of(PAGE):
            (folder / name).write_text(content.replace("8001", self.port))
        self.printed: list[tuple[str, str]] = []

    def said(self, part: str) -> str:
        """What the last command with `part` in its line printed."""
        return [text for line, text in self.printed if part in line][-1]

    def type_all(self) -> None:
        """Every command of the page; the one that serves stays until those after it have ended."""
        for place, command in enumerate(COMMANDS):
            if "serve" in command.words:
                with self._served(command):
                    for later in COMMANDS[place + 1 :]:
                        self._type(later)
                return
            self._type(command)

    def _type(self, command: Command) -> None:
        done = subprocess.run(
            self._words(command), cwd=self.folder, env=self._variables(command),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1800, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command.line}\n{done.stdout[-8000:]}"
        self.printed.append((" ".join([*command.variables, command.line]), done.stdout))

    @contextmanager
    def _served(self, command: Command) -> Iterator[None]:
        with (self.folder / "serve.log").open("w") as log:
            server = subprocess.Popen(
                self._words(command), cwd=self.folder, env=self._variables(command), stdout=log, stderr=log
            )
        try:
            wait_until_up(server, f"http://127.0.0.1:{self.port}/v1/models")
            yield
        finally:
            server.terminate()
            server.wait(timeout=120)
        self.printed.append((command.line, (self.folder / "serve.log").read_text()))

    def _words(self, command: Command) -> list[str]:
        words = [word.replace("8001", self.port) for word in command.words]
        if words[0] == ".venv/bin/search-r1":
            return [".venv/bin/python", "-c", SEARCH_R1, *words[1:]]
        return ["bash", str(ROOT / words[1]), *words[2:]] if words[0] == "bash" else words

    def _variables(self, command: Command) -> dict[str, str]:
        return ENV | {"PYTHONPATH": str(ROOT)} | command.variables


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """After all commands of the page."""
    reader = Reader(tmp_path_factory.mktemp("user") / "half an hour \u00e9")
    reader.type_all()
    return reader


@pytest.fixture(scope="module")
def height(reader: Reader) -> dict[str, int]:
    """The heights of the reader's lights, as the reader's server has them."""
    code = "import json; from mine.lights_server import HEIGHTS; print(json.dumps(HEIGHTS))"
    done = subprocess.run([".venv/bin/python", "-c", code], cwd=reader.folder, capture_output=True, check=True)
    found: dict[str, int] = json.loads(done.stdout)
    return found


def check_calls(calls: list[dict[str, Any]], height: dict[str, int]) -> None:
    """Each that was answered has the result that the reader's own code gives."""
    for call in calls:
        if call.get("status") == "ok" and call["name"] == "height":
            assert call["result"] == str(height[call["arguments"]["light"]])
        elif call.get("status") == "ok":
            assert call["name"] == "feet" and float(call["result"]) == round(call["arguments"]["metres"] / 0.3048, 1)


def test_nothing_that_the_reader_sees_is_a_traceback_or_a_setting_that_cannot_be_left_out(reader: Reader) -> None:
    printed = "".join(text for _, text in reader.printed)
    assert "Traceback" not in printed and "without effect" not in printed
    # No tool searches, so nobody asks for a retriever.
    assert not re.search("start one with|while a retriever answers|asking the retriever", printed)


def test_the_warm_start_learns_fifty_conversations(reader: Reader) -> None:
    assert len((reader.folder / "mine" / "light_conversations.jsonl").read_text().splitlines()) == 50
    losses = [float(loss) for loss in re.findall(r"policy loss (\S+),", reader.said(" sft "))]
    assert len(losses) == 5 and losses[-1] < 0.1 < losses[0]


def test_preflight_loads_the_tools(reader: Reader) -> None:
    said = reader.said("TRAINER")
    assert "FAIL" not in said and "tools: height, feet" in said


def test_the_policy_is_trained_with_the_readers_tools(reader: Reader, height: dict[str, int]) -> None:
    run = reader.folder / "runs" / "lights"
    steps = metrics_by_step(run)
    assert sorted(steps) == [0, 1, 2, 3] and steps[0]["val/test_score/mean"] > 0.5, (
        "the warm start has taught the calls"
    )
    for step in (1, 2, 3):
        assert steps[step]["agent/call_status/ok"] > 0.5 and steps[step]["env/failed_ratio"] == 0
        rows = read_trajectories(run / "trajectories" / f"train_step_{step}.parquet")
        calls = [call for row in rows for event in row["events"] for call in event["calls"]]
        assert len(rows) == 16 and calls
        check_calls(calls, height)
        ok = [call for call in calls if call.get("status") == "ok"]
        assert len(ok) / len(rows) == pytest.approx(steps[step]["agent/call_status/ok"])
    assert re.search(r"step 3/3 .* calls \d\.\d\d ", reader.said("bash train_grpo.sh"))


def test_the_evaluation_calls_the_tools(reader: Reader, height: dict[str, int]) -> None:
    results = reader.folder / "results" / "lights"
    records = [json.loads(line) for line in (results / "records.jsonl").read_text().splitlines()]
    assert len(records) == 50
    right = [record for record in records if record["metrics"]["em"] == 1]
    assert len(right) > 25 and all(record["metrics"]["calls"] >= 1 for record in right)
    assert re.search(r"\| lights \| 50 \|", (results / "results.md").read_text())
    for row in read_trajectories(results / "trajectories.parquet"):
        check_calls([call for event in row["events"] for call in event["calls"]], height)


def test_the_client_reads_calls_and_results_on_the_way_and_then_the_answer(
    reader: Reader, height: dict[str, int]
) -> None:
    said = reader.said("mine.talk")
    metres = height["Skarn"]
    feet = round(metres / 0.3048, 1)
    whole, streamed = re.findall(r"(.*?)((?:^call: [^\n]*\n)+)", said, re.DOTALL | re.MULTILINE)
    assert f"answer: {feet}\n" in whole[0]
    called = f"call: height {{'light': 'Skarn'}} ok\ncall: feet {{'metres': {metres}}} ok\n"
    assert whole[1] == streamed[1] == called
    for text in (whole[0].partition("on the way:")[2], streamed[0]):
        places = [text.find(part) for part in ('"name": "height"', str(metres), '"name": "feet"', str(feet))]
        assert -1 not in places and places == sorted(places)
    assert streamed[0].endswith(f"{feet}\n")
    log = (reader.folder / "serve.log").read_text()
    assert re.search(r"POST /v1/chat/completions 200 .*answered", log) and "curl " in log
