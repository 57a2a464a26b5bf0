"""A chat model is trained with tools: the calculator, a function of one's own, and servers of the official SDK, over
stdin and stdout and over HTTP, that die in the middle."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from e2e_world import free_port, metrics_by_step, run_here
from format_models import tokenizer_of
from tiny_models import qwen2_config
from transformers import AutoTokenizer

from example import openai_agent
from verl.agent.formats import format_of
from verl.agent.tools import load_tools
from verl.errors import EnvironmentUnavailable
from verl.tracking.trajectory_store import read_trajectories, trajectories_path

NAME = "default-system"
PROGRAM = Path(__file__).resolve().parents[1] / "search_r1" / "tools" / "mcp_program.py"


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


FIRST = {
    "role": "assistant",
    "content": "",
    "tool_calls": [call("calculator", expression="2 + 3"), call("shout", word="five"), call("fragile", number=5)],
}
LAST = {"role": "assistant", "content": "<answer> 5 </answer>"}
RESULTS = [{"role": "tool", "name": "", "content": text} for text in ("5", "FIVE", "10")]


@pytest.fixture
def run_of_tools(tmp_path: Path) -> tuple[tuple[str, ...], Path]:
    """The command of a run of three steps, and the file that makes the server die when it is there."""
    marker = tmp_path / "die"
    server = {"command": sys.executable, "args": [str(PROGRAM)], "env": {"MCP_TESTS_DIE": str(marker)}}
    tools = ["calculator", "user_tools.shout", {"mcp": server, "options": {"only": ["fragile"]}}]
    return run_with(tools, FIRST, RESULTS, tmp_path), marker


def run_with(
    tools: list[Any],
    first: dict[str, Any],
    results: list[dict[str, Any]],
    tmp_path: Path,
    schemas: list[dict[str, Any]] | None = None,
) -> tuple[str, ...]:
    """The command of a run of three steps whose policy calls the tools as in `first`, reads `results`, and answers.

    `schemas`: of the tools in the prompt, if they are not those of the run.
    """
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": "What is 2 + 3?"}],
            "reward_model": {"ground_truth": {"target": ["5"]}},
        }
    ] * 4
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "prompts.parquet")

    # A policy that has learned one conversation by heart.
    # The tokenizer as a run loads it: the model's type in config.json may choose another class, with other ids.
    folder = tmp_path / "policy"
    tokenizer_of(NAME).save_pretrained(folder)
    qwen2_config(len(tokenizer_of(NAME)), 128, 256, 1, (4, 2), 4096).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    form = format_of(tokenizer)
    toolset = load_tools(tools)
    start = list(form.render(rows[0]["prompt"], schemas or toolset.schemas()).ids)  # type: ignore[arg-type]
    asyncio.run(toolset.close())
    ids = [*start, *form.turn(first)]
    ids += form.bridge(ids, results) or ()
    policy = _learned([*ids, *form.turn(LAST)], len(start), len(tokenizer), folder)
    files = tmp_path / "prompts.parquet"
    return (
        *("-m", "verl.trainer.main_ppo", "--config-name", "tinywiki", f"data.train_files={files}"),
        *(f"data.val_files={files}", "data.train_batch_size=4", "actor_rollout_ref.rollout.n_agent=4"),
        *("data.max_start_length=2500", "data.max_prompt_length=3500", "data.max_response_length=300"),
        *("actor_rollout_ref.actor.ppo_mini_batch_size=16", f"actor_rollout_ref.model.path={policy}"),
        *("agent.format=chat", "agent.template=chat", f"agent.tools={_as_typed(tools)}"),
        *(f"trainer.default_local_dir={tmp_path / 'run'}", "trainer.total_training_steps=3", "trainer.logger=[]"),
        *(
            "trainer.test_freq=-1",
            "+trainer.val_before_train=false",
            "trainer.save_freq=-1",
            "agent.max_failed_ratio=0.9",
        ),
        "actor_rollout_ref.actor.optim.lr=1e-5",
    )


def _as_typed(value: Any) -> str:
    """A list or a dictionary as a user types it behind a key."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {_as_typed(part)}' for name, part in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_as_typed, value))}]"
    return f"'{value}'" if isinstance(value, str) else str(value)


