from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.errors import DataError, StorageError
from verl.protocol import Prompt, Segment, Source, Status, Trajectory
from verl.tracking.trajectory_columns import TokenValues
from verl.tracking.trajectory_store import (
    SCHEMA,
    find_trajectories,
    load_trajectories,
    read_trajectories,
    write_trajectories,
    write_trajectory_table,
)


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


def cut() -> Trajectory:
    """A rollout of three sequences; the context of the second holds the reply to the first turn."""
    own = searched()
    prompt, first, reply, last = own.segments
    own.segments = [
        prompt,
        first,
        Segment(Source.CONTEXT, codes("Q?<s>") + reply.ids),
        Segment(Source.POLICY, codes("sum"), (-0.5, -1.5, -0.25), ((11, 1), (12, 2))),
        Segment(Source.CONTEXT, codes("Q?sum")),
        last,
    ]
    own.num_turns = 3
    return own


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
    assert first["segments"][2] == {
        "source": "environment",
        "num_tokens": 5,
        "text": "\n<i>\n",
        "weight_versions": None,
    }
    assert first["searches"] == [{"query": "capital", "document_ids": ["5", "a"], "ms": 1.5}]
    assert [event["query"] for event in first["events"]] == ["capital", "too late"]
    assert first["reward"] == 0.75
    assert first["reward_components"] == {"exact_match": 1.0, "format": -0.25}
    assert first["ground_truth"] == {"target": ["Rome", "Roma"]}
    assert (first["status"], first["group_id"], first["data_source"]) == ("turn_limit", "group-7", "tinywiki_2hop")
    assert (first["num_turns"], first["num_searches"], first["weight_version"], first["step"]) == (2, 1, 12, 3)
    assert (second["status"], second["failure"], second["reward"]) == ("failed", "timed out", None)
    assert second["searches"] == [] and second["ground_truth"] is None


def test_the_sequences_of_a_rollout_stand_one_after_the_other(tmp_path: Path) -> None:
    path = write_trajectories(tmp_path, "train", 3, [cut(), searched()], decode)
    row = read_trajectories(path)[0]
    assert decode(row["ids"]) == "Q?<s>Q?<s>\n<i>\nsumQ?sumok"
    assert "".join(".x"[trained] for trained in row["loss_mask"]) == "..xxx..........xxx.....xx"
    assert [value for value in row["log_probs"] if value] == [-0.25, -0.5, -1.0, -0.5, -1.5, -0.25, -0.125, -2.0]
    assert (row["prompt_text"], row["response_text"]) == ("Q?", "<s>sumok")
    context = {"source": "context", "num_tokens": 10, "text": "Q?<s>\n<i>\n", "weight_versions": None}
    assert row["segments"][2] == context
    loaded, other = load_trajectories(path)
    assert loaded.segments == cut().segments and loaded.sequences == cut().sequences
    assert loaded.prompt.ids == codes("Q?") and other.segments == searched().segments


def test_only_some_columns(tmp_path: Path) -> None:
    path = write_trajectories(tmp_path, "val", 0, [searched()], decode)
    assert read_trajectories(path, ["reward", "status"]) == [{"reward": 0.75, "status": "turn_limit"}]


def test_no_trajectories_is_a_readable_file(tmp_path: Path) -> None:
    assert read_trajectories(write_trajectories(tmp_path, "val", 0, [], decode)) == []


@pytest.mark.parametrize(("tokens", "num_groups"), [(10, 1), (2_000_000, 5)])
def test_long_rows_are_written_in_small_groups(tmp_path: Path, tokens: int, num_groups: int) -> None:
    """The viewer's DuckDB reads a whole group for one row: there are at most 16 MiB in each."""
    table = pa.table({"ids": pa.array([np.zeros(tokens, np.int32)] * 10)})
    write_trajectory_table(tmp_path / "long.parquet", table)
    assert pq.read_metadata(tmp_path / "long.parquet").num_row_groups == num_groups
    assert pq.read_table(tmp_path / "long.parquet") == table


