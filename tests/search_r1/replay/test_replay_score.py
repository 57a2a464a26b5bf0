"""Stored trajectories under another reward: what changes, what stays, and what is printed."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_episodes import chat_trajectory, says, search, turn_ids
from format_models import tokenizer_of
from replay_world import Replay

from search_r1.replay.__main__ import main
from search_r1.rewards.format_reward import FormatReward
from verl.config import load_config
from verl.errors import RewardUnavailable
from verl.protocol import Status, Trajectory
from verl.tracking.tracker import settings_text
from verl.tracking.trajectory_store import load_trajectories, read_trajectories, write_trajectory_table

EXACT_MATCH = "search_r1.rewards.exact_match.ExactMatchReward"


class Judge:
    """A rule of a user: many at once, and not there for long responses."""

    def score_all(self, trajectories: Sequence[Trajectory], tokenizer: Any) -> list[Any]:
        return [self._score(trajectory, tokenizer) for trajectory in trajectories]

    def _score(self, trajectory: Trajectory, tokenizer: Any) -> Any:
        if trajectory.num_turns > 2:
            return RewardUnavailable("the judge is down")
        question = trajectory.prompt.row["question"]
        return (0.25, {"judge": 0.25, "town": float("town" in question)})


class NeverThere(Judge):
    def _score(self, trajectory: Trajectory, tokenizer: Any) -> Any:
        return RewardUnavailable("the judge is down")


def never_a_number(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    return math.nan


def words(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    return float(len(solution_str.split()))


class CountsLetters:
    """A rule of a user: one trajectory at a time, made by its constructor."""

    def __init__(self, letter: str) -> None:
        self.letter = letter

    def score(self, trajectory: Trajectory, tokenizer: Any) -> tuple[float, dict[str, float]]:
        return float(tokenizer.decode(trajectory.ids).count(self.letter)), {}


def test_exact_match_by_hand(replay: Replay, capsys: pytest.CaptureFixture[str]) -> None:
    right, wrong, none = "<answer> the Lune </answer>", "<answer> Osk </answer>", "<think> hm </think>"
    first = [
        replay.trajectory(0.5, turns=(right,), reward_components={"old": 1.0}),
        replay.trajectory(0.0, turns=(none,)),
    ]
    second = [replay.trajectory(1.0, turns=(wrong,), data_source="nq"), replay.failed()]
    files = [replay.store(*first, step=1), replay.store(*second, step=2)]
    output = replay.score(files, EXACT_MATCH, "--kwargs", "{wrong_answer_score: 0.25}")
    assert [line.split() for line in capsys.readouterr().out.splitlines()[1:3]] == [
        ["nq", "1", "1", "1.0000", "0.2500"],
        ["tinywiki", "2", "1", "0.2500", "0.5000"],
    ]
    rows = read_trajectories(output)
    assert [row["reward"] for row in rows] == [1.0, 0.0, 0.25, None]
    assert rows[0]["reward_components"] == {"exact_match": 1.0, "has_answer": 1.0}
    assert [row["status"] for row in rows] == ["answered", "answered", "answered", "failed"]
    assert [row["step"] for row in rows] == [1, 1, 2, 2]
    before = pa.concat_tables([pq.read_table(file) for file in files])
    same = [name for name in before.column_names if name not in ("reward", "reward_components")]
    assert pq.read_table(output).select(same).equals(before.select(same))
    assert [t.segments for t in load_trajectories(output)] == [t.segments for t in first + second]


def test_tags_are_read_as_the_run_of_the_files_reads_them(
    replay: Replay, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = asdict(load_config("ppo_trainer", ["actor_rollout_ref.model.path=m", "data.train_files=t"]))
    (tmp_path / "template.txt").write_text("---\ntags: {answer: reply}\n---\n{question}")
    (tmp_path / "config.yaml").write_text(settings_text(settings | {"agent": {"tags_in_thoughts": True}}))
    thought = "<think> or <reply> Lune </reply> </think>"
    answers = ("<reply> Lune </reply>", "<answer> Lune </answer>", thought)
    file = replay.store(*(replay.trajectory(turns=(answer,)) for answer in answers))
    assert [row["reward"] for row in read_trajectories(replay.score([file], EXACT_MATCH))] == [1.0, 0.0, 1.0]
    output = replay.score([file], EXACT_MATCH, "--template", "search_r1")
    assert [row["reward"] for row in read_trajectories(output)] == [0.0, 1.0, 0.0]

    # Files of another run, or of none, may have other tags.
    other = Replay(replay.tokenizer, replay.model, tmp_path / "other").store(replay.trajectory())
    command = [
        "score",
        str(file),
        str(other),
        "--tokenizer",
        str(replay.model),
        "--output",
        str(tmp_path / "o.parquet"),
    ]
    assert main([*command, "--reward", EXACT_MATCH]) == 2
    assert f"{tmp_path} and {tmp_path / 'other'} have other templates" in capsys.readouterr().err


FORMAT = "search_r1.rewards.format_reward.FormatReward"
SCORES = {"structure_format_score": 0.2, "retrieval_score": 0.1}


def test_a_stored_trajectory_scores_as_the_one_that_was_stored(replay: Replay) -> None:
    search, think = "<think> who </think><search> the river </search>", "<think> so </think>"
    sampled = [
        replay.trajectory(turns=(search, f"{think}<answer> Osk </answer>")),  # wrong, but the Lune was found
        replay.trajectory(turns=(f"{think}<answer> Osk </answer>",)),  # wrong, nothing was found
        replay.trajectory(turns=("<answer> Lune </answer>",)),  # right without a thought
    ]
    live = [FormatReward(**SCORES).score(one, replay.tokenizer) for one in sampled]
    assert [reward for reward, _ in live] == pytest.approx([0.3, 0.2, 0.8])
    file = replay.store(*sampled)
    replayed = read_trajectories(replay.score([file], FORMAT, "--kwargs", json.dumps(SCORES)))
    assert [(row["reward"], row["reward_components"]) for row in replayed] == live


def test_the_grammar_is_that_of_the_template(replay: Replay) -> None:
    sampled = replay.trajectory(None, turns=(r"<answer> It is \boxed{Lune} </answer>",))
    files = [replay.store(sampled)]
    for options, reward in (((), 0.0), (("--template", "research"), 1.0)):
        output = replay.score(files, EXACT_MATCH, *options)
        assert [row["reward"] for row in read_trajectories(output)] == [reward]


def test_a_rule_of_ones_own(replay: Replay) -> None:
    files = [replay.store(replay.trajectory(turns=("zzz",)))]
    output = replay.score(files, f"{__name__}.CountsLetters", "--kwargs", '{"letter": "z"}')
    assert read_trajectories(output)[0]["reward"] == 3.0


def test_a_function_of_ones_own(replay: Replay) -> None:
    files = [replay.store(replay.trajectory(turns=("one two", "three")))]
    assert read_trajectories(replay.score(files, f"{__name__}.words"))[0]["reward"] == 3.0


def test_what_cannot_be_scored_is_failed_and_counted(replay: Replay, capsys: pytest.CaptureFixture[str]) -> None:
    sampled = [replay.trajectory(turns=("a", "b", "c")), replay.trajectory(question="Which town?")]
    file = replay.store(*sampled, replay.failed())
    output = replay.score([file], f"{__name__}.Judge")
    unavailable, judged, before = load_trajectories(output)
    assert (unavailable.status, unavailable.failure) == (Status.FAILED, "the judge is down")
    assert (unavailable.reward, unavailable.reward_components) == (None, {})
    assert (judged.reward, judged.reward_components) == (0.25, {"judge": 0.25, "town": 1.0})
    assert (before.status, before.failure) == (Status.FAILED, "timed out")
    assert "1 failed before and are as they were; 1 could not be scored" in capsys.readouterr().out


def test_columns_that_were_added_are_kept(replay: Replay) -> None:
    plain = replay.store(replay.trajectory(), step=1)
    noted = replay.store(replay.trajectory(), step=2)
    write_trajectory_table(noted, pq.read_table(noted).append_column("note", pa.array(["x"])))
    output = replay.score([plain, noted], EXACT_MATCH)
    assert pq.read_table(output)["note"].to_pylist() == [None, "x"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--reward", "search_r1.rewards.gone.Reward"], "search_r1.rewards.gone"),
        (["--reward", EXACT_MATCH, "--kwargs", "{gone: 1}"], "gone"),
        (["--reward", EXACT_MATCH, "--template", "gone"], "gone"),
        (["--reward", EXACT_MATCH, "--tokenizer", "/gone"], "--tokenizer=/gone: no tokenizer could be loaded"),
        (["--reward", f"{__name__}.never_a_number"], "never_a_number gave nan"),
        (["--reward", f"{__name__}.NeverThere"], "none of 1 trajectories could be scored: the judge is down"),
    ],
)
def test_bad_options_are_named_and_nothing_is_written(
    replay: Replay, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    file, output = replay.store(replay.trajectory()), replay.folder / "scored.parquet"
    command = ["score", str(file), "--output", str(output), "--tokenizer", str(replay.model)]
    # A judge that is down may be there when the command is typed again.
    assert main([*command, *options]) == (1 if "is down" in message else 2)
    assert message in capsys.readouterr().err
    assert not output.exists()


def test_kwargs_have_to_be_a_mapping() -> None:
    for text in ("3", "{"):
        with pytest.raises(SystemExit):
            main(["score", "x", "--output", "y", "--tokenizer", "z", "--reward", EXACT_MATCH, "--kwargs", text])


def test_texts_of_another_tokenizer_are_named(replay: Replay, capsys: pytest.CaptureFixture[str]) -> None:
    good = replay.trajectory()
    file = replay.store(good, good)
    table = pq.read_table(file)
    segments = table["segments"].to_pylist()
    segments[1][0]["text"] = "Question: What?"
    place = table.column_names.index("segments")
    pq.write_table(table.set_column(place, "segments", pa.array(segments, table["segments"].type)), file)
    command = ["score", str(file), "--output", str(replay.folder / "out.parquet"), "--tokenizer", str(replay.model)]
    assert main([*command, "--reward", EXACT_MATCH]) == 2
    error = capsys.readouterr().err
    assert (
        f"{file}: row 1: the tokenizer is not the one that wrote these ids: at character 12 they decode to 'ich river?"
        in error
    )


def test_chat_rollouts_are_scored_by_their_answers_and_exported_as_sampled(tmp_path: Path) -> None:
    """With thinking that leaves the context, so that there are two sequences."""
    tokenizer_of("xml").save_pretrained(tmp_path / "model")
    turns = [says("", search(query="river"), thought="Hm."), "Hm.\n</think>\n\n<|im_end|>"]
    ends = [says("It is <answer> Sael </answer>."), says("Sael"), says("", search(query="city"))]
    rollouts = [chat_trajectory("xml", [*turns, end], "tool_cycle", max_turns=2) for end in ends]
    replay = Replay(tokenizer_of("xml"), tmp_path / "model", tmp_path)
    output = replay.score([replay.store(*rollouts)], EXACT_MATCH, "--template", "chat")
    assert [row["reward"] for row in read_trajectories(output)] == [1.0, 1.0, 0.0]
    rows = replay.export([output])
    assert len(rows) == 4
    trained = [segment["ids"] for row in rows for segment in row["segments"] if segment["source"] == "policy"]
    assert trained == [list(ids) for end in reversed(ends[:2]) for ids in turn_ids("xml", [*turns, end], "tool_cycle")]
