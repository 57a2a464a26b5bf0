"""TinyWiki as a taskset of verifiers 0.4, and the program by which a run here trains on it.

    bash example/verifiers/setup.sh
    ... agent.program='.venv-verifiers/bin/python example/verifiers/tinywiki.py' agent.program_serves=true \\
      reward.function=search_r1.rewards.program.ProgramReward

Each episode is a rollout of verifiers: its agent, which searches by tool calls, and its reward, which is exact match.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import verifiers.v1 as vf

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.modules["tinywiki"] = sys.modules[__name__]  # the name by which verifiers finds what is here

from example import openai_agent  # noqa: E402
from search_r1.llm_agent.grammar import SEARCH_R1  # noqa: E402
from search_r1.rewards.metrics import exact_match  # noqa: E402

__all__ = ["TinyWiki", "ToolLoop"]


class Question(vf.TaskData):
    """A row of a prompt file: its `prompt`, and the right answers."""

    targets: list[str]
    retriever_url: str


def score(text: str, targets: list[str]) -> float:
    """Exact match of the answer that `text` gives, or of the whole text."""
    answer = SEARCH_R1.extract_answer(text)
    return float(exact_match(text if answer is None else answer, targets))


class TinyWikiTask(vf.Task[Question]):
    @vf.reward(weight=1.0)
    async def exact_match(self, trace: vf.Trace) -> float:
        return score(trace.last_reply, self.data.targets)


class TinyWiki(vf.Taskset[TinyWikiTask, vf.TasksetConfig]):
    """The questions of $TINYWIKI_ROWS, a file of JSON lines with the rows of a prompt file."""

    def load(self) -> Iterable[TinyWikiTask]:
        for line in Path(os.environ["TINYWIKI_ROWS"]).read_text().splitlines():
            yield task_of(json.loads(line), os.environ["RETRIEVER_URL"])


def task_of(row: dict[str, Any], retriever_url: str) -> TinyWikiTask:
    targets = row["reward_model"]["ground_truth"]["target"]
    question = Question(prompt=row["prompt"][-1]["content"], targets=targets, retriever_url=retriever_url)
    return TinyWikiTask(question, vf.TaskConfig())


class ToolLoop(vf.Harness[vf.HarnessConfig]):
    """The agent of example/openai_agent.py, in this process."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = False
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):  # type: ignore[no-untyped-def]
        _, prompt = self.resolve_prompt(data)
        messages = [{"role": "user", "content": prompt}]
        where = SimpleNamespace(base_url=endpoint, api_key=secret, messages=messages, retriever_url=data.retriever_url)
        await openai_agent.play(where)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def play(name: str, task: dict[str, Any]) -> dict[str, Any]:
    """One rollout of verifiers, whose model is the policy of a session. Raises RuntimeError if it failed."""
    variable = f"SESSION_{name}"  # verifiers takes a key by the name of a variable
    os.environ[variable] = task["api_key"]
    try:
        agent = vf.Agent(
            vf.AgentConfig(
                model=task["model"],
                client=vf.EvalClientConfig(base_url=task["base_url"], api_key_var=variable),
                runtime=vf.SubprocessConfig(),
                harness=vf.HarnessConfig(id="tinywiki"),
            )
        )
        trace = await agent.run(task_of(task["row"], task["retriever_url"]))
    finally:
        del os.environ[variable]
    if not trace.ok:
        raise RuntimeError("; ".join(map(str, trace.errors)))
    return {"reward": trace.reward, "answer": trace.last_reply}


async def serve() -> None:
    """Play the episodes that come on the input, all at once."""
    lines = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    playing = set()

    async def answer(asked: dict[str, Any]) -> None:
        try:
            said = {"result": await play(asked["id"], asked["task"])}
        except Exception as error:
            said = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"id": asked["id"]} | said), flush=True)

    while line := await lines.readline():
        playing.add(one := asyncio.create_task(answer(json.loads(line))))
        one.add_done_callback(playing.discard)


if __name__ == "__main__":
    asyncio.run(serve())