def test_files_are_found_in_order_of_step_by_kind(tmp_path: Path) -> None:
    for step in (10, 9, 100):
        write_trajectories(tmp_path, "val", step, [], decode)
    write_trajectories(tmp_path, "val_ref", 9, [], decode)
    assert list(find_trajectories(tmp_path, "val")) == [9, 10, 100]
    assert list(find_trajectories(tmp_path, "val_ref")) == [9]
    assert find_trajectories(tmp_path, "train") == {}
    # Such as `replay score` may have written beside them.
    for name in ("val_step_9_rescored", "val_step_", "val_step_last"):
        (tmp_path / "trajectories" / f"{name}.parquet").touch()
    assert list(find_trajectories(tmp_path, "val")) == [9, 10, 100]


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
    with pytest.raises(StorageError, match="val_step_0"):
        write_trajectories(tmp_path, "val", 0, [searched()], decode)
    assert list(target.parent.iterdir()) == [target]


def test_what_is_loaded_is_what_was_written(tmp_path: Path) -> None:
    original = searched()
    original.prompt.row["extra_info"] = {"question": "Which city?", "index": 7}
    loaded, failed = load_trajectories(write_trajectories(tmp_path, "train", 3, [original, broken()], decode))
    assert loaded.segments == original.segments
    assert loaded.prompt.ids == codes("Q?")
    assert loaded.prompt.row == {
        "data_source": "tinywiki_2hop",
        "question": "Which city?",
        "reward_model": {"ground_truth": {"target": ["Rome", "Roma"]}},
    }
    assert loaded.events == original.events
    for name in ("group_id", "status", "reward", "reward_components", "weight_version", "failure"):
        assert getattr(loaded, name) == getattr(original, name)
    assert (loaded.num_turns, loaded.num_valid_actions, loaded.num_searches) == (2, 2, 1)
    assert (failed.status, failed.failure, failed.reward) == (Status.FAILED, "timed out", None)
    assert failed.prompt.row == {"data_source": "nq"}


def test_the_question_of_the_row_goes_before_that_of_its_extra_info(tmp_path: Path) -> None:
    trajectory = broken()
    trajectory.prompt.row |= {"question": "Who?", "extra_info": {"question": "What?"}}
    path = write_trajectories(tmp_path, "val", 0, [trajectory, broken()], decode)
    assert [row["question"] for row in read_trajectories(path)] == ["Who?", None]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5).map(tuple)
LOG_PROB = st.floats(max_value=0, allow_nan=False, width=32)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    source, ids = draw(st.sampled_from([Source.POLICY, Source.ENVIRONMENT, Source.CONTEXT])), draw(IDS)
    if source is not Source.POLICY:
        return Segment(source, ids)
    return Segment(source, ids, tuple(draw(st.lists(LOG_PROB, min_size=len(ids), max_size=len(ids)))))


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    ids, counts, name = draw(IDS), st.integers(0, 9), st.text(max_size=5)
    row: dict[str, Any] = draw(st.fixed_dictionaries({}, optional={"question": name, "extra_info": st.none()}))
    if draw(st.booleans()):
        row["reward_model"] = {"ground_truth": draw(JSON)}
    events = st.dictionaries(name, JSON, max_size=2) | st.fixed_dictionaries(
        {"query": JSON}, optional={"executed": st.booleans(), "document_ids": st.lists(JSON, max_size=2)}
    )
    return Trajectory(
        draw(name),
        Prompt(ids, draw(name), row),
        [Segment(Source.PROMPT, ids), *draw(st.lists(segments(), max_size=4))],
        draw(st.none() | st.sampled_from(list(Status))),
        draw(counts),
        draw(counts),
        draw(counts),
        draw(st.lists(events, max_size=3)),
        draw(st.none() | name),
        draw(st.none() | st.floats(allow_nan=False)),
        draw(st.dictionaries(name, st.floats(allow_nan=False), max_size=3)),
        draw(counts),
        turn_rewards=tuple(draw(st.lists(st.floats(allow_nan=False), max_size=2))),
    )


@given(written=st.lists(trajectories(), max_size=3))
def test_loading_and_writing_again_gives_the_same_table(
    tmp_path_factory: pytest.TempPathFactory, written: list[Trajectory]
) -> None:
    folder = tmp_path_factory.mktemp("store")
    first = write_trajectories(folder, "train", 5, written, repr)
    loaded = load_trajectories(first)
    second = write_trajectories(folder, "test", 5, loaded, repr)
    assert pq.read_table(second).equals(pq.read_table(first))
    assert [t.segments for t in loaded] == [t.segments for t in written]
    assert [t.prompt.ids for t in loaded] == [t.prompt.ids for t in written]
    assert [t.turn_rewards for t in loaded] == [t.turn_rewards for t in written]