def _learned(conversation: list[int], start: int, vocabulary: int, folder: Path) -> Path:
    """A model that says the conversation, from `start` on, by heart."""
    from transformers import Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(qwen2_config(vocabulary, 128, 256, 1, (4, 2), 4096))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    ids_BT = torch.tensor([conversation])
    labels_BT = ids_BT.clone()
    labels_BT[:, :start] = -100
    loss = torch.tensor(torch.inf)
    while loss > 0.002:
        loss = model(input_ids=ids_BT, labels=labels_BT).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder


def test_an_agent_of_another_framework_is_trained_as_it_is(ray_session: object, tmp_path: Path) -> None:
    """The example on OpenAI's SDK: the run knows its address alone, and trains on the ids that were sampled."""
    first = {"role": "assistant", "content": "", "tool_calls": [call("calculator", expression="abs(2 - 7)")]}
    command = run_with([], first, RESULTS[:1], tmp_path, schemas=openai_agent.TOOLS)
    program = ("agent.program=example.openai_agent.play", "actor_rollout_ref.actor.use_rollout_log_probs=false")
    assert run_here(*command, *program) == 0
    logged, rows = metrics_by_step(tmp_path / "run"), list[dict[str, Any]]()
    for step in (1, 2, 3):
        rows += read_trajectories(trajectories_path(tmp_path / "run", "train", step))
        assert logged[step]["env/failed_ratio"] == 0
    assert len(rows) == 48 and sum(row["reward"] for row in rows) > 20
    for row in rows:
        both = zip(row["loss_mask"], row["log_probs"], row["old_log_probs"], strict=True)
        assert all(abs(sampled - trained) < 2e-3 for is_trained, sampled, trained in both if is_trained)
    right = next(row for row in rows if row["reward"] == 1)
    assert [segment["source"] for segment in right["segments"]] == ["prompt", "policy", "environment", "policy"]
    assert [event["action"] for event in right["events"]] == ["tool", "answer"]
    assert right["events"][0]["calls"][0]["result"] == "5"


