"""What users have from before a rollout could have several sequences works as it did: their files, reward, environment.

`one_sequence.parquet` was written by the code of that time: the three trajectories of `rollouts`, with `VALUES`.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient
from scripted_policy import Script

from search_r1.http.gate import Metrics
from search_r1.replay.__main__ import main
from search_r1.viewer.app import create_app
from search_r1.viewer.pages import Pages
from verl.agent.environment import Environment, Outcome, Sampling
from verl.agent.episode import EpisodeLimits, run_episode
from verl.agent.text import encode_text
from verl.config import load_config
from verl.data.sft_rows import read_rows, tokenise
from verl.protocol import Prompt, Segment, Source, Status, TrainBatch, Trajectory
from verl.tracking.trajectory_columns import TokenValues
from verl.tracking.trajectory_store import (
    load_trajectories,
    read_trajectories,
    render_trajectory,
    write_trajectories,
)
from verl.trainer.sampling.scoring import make_reward, score_trajectories

STORED = Path(__file__).parent / "one_sequence.parquet"
QUESTION = "Which river is the longest of France?"
SEARCH = "<think>I look it up</think><search>longest river</search>"
FOUND = '\n\n<information>Doc 1(Title: "Loire") The Loire is long.</information>\n\n'
VERSIONS = ((3, 20), (4, 37))


def ids_of(tokenizer: Any, text: str) -> tuple[int, ...]:
    """A token for each letter: those do not depend on what the tokenizer has learned to merge."""
    return tuple(
        tokenizer.convert_tokens_to_ids([{" ": "\u0120", "\n": "\u010a"}.get(letter, letter) for letter in text])
    )


def rollouts(tokenizer: Any) -> list[Trajectory]:
    """One that searched and answered, one that said nothing that was valid, one that failed."""

    def of(source: Source, text: str, versions: Any = ()) -> Segment:
        ids = ids_of(tokenizer, text)
        log_probs = tuple(-(1 + place % 7) / 4 for place in range(len(ids))) if source is Source.POLICY else None
        return Segment(source, ids, log_probs, versions)

    prompt = of(Source.PROMPT, f"Question: {QUESTION}\n")
    row = {"data_source": "rivers", "question": QUESTION, "reward_model": {"ground_truth": {"target": ["Loire"]}}}
    search = {
        "action": "search", "valid": True, "query": "longest river", "executed": True, "milliseconds": 2.5,
        "document_ids": ["17"], "scores": [12.5], "observation": FOUND,
    }  # fmt: skip
    first = [
        prompt,
        of(Source.POLICY, SEARCH, VERSIONS),
        of(Source.ENVIRONMENT, FOUND),
        of(Source.POLICY, "<answer>Loire</answer>"),
    ]
    second = [prompt, of(Source.POLICY, "hm"), of(Source.ENVIRONMENT, "\nNo action.\n"), of(Source.POLICY, "still not")]
    answered = Trajectory(
        "g0", Prompt(prompt.ids, "rivers", row), first, Status.ANSWERED,
        num_turns=2, num_valid_actions=2, num_searches=1, weight_version=4,
        events=[search, {"action": "answer", "valid": True, "answer": "Loire"}], reward=1.1,
        reward_components={"exact_match": 1.0, "has_answer": 1.0},
    )  # fmt: skip
    wandered = Trajectory(
        "g0", Prompt(prompt.ids, "rivers", row), second, Status.TURN_LIMIT, num_turns=2, reward=0.0,
        events=[{"action": "invalid", "valid": False}] * 2, reward_components={"exact_match": 0.0}, weight_version=4,
    )  # fmt: skip
    failure = {"status": Status.FAILED, "failure": "the retriever is down", "weight_version": 4}
    return [answered, wandered, Trajectory("g0", Prompt(prompt.ids, "rivers", row), [prompt], **failure)]


def values(trajectories: list[Trajectory]) -> TokenValues:
    """Of the two that did not fail: an advantage for each policy token."""
    lengths = np.array([len(trajectory.ids) for trajectory in trajectories[:2]])
    mask_T = np.array([trained for trajectory in trajectories[:2] for trained in trajectory.loss_mask])
    return TokenValues([0, 1], lengths, {"advantages": (np.repeat([0.75, -0.75], lengths), mask_T)})


def test_a_stored_file_loads_as_it_was_written(byte_tokenizer: Any, tmp_path: Path) -> None:
    written, loaded = rollouts(byte_tokenizer), load_trajectories(STORED)
    assert loaded == written
    assert [one.sequences for one in loaded] == [[one.segments] for one in written]
    assert loaded[0].segments[1].weight_versions == VERSIONS
    again = write_trajectories(tmp_path, "train", 1, loaded, byte_tokenizer.decode, values(loaded))
    assert pq.read_table(again).equals(pq.read_table(STORED)) and pq.read_schema(again).equals(pq.read_schema(STORED))
    first, second, failed = read_trajectories(STORED)
    assert [value for value in first["advantages"] if value is not None] == [0.75] * sum(first["loss_mask"])
    assert first["response_text"] == f"{SEARCH}{FOUND}<answer>Loire</answer>" and failed["advantages"] is None
    assert "Sequence" not in render_trajectory(first) and "No action." in render_trajectory(second)


def test_a_stored_file_is_shown(byte_tokenizer: Any, tmp_path: Path) -> None:
    folder = tmp_path / "rivers" / "trajectories"
    folder.mkdir(parents=True)
    shutil.copy(STORED, folder / "train_step_1.parquet")
    byte_tokenizer.save_pretrained(tmp_path / "rivers" / "actor" / "global_step_1")
    client = TestClient(create_app(Pages([tmp_path / "rivers"]), Metrics("viewer"), None))
    query = {"run": "rivers", "file": "train_step_1", "row": 0}
    shown = client.get("/api/trajectory", params=query).json()
    parts = [(part["kind"], part["tokens"]) for segment in shown["segments"] for part in segment["parts"]]
    assert [kind for kind, _ in parts] == ["text", "think", "search", "information", "answer"]
    assert all(
        segment["exact"] and segment.keys() == {"source", "span", "exact", "parts"} for segment in shown["segments"]
    )
    assert shown["tokens"]["ids"] == rollouts(byte_tokenizer)[0].ids
    assert shown["why"] == [
        'The answer "Loire" equals a gold answer after normalisation.',
        "A gold answer is in passage 1 of search 1.",
    ]
    page = client.get("/api/export", params=query).text
    assert "&lt;search&gt;longest river&lt;/search&gt;" in page and "Sequence" not in page


# A reward and an environment as users have written them; they know of no sequences.


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    found = re.findall(r"<answer>(.*?)</answer>", solution_str)
    return float(bool(found) and found[-1] in ground_truth["target"])


class Wordy:
    def __init__(self, cost: float) -> None:
        self.cost = cost

    def score(self, trajectory: Trajectory, tokenizer: Any) -> tuple[float, dict[str, float]]:
        policy = [segment for segment in trajectory.segments if segment.source is Source.POLICY]
        text = tokenizer.decode([token for segment in policy for token in segment.ids])
        assert sum(trajectory.loss_mask) == trajectory.num_policy_tokens
        assert len(trajectory.ids) == len(trajectory.prompt.ids) + trajectory.num_response_tokens
        return -self.cost * len(text), {"turns": float(len(policy)), "searches": float(trajectory.num_searches)}


class Adder(Environment):
    stop_strings = ("</add>", "</answer>")

    async def step(self, prompt: Prompt, text: str, tools_allowed: bool) -> Outcome:
        if "</answer>" in text:
            return Outcome("answer", valid=True, done=True)
        terms = re.search(r"<add>([\d +]+)</add>", text)
        if terms is None or not tools_allowed:
            return Outcome("invalid", valid=False, done=False, reply="\nWrite <add> 1 + 2 </add>, or an answer.\n")
        return Outcome("add", valid=True, done=False, reply=f"\n{sum(map(int, re.findall(r'[0-9]+', terms[1])))}\n")


@pytest.mark.parametrize(
    ("reward", "options", "scores", "components"),
    [
        ("compute_score", [], [1.0, 0.0, None], [{}, {}, {}]),
        (
            "Wordy",
            ["--kwargs", "{cost: 0.5}"],
            [-0.5 * (len(SEARCH) + 22), -0.5 * 11, None],
            [{"turns": 2.0, "searches": 1.0}, {"turns": 2.0, "searches": 0.0}, {}],
        ),
    ],
)
def test_a_stored_file_is_rescored(
    tiny_model_dir: Path, tmp_path: Path, reward: str, options: list[str], scores: list[Any], components: list[Any]
) -> None:
    output = tmp_path / "rescored.parquet"
    command = ["score", str(STORED), "--tokenizer", str(tiny_model_dir), "--reward", f"{__name__}.{reward}"]
    assert main([*command, *options, "--output", str(output)]) == 0
    rows = read_trajectories(output)
    assert [row["reward"] for row in rows] == scores
    assert [row["reward_components"] for row in rows] == components
    same = [name for name in pq.read_schema(STORED).names if name not in ("reward", "reward_components")]
    assert pq.read_table(output).select(same).equals(pq.read_table(STORED).select(same))


@pytest.mark.parametrize("options", [[], ["--text_only"]])
def test_a_stored_file_is_exported(byte_tokenizer: Any, tmp_path: Path, options: list[str]) -> None:
    output, answered = tmp_path / "sft.parquet", rollouts(byte_tokenizer)[0]
    assert main(["export", str(STORED), "--output", str(output), *options]) == 0
    [exported] = pq.read_table(output).to_pylist()
    texts = [f"Question: {QUESTION}\n", SEARCH, FOUND, "<answer>Loire</answer>"]
    assert [(one["source"], one["text"]) for one in exported["segments"]] == list(
        zip(["prompt", "policy", "environment", "policy"], texts, strict=True)
    )
    assert (exported["data_source"], exported["reward"]) == ("rivers", 1.1)
    [row] = read_rows(str(output))
    trained = tokenise(byte_tokenizer, row, "policy", 999)
    assert byte_tokenizer.decode(trained.ids_L[trained.loss_mask_L].tolist()) == f"{SEARCH}<answer>Loire</answer>"
    if not options:
        assert trained.ids_L.tolist() == answered.ids and trained.loss_mask_L.tolist() == answered.loss_mask


def test_an_environment_plays_and_its_episode_is_scored(byte_tokenizer: Any) -> None:
    lines = ["<add> 1 + 2 </add>", "Hm.", "<answer>3</answer>"]
    policy = Script([encode_text(byte_tokenizer, line) for line in lines])
    limits = EpisodeLimits(max_turns=3, max_response_length=128, max_context_length=2000)
    row = {"reward_model": {"ground_truth": {"target": ["3"]}}}
    prompt = Prompt(encode_text(byte_tokenizer, "1 + 2?"), "sums", row)
    trajectory = asyncio.run(run_episode(prompt, "g", policy, Adder(), byte_tokenizer, Sampling(), limits, 0))
    feedback = "Write <add> 1 + 2 </add>, or an answer."
    assert byte_tokenizer.decode(trajectory.ids) == f"1 + 2?{lines[0]}\n3\n{lines[1]}\n{feedback}\n{lines[2]}"
    assert (trajectory.status, trajectory.num_turns, len(trajectory.sequences)) == (Status.ANSWERED, 3, 1)
    for reward, options, expected in (("compute_score", {}, 1.0), ("Wordy", {"cost": 1}, -len("".join(lines)))):
        rule = make_reward(load_config("ppo_trainer"), f"{__name__}.{reward}", options)
        assert score_trajectories(rule, [trajectory], byte_tokenizer) == [trajectory] and trajectory.reward == expected
    assert len(TrainBatch.from_trajectories([trajectory])) == 1
