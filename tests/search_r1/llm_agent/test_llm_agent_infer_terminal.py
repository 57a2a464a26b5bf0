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
import os
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
assert infer.main([]) == 0
print("once more", file=sys.stderr)
sys.stdout.flush()
os.dup2(2, 1)  # from now on everything goes to the terminal
sys.stdout.reconfigure(line_buffering=True)
sys.exit(infer.main([]))
"""


class Terminal:
    """The program with a terminal of its own, and a pipe for what it prints."""

    def __init__(self, command: list[str]) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=theirs, stdout=subprocess.PIPE, stderr=theirs, start_new_session=True,
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
def terminal(byte_tokenizer, tmp_path: Path) -> Iterator[Terminal]:
    byte_tokenizer.save_pretrained(tmp_path)
    terminal = Terminal([sys.executable, "-c", PROGRAM, str(tmp_path), str(Path(__file__).parent)])
    yield terminal
    terminal.close()


@pytest.mark.timeout(900)
def test_answers_alone_go_to_a_pipe_and_lines_are_edited_until_the_first_ctrl_c(terminal: Terminal) -> None:
    """Twice in one process, which takes seconds to start: with a pipe behind it, and with the terminal alone."""
    terminal.wait_for("Question (empty to leave): ")
    terminal.type("Where?\n\n")
    terminal.wait_for("once more")
    assert terminal.process.stdout is not None
    output = terminal.process.stdout.read().decode()
    assert output.startswith("Question: Where?\n<think> hm </think><answer> Sael </answer>\nAnswer: Sael\n")
    terminal.shown = terminal.shown.partition("once more")[2]
    terminal.wait_for("Question (empty to leave): ")
    terminal.type("here?\x01W\n")  # Ctrl-A goes to the start of the line
    terminal.wait_for("Answer: Sael")
    terminal.wait_for("Question (empty to leave): ", times=2)
    assert "Question: Where?" in terminal.shown
    terminal.interrupt("closed")
    assert terminal.end() == 130
    assert "Traceback" not in terminal.shown
