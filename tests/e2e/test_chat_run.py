"""A chat model is trained with tools: the calculator, a function of one's own, and a server of the official SDK that
dies in the middle."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from e2e_world import metrics_by_step, run_here
from format_models import model_format, tokenizer_of
from tiny_models import qwen2_config

from verl.agent.chat import ChatEnvironment
from verl.agent.tools import load_tools
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
    # The user's files: tools and prompts.
    marker = tmp_path / "die"
    server = {"command": sys.executable, "args": [str(PROGRAM)], "env": {"MCP_TESTS_DIE": str(marker)}}
    tools = ["calculator", "user_tools.shout", {"mcp": server, "options": {"only": ["fragile"]}}]
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": "What is 2 + 3?"}],
            "reward_model": {"ground_truth": {"target": ["5"]}},
        }
    ] * 4
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "prompts.parquet")

    # A policy that has learned one conversation by heart.
    tokenizer, form = tokenizer_of(NAME), model_format(NAME)
    environment = ChatEnvironment(form, load_tools(tools), tokenizer)
    start = list(environment.prompt_ids(rows[0]["prompt"]))  # type: ignore[arg-type]
    ids = [*start, *form.turn(FIRST)]
    ids += form.bridge(ids, RESULTS) or ()
    policy = _learned([*ids, *form.turn(LAST)], len(start), len(tokenizer), tmp_path / "policy")
    tokenizer.save_pretrained(policy)
    files = tmp_path / "prompts.parquet"
    command = (
        *("-m", "verl.trainer.main_ppo", "--config-name", "tinywiki", f"data.train_files={files}"),
        *(f"data.val_files={files}", "data.train_batch_size=4", "actor_rollout_ref.rollout.n_agent=4"),
        *("data.max_start_length=1500", "data.max_prompt_length=2500", "data.max_response_length=300"),
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
    return command, marker


def _as_typed(value: Any) -> str:
    """A list or a dictionary as a user types it behind a key."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {_as_typed(part)}' for name, part in value.items())}}}"
    return f"[{', '.join(map(_as_typed, value))}]" if isinstance(value, list) else f"'{value}'"


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
