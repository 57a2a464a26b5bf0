"""A small environment for the rollout tests, found by dotted name as any other."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path

from verl.agent.environment import Environment, Episode, Outcome
from verl.errors import EnvironmentUnavailable
from verl.protocol import Prompt

MEETING_S = 120.0


class EchoEnvironment(Environment):
    """Answers each turn with `[number of characters]`. A turn of a prompt whose row says so finds it unavailable:
    `row["failures"]` times in all, then never again. `row["bug"]` raises an error that is nobody's infrastructure.
    With `row["folder"]` a turn leaves a file of its name there, after `row["waits_for"]` others have left theirs.
    With `row["process"]` an episode has a process of its own, see `CountingProcess`.
    """

    stop_strings = ("e",)

    def __init__(self) -> None:
        self._failures: Counter[str] = Counter()

    async def open(self, prompt: Prompt) -> Episode:
        return await (CountingProcess.start(self, prompt) if prompt.row.get("process") else super().open(prompt))

    async def step(self, prompt: Prompt, text: str, tools_allowed: bool) -> Outcome:
        row = prompt.row
        if row.get("bug"):
            raise KeyError("a bug of the environment")
        if self._failures[row["name"]] < row.get("failures", 0):
            self._failures[row["name"]] += 1
            raise EnvironmentUnavailable(f"no answer for {row['name']}")
        if "folder" in row:
            await self._meet(Path(row["folder"]), row["name"], row.get("waits_for", 0))
        return Outcome("search", valid=True, done=False, reply=f"[{len(text)}]" if tools_allowed else "")

    async def _meet(self, folder: Path, name: str, others: int) -> None:
        deadline = time.monotonic() + MEETING_S
        while len(list(folder.iterdir())) < others:
            if time.monotonic() > deadline:
                raise KeyError(f"{name} waited in vain: only {sorted(p.name for p in folder.iterdir())} came")
            await asyncio.sleep(0.05)
        (folder / name).touch()


class CountingProcess(Episode):
    """A shell that counts the turns: its answer to the second begins a further sequence. `row["failures"]` of the
    prompt's episodes find it killed at their second turn.
    """

    def __init__(self, environment: EchoEnvironment, prompt: Prompt, shell: asyncio.subprocess.Process) -> None:
        self._environment, self._prompt, self._shell = environment, prompt, shell

    @classmethod
    async def start(cls, environment: EchoEnvironment, prompt: Prompt) -> CountingProcess:
        pipe = asyncio.subprocess.PIPE
        shell = await asyncio.create_subprocess_exec("sh", "-c", COUNT, "counts-turns", stdin=pipe, stdout=pipe)
        return cls(environment, prompt, shell)

    async def step(self, text: str, tools_allowed: bool) -> Outcome:
        assert self._shell.stdin and self._shell.stdout
        self._shell.stdin.write(b"turn\n")
        answer = await self._shell.stdout.readline()
        failures, row = self._environment._failures, self._prompt.row
        if "folder" in row and answer == b"1\n":
            await self._environment._meet(Path(row["folder"]), row["name"], row.get("waits_for", 0))
        if answer == b"2\n" and failures[row["name"]] < row.get("failures", 0):
            failures[row["name"]] += 1
            self._shell.kill()
            answer = await self._shell.stdout.readline()
        if not answer:
            raise EnvironmentUnavailable(f"the process of {row['name']} has died")
        reply = f"[{answer.decode().strip()}, {len(text)}]"
        if answer == b"2\n":
            return Outcome("note", True, False, context=[{"role": "user", "content": reply}])
        return Outcome("search", True, False, reply=reply)

    async def close(self) -> None:
        if self._shell.returncode is None:
            self._shell.kill()
        await self._shell.wait()


COUNT = "n=0; while read -r line; do n=$((n+1)); echo $n; done"
