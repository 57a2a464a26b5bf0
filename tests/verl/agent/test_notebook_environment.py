"""The example environment of docs/environments.md: a reader of several pages, who keeps notes instead of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from chat_tokenizer import chat_tokenizer
from documented_commands import ROOT, blocks
from scripted_policy import Script

from example.notebook_environment import NotebookEnvironment
from verl.agent.environment import Outcome, Sampling, make_environment
from verl.agent.episode import EpisodeLimits, run_episode
from verl.agent.messages import encode_prompt
from verl.agent.text import encode_text, policy_texts
from verl.config import load_config
from verl.protocol import Prompt, Source, Status, TrainBatch, Trajectory

PAGES = [
    "Skarn Light was built in 1871." + " The sea is grey." * 8,
    "Its keeper was Oda Fell." + " The wind is cold." * 8,
]
ROW = {"question": "Who kept the lighthouse that was built in 1871?", "pages": PAGES}
END = "<|im_end|>"
TURNS = [
    "<page> 1 </page>",
    "<page> 9 </page>",
    "<note> Skarn Light: 1871 </note>",
    "<page>2</page>",
    f"<note> keeper: Oda Fell </note>{END}",
    "<answer> Oda Fell </answer>",
]


def play(turns: list[str], limit: int = 450) -> tuple[Trajectory, Any]:
    tokenizer = chat_tokenizer()
    ids = encode_prompt(tokenizer, [{"role": "user", "content": ROW["question"]}])
    environment = make_environment(
        load_config("ppo_trainer", ["agent.environment=example.notebook_environment.NotebookEnvironment"]), tokenizer
    )
    policy = Script([encode_text(tokenizer, turn) for turn in turns])
    limits = EpisodeLimits(max_turns=8, max_response_length=100, max_context_length=limit)
    among = (policy, environment, tokenizer, Sampling(), limits, 1)
    return asyncio.run(run_episode(Prompt(tuple(ids), "pages", ROW), "g", *among)), tokenizer


def test_a_text_that_is_longer_than_the_context_is_read_with_notes() -> None:
    trajectory, tokenizer = play(TURNS)
    assert trajectory.status is Status.ANSWERED and trajectory.num_valid_actions == 5
    assert policy_texts(trajectory, tokenizer) == [turn.removesuffix(END) for turn in TURNS]
    first, second, third = (
        tokenizer.decode([token for segment in one for token in segment.ids]) for one in trajectory.sequences
    )
    assert PAGES[0] in first and "There are pages 1 to 2." in first and PAGES[1] not in first
    assert "- Skarn Light: 1871\n" in second and PAGES[1] in second and PAGES[0] not in second
    assert "- Skarn Light: 1871\n- keeper: Oda Fell\n" in third and not any(page in third for page in PAGES)
    assert third.startswith("<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nWho kept the lighthouse")
    assert third.endswith("<|im_start|>assistant\n<answer> Oda Fell </answer>")
    assert trajectory.events[-1]["answer"] == "Oda Fell" and len(trajectory.events[-1]["notes"]) == 2


def test_each_turn_is_trained_once_and_nothing_else() -> None:
    trajectory, _ = play(TURNS)
    trajectory.reward = 1.0
    batch = TrainBatch.from_trajectories([trajectory])
    assert len(batch) == 3 and batch.num_rollouts == 1
    sampled = [token for one in trajectory.segments if one.source is Source.POLICY for token in one.ids]
    assert batch.tokens["ids"][batch.tokens["loss_mask"]].tolist() == sampled


def test_without_notes_the_context_is_full() -> None:
    trajectory, _ = play(["<page> 1 </page>", "<page> 2 </page>", "<page> 1 </page>", TURNS[-1]])
    assert trajectory.status is Status.LENGTH_LIMIT and len(trajectory.sequences) == 1


@pytest.mark.parametrize(
    "turn", ["", "<page> one </page>", "<page>0</page>", "<page></page>", "<note> </note>", "<note>"]
)
def test_what_the_policy_does_wrong_it_is_told(turn: str) -> None:
    outcome: Outcome = asyncio.run(NotebookEnvironment().step(Prompt((), "pages", ROW), turn, True))
    assert not outcome.valid and not outcome.done and outcome.reply and outcome.context is None


def test_the_code_of_the_page_does_what_the_page_says() -> None:
    names: dict[str, Any] = {}
    code = [
        block for _, language, block in blocks((ROOT / "docs" / "environments.md").read_text()) if language == "python"
    ]
    exec(compile(code[1], "docs/environments.md", "exec"), names)

    async def two_turns() -> Outcome:
        episode = await names["Notebooks"]().open(Prompt((), "pages", ROW))
        await episode.step("<note> 1871 </note>", True)
        return await episode.step("<note> Oda </note>", True)

    notes = f"{ROW['question']}\nYour notes:\n<note> 1871 </note>\n<note> Oda </note>"
    assert asyncio.run(two_turns()).context == [{"role": "user", "content": notes}]