def test_a_chat_model_is_trained_with_tools_while_a_server_dies(
    ray_session: object, run_of_tools: tuple[tuple[str, ...], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    command, marker = run_of_tools
    marker.touch()
    assert run_here(*command) == 0
    steps = metrics_by_step(tmp_path / "run")
    assert steps[3]["env/ratio_of_valid_action"] > 0.9 and not marker.exists()
    # The death cost attempts, and no trajectory: those were sampled again.
    assert "attempts failed, the first: the MCP server" in caplog.text
    rollouts = [
        row for step in (1, 2, 3) for row in read_trajectories(trajectories_path(tmp_path / "run", "train", step))
    ]
    assert len(rollouts) == 3 * 16 and not any(row["status"] == "failed" for row in rollouts)
    # What was called is stored with its results, in the order of the calls.
    right = [row for row in rollouts if row["reward"] == 1.0]
    assert len(right) > len(rollouts) / 2
    results = [[one.get("result") for one in row["events"][0]["calls"]] for row in right]
    assert results.count(["5", "FIVE", "10"]) > len(right) / 2


# Two servers with the same tools, of which one serves HTTP and goes away.

SLOW_S = 0.3
BOTH = [
    (call("add", first=2, second=3), "5", "ok"),
    (call("slow", seconds=SLOW_S), "waited", "ok"),
    (call("fail", why="no such file"), "Error: Error executing tool fail: no such file", "error"),
    (call("web_slow", seconds=SLOW_S), "waited", "ok"),
    (call("web_add", first=4, second=5), "9", "ok"),
    (call("web_fail", why="no such page"), "Error: Error executing tool fail: no such page", "error"),
]
"""The calls of the policy's first turn, what it reads, and how each ends."""


class Outage(threading.Thread):
    """A server over HTTP. In the middle of a run, when calls are in progress, it is killed, and started again."""

    def __init__(self, folder: Path, num_before: int) -> None:
        """`num_before`: how many slow calls come before that."""
        super().__init__(daemon=True)
        self._folder, self._num_before, self._port = folder, num_before, free_port()
        self.url = f"http://127.0.0.1:{self._port}/mcp"
        self.num_lost = 0
        self._over = threading.Event()
        folder.mkdir()
        self._start_server()

    def run(self) -> None:
        while self._num_begun() < self._num_before:
            if self._over.wait(0.02):
                return
        # From here on no slow call ends; one that begins now is in progress when the server dies.
        (self._folder / "hold").touch()
        before = self._num_begun()
        while self._num_begun() == before:
            if self._over.wait(0.02):
                return
        self._server.kill()
        self._server.wait()
        self.num_lost += 1
        (self._folder / "hold").unlink()
        self._over.wait(1.0)
        self._start_server()

    def close(self) -> None:
        self._over.set()
        if self.is_alive():
            self.join()
        self._server.kill()
        self._server.wait()

    def _num_begun(self) -> int:
        begun = self._folder / "begun"
        return begun.stat().st_size if begun.exists() else 0

    def _start_server(self) -> None:
        environment = os.environ | {"MCP_TESTS_SLOW": str(self._folder)}
        command = [sys.executable, str(PROGRAM), str(self._port)]
        self._server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.fixture
def outage(tmp_path: Path) -> Iterator[Outage]:
    made = Outage(tmp_path / "web", num_before=20)
    yield made
    made.close()


def when_it_listens(make: Callable[[], tuple[str, ...]]) -> tuple[str, ...]:
    """What `make` gives, as soon as the server that it asks listens."""
    end = time.monotonic() + 300
    while True:
        try:
            return make()
        except EnvironmentUnavailable:
            assert time.monotonic() < end
            time.sleep(0.2)


@pytest.mark.slow  # the run above has a server that dies, and test_mcp_server.py has HTTP
def test_a_run_goes_on_when_a_server_over_http_goes_away_and_comes_back(
    ray_session: object, outage: Outage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = {"only": ["add", "slow", "fail"]}
    web = own | {"prefix": "web_", "reconnect_timeout_s": 600.0}
    tools = [
        {"mcp": {"command": sys.executable, "args": [str(PROGRAM)]}, "options": own},
        {"mcp": outage.url, "options": web},
    ]
    first = {"role": "assistant", "content": "", "tool_calls": [one for one, _, _ in BOTH]}
    results = [{"role": "tool", "name": "", "content": text} for _, text, _ in BOTH]
    command = when_it_listens(lambda: run_with(tools, first, results, tmp_path))
    more = (
        *("data.max_response_length=500", "data.val_data_num=1", "data.val_batch_size=1"),
        "actor_rollout_ref.rollout.temperature=0.5",  # six calls without a slip of the pen
    )
    outage.start()
    assert run_here(*command, *more) == 0

    # The calls that were in progress failed their rollouts, which were sampled again when the server was back.
    steps = metrics_by_step(tmp_path / "run")
    assert outage.num_lost == 1 and sorted(steps) == [1, 2, 3]
    assert f"attempts failed, the first: the MCP server {outage.url}" in caplog.text
    [hit] = [step for step in steps if steps[step]["env/redraws"]]
    assert steps[hit]["env/failed_ratio"] > 0
    rows = [row for step in (1, 2, 3) for row in read_trajectories(trajectories_path(tmp_path / "run", "train", step))]
    assert len(rows) == 3 * 16 and not any(row["status"] == "failed" for row in rows)
    # Nobody reads of the outage, and what is paid for is the answer alone.
    assert not any("MCP" in row["response_text"] or "127.0.0.1" in row["response_text"] for row in rows)
    assert all(row["reward"] == float("<answer> 5 </answer>" in row["response_text"]) for row in rows)

    # Every call is stored with its result; an error is a result that the policy reads.
    right = [row for row in rows if [one["name"] for one in row["events"][0]["calls"]] == [name(one) for one in BOTH]]
    assert len(right) > len(rows) / 2
    for row in right:
        calls = row["events"][0]["calls"]
        if [one["arguments"] for one in calls] == [one["function"]["arguments"] for one, _, _ in BOTH]:
            assert [(one["result"], one["status"]) for one in calls] == [(text, status) for _, text, status in BOTH]
            assert all(text in row["response_text"] for _, text, _ in BOTH)
    assert steps[1]["agent/call_status/ok"] > 2 and steps[1]["agent/call_status/error"] > 1
    # A slow call of a server does not keep its others waiting.
    for prefix in ("", "web_"):
        took = {
            tool: min(one["milliseconds"] for row in right for one in row["events"][0]["calls"] if one["name"] == tool)
            for tool in (f"{prefix}add", f"{prefix}slow")
        }
        assert took[f"{prefix}add"] < 1000 * SLOW_S <= took[f"{prefix}slow"], took


def name(row: tuple[dict[str, Any], str, str]) -> str:
    """The tool of a row of `BOTH`."""
    called: str = row[0]["function"]["name"]
    return called