@given(written=st.lists(trajectories(), max_size=3))
def test_columns_of_tokens_are_those_of_plain_lists(
    tmp_path_factory: pytest.TempPathFactory, written: list[Trajectory]
) -> None:
    """Against Arrow's own conversion of Python lists, token by token."""
    table = pq.read_table(write_trajectories(tmp_path_factory.mktemp("store"), "train", 5, written, repr))
    assert table.select(SCHEMA.names).schema.equals(SCHEMA)
    for name, rows in (
        ("ids", [t.ids for t in written]),
        ("loss_mask", [t.loss_mask for t in written]),
        ("log_probs", [t.log_probs for t in written]),
        ("prompt_text", [repr(list(t.prompt.ids)) for t in written]),
        (
            "response_text",
            [
                repr([one for s in t.segments if s.source in ("policy", "environment") for one in s.ids])
                for t in written
            ],
        ),
    ):
        assert table[name].combine_chunks().equals(pa.array(rows, SCHEMA.field(name).type)), name
    texts = [[segment["text"] for segment in row] for row in table["segments"].to_pylist()]
    assert texts == [[repr(list(segment.ids)) for segment in t.segments] for t in written]


def altered(path: Path, **columns: Any) -> Path:
    """The file with other values in some columns, of the type they have, or (None) without them."""
    table = pq.read_table(path)
    for name, values in columns.items():
        place = table.column_names.index(name)
        table = table.remove_column(place)
        if values is not None:
            array = values if isinstance(values, pa.Array) else pa.array(values, pq.read_schema(path).field(name).type)
            table = table.add_column(place, name, array)
    pq.write_table(table, path)
    return path


@pytest.fixture
def two_rows(tmp_path: Path) -> Path:
    return write_trajectories(tmp_path, "train", 3, [broken(), broken()], decode)


def test_a_file_from_before_there_were_questions_loads(tmp_path: Path) -> None:
    path = altered(write_trajectories(tmp_path, "train", 3, [searched()], decode), question=None)
    [loaded] = load_trajectories(path)
    assert loaded.segments == searched().segments and "question" not in loaded.prompt.row


def test_columns_that_were_added_are_no_hindrance(two_rows: Path) -> None:
    pq.write_table(pq.read_table(two_rows).append_column("note", pa.array(["a", "b"])), two_rows)
    assert len(load_trajectories(two_rows)) == 2


PROMPT_SEGMENT = {"source": "prompt", "num_tokens": 1, "text": "Q"}
VERSIONS = [{"version": 1, "num_tokens": 1}]


def of(source: str, num_tokens: int = 1) -> dict[str, Any]:
    return {"source": source, "num_tokens": num_tokens, "text": "x" * num_tokens, "weight_versions": None}


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([of("context"), of("policy")], "the first segment is context: a rollout of several sequences begins with"),
        ([of("policy"), of("context")], "the first segment is policy: a rollout of several sequences begins with"),
        ([of("prompt"), of("policy"), of("context", 0), of("policy")], "segment 3 is a context without ids"),
        ([of("prompt"), of("context"), of("prompt")], "segment 3 is a prompt after a context"),
        ([of("prompt"), of("context") | {"weight_versions": VERSIONS}], "segment 2 is a context with weight versions"),
        ([of("prompt"), of("context"), of("policy", 2)], "column 'ids' does not have the 4 numbers"),
    ],
)
def test_sequences_that_do_not_fit_together_are_named(
    two_rows: Path, segments: list[dict[str, Any]], message: str
) -> None:
    length = min(3, sum(one["num_tokens"] for one in segments))
    mask = [one["source"] == "policy" for one in segments for _ in range(one["num_tokens"])][:length]
    columns = {"ids": [81] * length, "log_probs": [0.0] * length, "loss_mask": mask, "segments": segments}
    first = read_trajectories(two_rows)[0]
    path = altered(two_rows, **{name: [first[name], value] for name, value in columns.items()})
    with pytest.raises(DataError, match=message) as caught:
        load_trajectories(path)
    assert f"{path}: row 1: " in str(caught.value)


