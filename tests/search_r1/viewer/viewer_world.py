"""Runs as training leaves them: real trajectories of a real tokenizer, written by the real store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from fastapi.testclient import TestClient
from served_app import served_app
from transformers import PreTrainedTokenizerFast

from search_r1.http.gate import Metrics
from search_r1.llm_agent.grammar import SEARCH_R1
from search_r1.llm_agent.observations import format_passage
from search_r1.viewer.app import create_app
from search_r1.viewer.pages import Pages
from verl.protocol import Prompt, Segment, Source, Status, Trajectory
from verl.tracking.tracker import CONFIG_FILE
from verl.tracking.trajectory_columns import TokenValues
from verl.tracking.trajectory_store import Kind, write_trajectories

CONFIG = {
    "agent": {"template": "search_r1"},
    "algorithm": {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": True, "use_kl_in_reward": False},
    "reward": {
        "function": "search_r1.rewards.composite.CompositeReward",
        "kwargs": {"weights": {"exact_match": 1.0, "has_answer": 0.1}},
        "val_kwargs": {"weights": {"exact_match": 1.0}},
    },
}


@dataclass(frozen=True)
class Searched:
    """A turn that searches: what it is told are `passages`, (id, title, text)."""

    thought: str
    query: str
    passages: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class Episodes:
    """Builds trajectories with the ids of `tokenizer`."""

    tokenizer: PreTrainedTokenizerFast

    def played(
        self,
        group: str,
        question: str,
        gold: Sequence[str],
        turns: Sequence[Searched | str],
        reward: float | None,
        components: dict[str, float] | None = None,
        status: Status = Status.ANSWERED,
        data_source: str = "rivers",
        failure: str | None = None,
    ) -> Trajectory:
        """A text is a turn by itself: an answer, or one that is no action."""
        segments, events = [self._prompt(question)], []
        for turn in turns:
            own, event = self._turn(turn)
            segments += own
            events.append(event)
        row = {
            "question": question,
            "data_source": data_source,
            "reward_model": {"ground_truth": {"target": list(gold)}},
        }
        return Trajectory(
            group,
            Prompt(segments[0].ids, data_source, row),
            segments,
            status,
            num_turns=len(turns),
            num_valid_actions=sum(event["valid"] for event in events),
            num_searches=sum(isinstance(turn, Searched) for turn in turns),
            events=events,
            failure=failure,
            reward=reward,
            reward_components=components or {},
            weight_version=3,
        )

    def _turn(self, turn: Searched | str) -> tuple[list[Segment], dict[str, Any]]:
        if isinstance(turn, str):
            action = SEARCH_R1.parse_action(turn)
            event = {"action": action.kind, "valid": action.kind != "invalid"}
            own = [self._policy(turn)]
            if not event["valid"]:
                own.append(self._environment("\nThis turn held neither a search nor an answer.\n"))
            return own, event | ({"answer": action.content} if action.kind == "answer" else {})
        observation = SEARCH_R1.wrap_information(
            "".join(
                format_passage(n, f'"{title}"\n{text}') for n, (_, title, text) in enumerate(turn.passages, start=1)
            )
        )
        event = {
            "action": "search", "valid": True, "query": turn.query, "executed": True, "milliseconds": 2.5,
            "document_ids": [one for one, _, _ in turn.passages], "observation": observation,
            "scores": [12.5 - place for place in range(len(turn.passages))],
        }  # fmt: skip
        return [
            self._policy(f"<think>{turn.thought}</think><search>{turn.query}</search>"),
            self._environment(observation),
        ], event

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _prompt(self, question: str) -> Segment:
        return Segment(Source.PROMPT, self._ids(f"Answer in <answer> tags. Question: {question}\n"))

    def _environment(self, text: str) -> Segment:
        return Segment(Source.ENVIRONMENT, self._ids(text))

    def _policy(self, text: str) -> Segment:
        """Log-probs that differ from token to token."""
        ids = self._ids(text)
        return Segment(Source.POLICY, ids, tuple(-(1 + place % 7) / 4 for place in range(len(ids))))


LOIRE = ("17", "Loire", "The Loire is the longest river of France.")
RHONE = ("18", "Rhone", "The Rhone flows into the Mediterranean.")
QUESTIONS = ("Which river is the longest of France?", "Where does the Rhone end?", "Which river has Paris?")


def river_step(episodes: Episodes, is_later: bool = False) -> list[Trajectory]:
    """Three prompts, four samples each. The first: one right, one wrong, one without an answer, one failed.

    Of the second none is right, of the third all are; `is_later` they are the other way round.
    """
    longest, end, paris = QUESTIONS
    searched = Searched("I look it up", "longest river of France", [LOIRE, RHONE])
    right = "<think>It is the Loire</think><answer>The Loire</answer>"
    wrong = "<think>It is the Seine</think><answer>Seine</answer>"
    first = [
        episodes.played("g0", longest, ["Loire"], [searched, right], 1.1, {"exact_match": 1.0, "has_answer": 1.0}),
        episodes.played("g0", longest, ["Loire"], [searched, wrong], 0.1, {"exact_match": 0.0, "has_answer": 1.0}),
        episodes.played("g0", longest, ["Loire"], ["I do not know", "still not"], 0.0,
                        {"exact_match": 0.0, "has_answer": 0.0}, Status.TURN_LIMIT),
        episodes.played("g0", longest, ["Loire"], ["hm"], None, None, Status.FAILED, failure="the retriever is down"),
    ]  # fmt: skip
    scores = [(1.1, 1.0), (0.0, 0.0)] if is_later else [(0.0, 0.0), (1.1, 1.0)]
    second, third = (
        [
            episodes.played(group, question, [gold], [f"<answer>{gold if match else 'x'} </answer>"], reward,
                            {"exact_match": match, "has_answer": 1.0}, data_source="mouths")
            for _ in range(4)
        ]
        for (group, question, gold), (reward, match) in zip(
            [("g1", end, "Mediterranean Sea"), ("g2", paris, "Seine")], scores, strict=True
        )
    )  # fmt: skip
    return [*first, *second, *third]


def write_run(folder: Path, episodes: Episodes, config: dict[str, Any] | None = None) -> Path:
    """Steps 1 and 2 of training, validation after step 2, the tokenizer beside a checkpoint.

    Step 2 has no values of tokens beside the sampler's log-probs, like the files of older runs.
    """
    first = river_step(episodes)
    write_step(folder, episodes, "train", 1, first, token_values(first))
    write_step(folder, episodes, "train", 2, river_step(episodes, is_later=True))
    write_step(folder, episodes, "val", 2, river_step(episodes)[:1])
    episodes.tokenizer.save_pretrained(folder / "actor" / "global_step_2")
    (folder / CONFIG_FILE).write_text(yaml.safe_dump(CONFIG if config is None else config))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 2}) + "\n")
    return folder


def token_values(trajectories: Sequence[Trajectory]) -> TokenValues:
    """Of those that did not fail: numbers of both signs that differ from token to token; no KL at the last token."""
    rows = [row for row, trajectory in enumerate(trajectories) if trajectory.status is not Status.FAILED]
    trained = [trajectories[row] for row in rows]
    mask_T = np.concatenate([trajectory.loss_mask for trajectory in trained])
    sampled_T = np.concatenate([trajectory.log_probs for trajectory in trained])
    place_T = np.arange(len(mask_T))
    columns = {
        "advantages": (np.sin(place_T / 9), mask_T),
        "old_log_probs": (sampled_T + 0.01 * np.cos(place_T), mask_T),
        "kl": (np.where(place_T % 11 == 3, 1.5e-6, (place_T % 11) / 100 - 0.02), mask_T & (place_T < len(place_T) - 1)),
    }
    return TokenValues(rows, np.array([trajectory.num_tokens for trajectory in trained]), columns)


def write_step(
    folder: Path,
    episodes: Episodes,
    kind: Kind,
    step: int,
    trajectories: Sequence[Trajectory],
    values: TokenValues | None = None,
) -> Path:
    return write_trajectories(folder, kind, step, trajectories, episodes.tokenizer.decode, values)


def served(*paths: Path, token: str | None = None) -> AbstractContextManager[str]:
    """The address of a viewer in this process."""
    return served_app(create_app(Pages(paths), Metrics("viewer"), token), finishes=False)


def hostile() -> list[str]:
    """What a web page or a model may write, and what must be shown as it stands."""
    return [
        "<script>window.hacked=1</script>",
        "<img src=x onerror=window.hacked=1>",
        "</style></title></textarea><svg onload=window.hacked=1>",
        "\"'><a href=javascript:window.hacked=1>click</a>",
        "&lt;b&gt;&amp;&#60;script&#62;",
        "${window.hacked=1} {{7*7}} `${1}`",
        "<!-- --><![CDATA[ x ]]><?php ?>",
        "\u202egnp.exe\u202c \u200b\ufeff\u0301 \ufffd",
        "__proto__",
        "x" * 2000,
    ]


def client_of(*paths: Path, token: str | None = None) -> TestClient:
    return TestClient(create_app(Pages(paths), Metrics("viewer"), token))
