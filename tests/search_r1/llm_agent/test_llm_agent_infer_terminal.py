"""infer.py at a terminal: a policy that says its lines is behind it, so that no engine has to load."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from llm_agent_world import ROOT

PROGRAM = """
import sys
from contextlib import asynccontextmanager

sys.path[:0] = sys.argv[2:]
import infer
import search_r1.llm_agent.agent as agent_module
from llm_agent_scripted import agent_of
from transformers import AutoTokenizer


@asynccontextmanager
async def open_agent(config, sampling):
    try:
        yield agent_of(AutoTokenizer.from_pretrained(sys.argv[1]), ["<think> hm </think><answer> Sael </answer>"])
    finally:
        print("closed", file=sys.stderr)


agent_module.open_agent = open_agent
sys.exit(infer.main([]))
"""


class Terminal:
    """The program with a terminal of its own; `stdout_too`: what it prints goes there as well."""

    def __init__(self, command: list[str], stdout_too: bool = True) -> None:
        self._ours, theirs = pty.openpty()
        stdout = theirs if stdout_too else subprocess.PIPE
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=theirs, stdout=stdout, stderr=theirs, start_new_session=True,
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # it becomes the controlling terminal
            env=os.environ | {"TERM": "xterm", "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        os.close(theirs)
        self.shown = ""

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def wait_for(self, text: str, times: int = 1) -> None:
        end = time.monotonic() + 300
        while self.shown.count(text) < times:
            assert time.monotonic() < end and self.process.poll() is None, f"no {text!r} in {self.shown!r}"
            if select.select([self._ours], [], [], 1.0)[0]:
                self.shown += os.read(self._ours, 4096).decode()

    def interrupt(self, answer: str) -> None:
        """Ctrl-C, until the answer is there: readline does not notice a signal that comes just before it waits."""
        for _ in range(30):
            self.type("\x03")
            again = time.monotonic() + 10
            while time.monotonic() < again:
                if select.select([self._ours], [], [], 1.0)[0]:
                    self.shown += os.read(self._ours, 4096).decode()
                if answer in self.shown:
                    return
        raise AssertionError(f"no {answer!r} in {self.shown!r}")

    def end(self) -> int:
        """Its exit status; the rest is in `shown`."""
        try:
            while chunk := os.read(self._ours, 4096):
                self.shown += chunk.decode()
        except OSError:  # the other side is closed
            pass
        return self.process.wait(timeout=300)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def command(byte_tokenizer, tmp_path: Path) -> list[str]:
    byte_tokenizer.save_pretrained(tmp_path)
    return [sys.executable, "-c", PROGRAM, str(tmp_path), str(Path(__file__).parent)]


@pytest.fixture
def terminal(command: list[str]) -> Iterator[Terminal]:
    terminal = Terminal(command)
    yield terminal
    terminal.close()


def test_lines_are_edited_and_the_first_ctrl_c_ends_it(terminal: Terminal) -> None:
    terminal.wait_for("Question (empty to leave): ")
    terminal.type("here?\x01W\n")  # Ctrl-A goes to the start of the line
    terminal.wait_for("Answer: Sael")
    terminal.wait_for("Question (empty to leave): ", times=2)
    assert "Question: Where?" in terminal.shown
    terminal.interrupt("closed")
    assert terminal.end() == 130
    assert "Traceback" not in terminal.shown


def test_answers_alone_go_to_a_pipe(command: list[str]) -> None:
    terminal = Terminal(command, stdout_too=False)
    try:
        terminal.wait_for("Question (empty to leave): ")
        terminal.type("Where?\n\n")
        assert terminal.process.stdout is not None
        output = terminal.process.stdout.read().decode()
        assert terminal.end() == 0
        assert output.startswith("Question: Where?\n<think> hm </think><answer> Sael </answer>\nAnswer: Sael\n")
    finally:
        terminal.close()
