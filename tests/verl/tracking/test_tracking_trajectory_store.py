from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from verl.errors import DataError
from verl.protocol import Prompt, Segment, Source, Status, Trajectory
from verl.tracking.trajectory_store import find_trajectories, read_trajectories, write_trajectories


def decode(ids: Sequence[int]) -> str:
    return "".join(chr(token) for token in ids)


def codes(text: str) -> tuple[int, ...]:
    return tuple(ord(letter) for letter in text)


def searched() -> Trajectory:
    row = {"reward_model": {"ground_truth": {"target": np.array(["Rome", "Roma"])}}}
    return Trajectory(
        "group-7",
        Prompt(codes("Q?"), "tinywiki_2hop", row),
        [
            Segment(Source.PROMPT, codes("Q?")),
            Segment(Source.POLICY, codes("<s>"), (-0.25, -0.5, -1.0)),
            Segment(Source.ENVIRONMENT, codes("\n<i>\n")),
            Segment(Source.POLICY, codes("ok"), (-0.125, -2.0)),
        ],
        Status.TURN_LIMIT,
        num_turns=2,
        num_valid_actions=2,
        num_searches=1,
        events=[
            {"action": "search", "query": "capital", "executed": True, "document_ids": [5, "a"], "milliseconds": 1.5},
            {"action": "search", "query": "too late", "executed": False},
        ],
        reward=0.75,
        reward_components={"exact_match": 1.0, "format": -0.25},
        weight_version=12,
    )


def broken() -> Trajectory:
    prompt = Prompt(codes("Q"), "nq", {})
    return Trajectory("group-8", prompt, [Segment(Source.PROMPT, codes("Q"))], Status.FAILED, failure="timed out")


def test_round_trip(tmp_path: Path) -> None:
    path = write_trajectories(tmp_path, "train", 3, [searched(), broken()], decode)
    assert path == tmp_path / "trajectories" / "train_step_3.parquet"
    assert list(path.parent.iterdir()) == [path]  # no temporary file is left
    first, second = read_trajectories(path)
    assert first["ids"] == searched().ids
    assert first["loss_mask"] == [False] * 2 + [True] * 3 + [False] * 5 + [True] * 2
    assert first["log_probs"] == [0, 0, -0.25, -0.5, -1.0, 0, 0, 0, 0, 0, -0.125, -2.0]
    assert first["prompt_text"] == "Q?"
    assert first["response_text"] == "<s>\n<i>\nok"
    assert first["segments"][2] == {"source": "environment", "num_tokens": 5, "text": "\n<i>\n"}
    assert first["searches"] == [{"query": "capital", "document_ids": ["5", "a"], "ms": 1.5}]
    assert [event["query"] for event in first["events"]] == ["capital", "too late"]
    assert first["reward"] == 0.75
    assert first["reward_components"] == {"exact_match": 1.0, "format": -0.25}
    assert first["ground_truth"] == {"target": ["Rome", "Roma"]}
    assert (first["status"], first["group_id"], first["data_source"]) == ("turn_limit", "group-7", "tinywiki_2hop")
    assert (first["num_turns"], first["num_searches"], first["weight_version"], first["step"]) == (2, 1, 12, 3)
    assert (second["status"], second["failure"], second["reward"]) == ("failed", "timed out", None)
    assert second["searches"] == [] and second["ground_truth"] is None


def test_only_some_columns(tmp_path: Path) -> None:
    path = write_trajectories(tmp_path, "val", 0, [searched()], decode)
    assert read_trajectories(path, ["reward", "status"]) == [{"reward": 0.75, "status": "turn_limit"}]


def test_no_trajectories_is_a_readable_file(tmp_path: Path) -> None:
    assert read_trajectories(write_trajectories(tmp_path, "val", 0, [], decode)) == []


def test_files_are_found_in_order_of_step_by_kind(tmp_path: Path) -> None:
    for step in (10, 9, 100):
        write_trajectories(tmp_path, "val", step, [], decode)
    write_trajectories(tmp_path, "val_ref", 9, [], decode)
    assert list(find_trajectories(tmp_path, "val")) == [9, 10, 100]
    assert list(find_trajectories(tmp_path, "val_ref")) == [9]
    assert find_trajectories(tmp_path, "train") == {}


def test_a_write_that_fails_leaves_the_earlier_file_and_no_temporary(tmp_path: Path) -> None:
    path = write_trajectories(tmp_path, "val", 0, [searched()], decode)
    bad = searched()
    bad.segments.append(Segment(Source.ENVIRONMENT, (2**40,)))  # does not fit into int32
    with pytest.raises((OverflowError, ValueError)):
        write_trajectories(tmp_path, "val", 0, [bad], lambda ids: "")
    assert list(path.parent.iterdir()) == [path]
    assert len(read_trajectories(path)) == 1


def test_what_is_not_parquet_is_a_data_error(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_text("not parquet")
    for name in ("x.parquet", "missing.parquet"):
        with pytest.raises(DataError, match=name):
            read_trajectories(tmp_path / name)


def test_no_temporary_file_is_left_when_the_rename_fails(tmp_path: Path) -> None:
    target = tmp_path / "trajectories" / "val_step_0.parquet"
    target.mkdir(parents=True)
    with pytest.raises(OSError, match="val_step_0"):
        write_trajectories(tmp_path, "val", 0, [searched()], decode)
    assert list(target.parent.iterdir()) == [target]