def test_a_context_has_no_log_probs(tmp_path: Path) -> None:
    path = write_trajectories(tmp_path, "train", 3, [cut()], decode)
    log_probs = cut().log_probs
    log_probs[5] = -0.5
    with pytest.raises(DataError, match="row 0: column 'log_probs' is not 0 in a context"):
        load_trajectories(altered(path, log_probs=[log_probs]))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"log_probs": None, "ids": None}, "holds no trajectories: columns ids, log_probs are missing"),
        ({"ids": pa.array([["a"], ["b"]])}, "holds no trajectories: "),
        ({"status": ["answered", "lost"]}, "row 1: 'lost' is not a valid Status"),
        ({"group_id": ["a", None]}, "row 1: column 'group_id' is null"),
        ({"ids": [[81], [81, 82]]}, "row 1: column 'ids' does not have the 1 numbers"),
        ({"ids": [[81], [None]]}, "row 1: column 'ids' does not have the 1 numbers"),
        ({"log_probs": [[0.0], []]}, "row 1: column 'log_probs' does not have the 1 numbers"),
        ({"loss_mask": [[False], [True]]}, "row 1: column 'loss_mask' is not what the sources"),
        (
            {"segments": [[PROMPT_SEGMENT], [PROMPT_SEGMENT | {"source": "user"}]]},
            "row 1: 'user' is not a valid Source",
        ),
        ({"segments": [[PROMPT_SEGMENT], [PROMPT_SEGMENT | {"num_tokens": -1}]]}, "row 1: column 'ids' does not have"),
        ({"segments": [[PROMPT_SEGMENT], [PROMPT_SEGMENT | {"text": None}]]}, "row 1: column 'segments' has a null"),
        ({"segments": [[PROMPT_SEGMENT], [None]]}, "row 1: column 'segments' has a null"),
        ({"events": [[], ["{"]]}, "row 1: Expecting property name"),
        ({"events": [[], ["3"]]}, "row 1: column 'events' has JSON that is not an object"),
        ({"ground_truth": ["1", "Rome"]}, "row 1: Expecting value"),
        ({"reward_components": [[], [("f1", 1.0), ("f1", 0.0)]]}, "row 1: column 'reward_components' has a name twice"),
    ],
)
def test_a_file_that_is_not_ours_or_damaged_is_named(two_rows: Path, columns: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        load_trajectories(altered(two_rows, **columns))
    assert str(two_rows) in str(caught.value)


def test_values_of_tokens(tmp_path: Path) -> None:
    """By hand: the third and the first trajectory were trained on, in that order. They have 11 tokens each."""
    number_T, even_T, first_T = np.arange(22.0), np.arange(22) % 2 == 0, np.arange(22) < 11
    columns = {"advantages": (number_T, even_T), "kl": (np.full(22, 0.5), first_T)}
    values = TokenValues([2, 0], np.array([11, 11]), columns)
    path = write_trajectories(tmp_path, "train", 1, [searched(), broken(), searched()], decode, values)
    rows = read_trajectories(path)
    assert rows[0]["advantages"] == [None, 12, None, 14, None, 16, None, 18, None, 20, None]
    assert rows[1]["advantages"] is None and rows[1]["kl"] is None
    assert rows[2]["advantages"] == [0, None, 2, None, 4, None, 6, None, 8, None, 10]
    assert rows[0]["kl"] == [None] * 11 and rows[2]["kl"] == [0.5] * 11
    assert pq.read_schema(path).names == [*SCHEMA.names, "advantages", "kl"]
    assert load_trajectories(path)[0].log_probs == searched().log_probs


def test_values_of_the_tokens_of_several_sequences(tmp_path: Path) -> None:
    """A trajectory's values are those of all its sequences: 25 tokens of the first, 12 of the second."""
    mask_T = np.array([*searched().loss_mask, *cut().loss_mask])
    values = TokenValues([1, 0], np.array([12, 25]), {"advantages": (np.arange(37.0), mask_T)})
    first, second = read_trajectories(write_trajectories(tmp_path, "train", 1, [cut(), searched()], decode, values))
    assert second["advantages"] == [None, None, 2, 3, 4, *[None] * 5, 10, 11]
    assert [value is not None for value in first["advantages"]] == cut().loss_mask
    assert first["advantages"][-1] == 36


def test_no_trajectory_was_trained_on(tmp_path: Path) -> None:
    values = TokenValues([], np.zeros(0, np.int64), {"kl": (np.zeros(0, np.float32), np.zeros(0, np.bool_))})
    path = write_trajectories(tmp_path, "train", 1, [broken()], decode, values)
    assert read_trajectories(path)[0]["kl"] is None
