"""Rejection sampling: what is kept, in which order, and that training gets the very ids that were sampled."""

from __future__ import annotations

import dataclasses
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from replay_world import Replay, bytes_of, encoded
from sequences import in_sequences

from search_r1.replay.__main__ import main
from verl.config.loading.run import load_sft_config
from verl.data.sft_rows import Row, read_rows, tokenise
from verl.errors import DataError
from verl.protocol import Segment, Source, Status, Trajectory
from verl.trainer.sft import Batches, load_tokenizer


def ids_of(row: dict[str, Any]) -> list[int]:
    return [token for segment in row["segments"] for token in segment["ids"]]


def batch_of(replay: Replay) -> Any:
    """What training takes from the rows that were exported."""
    rows = read_rows(str(replay.folder / "out" / "sft.parquet"))
    settings = {"model.path": replay.model, "trainer.default_local_dir": replay.folder}
    settings |= {"data.train_batch_size": len(rows)}
    config = load_sft_config("sft", [f"{key}={value}" for key, value in settings.items()])
    return Batches(config, load_tokenizer(str(replay.model), False, "path"), rows).next(0)[1]


def half_a_letter(tokenizer: Any) -> tuple[int, ...]:
    """A turn that ends inside a letter: no text stands for these ids."""
    return bytes_of(tokenizer, "<search> é")[:-1]


def test_training_gets_the_sampled_ids_and_mask(replay: Replay) -> None:
    sampled = replay.trajectory(turns=(half_a_letter(replay.tokenizer), "<answer> Lune </answer>"))
    file = replay.store(sampled)
    [row] = replay.export([file])
    assert [segment["source"] for segment in row["segments"]] == ["prompt", "policy", "environment", "policy"]
    assert row["segments"][3]["text"] == "<answer> Lune </answer><|endoftext|>"
    assert (row["data_source"], row["reward"]) == ("tinywiki", 1.0)
    batch = batch_of(replay)
    assert batch.tokens["ids"].tolist() == sampled.ids
    assert batch.tokens["loss_mask"].tolist() == sampled.loss_mask  # the prompt's first token is masked anyway
    text = "".join(replay.tokenizer.decode(list(segment.ids)) for segment in sampled.segments)
    assert list(encoded(replay.tokenizer, text)) != sampled.ids  # going through text would have changed them


def test_without_ids_the_text_is_tokenised(replay: Replay) -> None:
    sampled = replay.trajectory(turns=("<answer> the river </answer>",))
    [row] = replay.export([replay.store(sampled)], "--text_only")
    assert all(segment.keys() == {"source", "text"} for segment in row["segments"])
    batch = batch_of(replay)
    assert len(batch.tokens["ids"]) < len(sampled.ids)
    assert replay.tokenizer.decode(batch.tokens["ids"].tolist()) == replay.tokenizer.decode(sampled.ids)


def test_another_tokenizer_is_noticed(replay: Replay) -> None:
    class Shifted:
        """Another vocabulary: every token has the number of the one before it."""

        def decode(self, ids: list[int]) -> str:
            return replay.tokenizer.decode([token + 1 for token in ids])

    replay.export([dataclasses.replace(replay, tokenizer=Shifted()).store(replay.trajectory())])
    with pytest.raises(
        DataError, match=r"sft.parquet: row 0, .*the tokenizer is not the one that wrote these ids.*--text_only"
    ):
        batch_of(replay)


@pytest.fixture
def mixed(replay: Replay) -> list[Trajectory]:
    made, search, answer = replay.trajectory, "<search> x </search>", "<answer> Lune </answer>"
    return [
        made(1.0, turns=(search, search, answer)),  # 0: two searches
        made(1.0, turns=(search, f"<think>{' long' * 99}</think>{answer}")),  # 1: one search, the longest
        made(1.0, turns=(search, answer)),  # 2: one search, shorter
        made(1.0, turns=(search, answer)),  # 3: the same text
        made(1.5, turns=(search, search, search, answer)),  # 4: the best reward
        made(0.5),  # 5
        made(None),  # 6
        replay.failed(),  # 7
        made(1.0, status=Status.TURN_LIMIT),  # 8
        made(1.0, question="Which town?", turns=(answer,)),  # 9: another prompt
        made(1.0, data_source="nq", turns=(answer,)),  # 10: the same question of another set
    ]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ((), [4, 2, 3, 1, 0, 9, 10]),
        (("--dedupe",), [4, 2, 1, 0, 9, 10]),
        (("--per_prompt", "1"), [4, 9, 10]),
        (("--per_prompt", "3"), [4, 2, 1, 9, 10]),
        (("--min_reward", "1.25"), [4]),
        (("--min_reward", "0.5", "--per_prompt", "9"), [4, 2, 1, 0, 5, 9, 10]),
    ],
)
def test_the_best_of_a_prompt_come_first(
    replay: Replay, mixed: list[Trajectory], options: tuple[str, ...], kept: list[int]
) -> None:
    rows = replay.export([replay.store(*mixed)], *options)
    assert [ids_of(row) for row in rows] == [mixed[i].ids for i in kept]
    assert [row["reward"] for row in rows] == [mixed[i].reward for i in kept]


def test_files_are_put_together_and_nothing_is_dropped_silently(
    replay: Replay, mixed: list[Trajectory], capsys: pytest.CaptureFixture[str]
) -> None:
    files = [replay.store(*mixed[:5], step=1), replay.store(*mixed[5:], step=2)]
    replay.export(files, "--per_prompt", "2")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "kept 4 of 11 trajectories"
    assert sorted(lines[1:-1]) == [
        "dropped 1: no reward",
        "dropped 1: reward below 1",
        "dropped 1: same text as a kept one of its prompt",
        "dropped 1: status failed",
        "dropped 1: status turn_limit",
        "dropped 2: more than 2 of its prompt",
    ]


def test_when_nothing_is_good_enough(replay: Replay, capsys: pytest.CaptureFixture[str]) -> None:
    output = replay.folder / "sft.parquet"
    file = replay.store(replay.trajectory(0.0))
    assert main(["export", str(file), "--output", str(output)]) == 2
    captured = capsys.readouterr()
    assert "dropped 1: reward below 1" in captured.out and "nothing was written" in captured.err
    assert not output.exists()
    assert main(["export", str(replay.store(step=9)), "--output", str(output)]) == 2
    assert "no trajectory in" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["export", str(file), "--output", str(output), "--per_prompt", "0"])


def test_what_was_sampled_is_not_replaced(replay: Replay, capsys: pytest.CaptureFixture[str]) -> None:
    """By rows without its log-probs, or with another reward; by whatever name the file is called."""
    file = replay.store(replay.trajectory())
    before, link = file.read_bytes(), replay.folder / "link.parquet"
    link.symlink_to(file)
    commands = (["export"], ["score", "--reward", "search_r1.rewards.format_reward.FormatReward"])
    for command in commands:
        tokenizer = [] if command == ["export"] else ["--tokenizer", str(replay.model)]
        assert main([*command, *tokenizer, str(file), "--output", str(link)]) == 2
        assert f"{link} is an input of this command; write to another --output" in capsys.readouterr().err
        assert file.read_bytes() == before


def cut_in_three(replay: Replay) -> Trajectory:
    """Its second turn begins a further sequence; the last sequence has no turn of the policy."""
    cut = in_sequences(replay.trajectory(turns=(half_a_letter(replay.tokenizer), "<answer> Lune </answer>")), 3)
    cut.segments.append(Segment(Source.CONTEXT, cut.segments[0].ids))
    return cut


def test_each_sampled_token_is_trained_once(replay: Replay, capsys: pytest.CaptureFixture[str]) -> None:
    whole, cut = replay.trajectory(question="Which town?"), cut_in_three(replay)
    rows = replay.export([replay.store(whole, cut)])
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["kept 2 of 2 trajectories", "3 rows: one for each sequence in which the policy wrote something"]
    assert [[segment["source"] for segment in row["segments"]] for row in rows[1:]] == [
        ["prompt", "policy", "environment"],
        ["context", "policy"],
    ]
    assert [row["reward"] for row in rows] == [1.0, 1.0, 1.0]
    batch = batch_of(replay)
    # Batches are of rows in any order.
    shown = zip(
        batch.tokens["ids"].split(batch.lengths_B.tolist()),
        batch.tokens["loss_mask"].split(batch.lengths_B.tolist()),
        strict=True,
    )
    trained = sorted(ids_L[mask_L].tolist() for ids_L, mask_L in shown)
    turns = [
        [token for one in part for token in one.ids if one.source is Source.POLICY]
        for t in (whole, cut)
        for part in t.sequences
    ]
    assert trained == sorted(turn for turn in turns if turn)


def test_each_text_of_the_policy_is_trained_once(replay: Replay) -> None:
    cut = in_sequences(replay.trajectory(turns=("<search> the river </search>", "<answer> Lune </answer>")), 3)
    replay.export([replay.store(cut)], "--text_only")
    batch = batch_of(replay)
    text = replay.tokenizer.decode(batch.tokens["ids"][batch.tokens["loss_mask"]].tolist())
    first, second = "<search> the river </search>", "<answer> Lune </answer><|endoftext|>"
    assert text in (first + second, second + first)


def test_rollouts_with_other_contexts_are_not_equal(replay: Replay) -> None:
    """One of two equal texts is dropped, whether it was cut or not, if the contexts are equal, too."""
    whole = replay.trajectory()
    first, second = in_sequences(whole, 3), in_sequences(whole, 3)
    other = in_sequences(whole, 3)
    other.segments[3] = Segment(Source.CONTEXT, whole.segments[0].ids)
    assert len(replay.export([replay.store(first, second, other)], "--dedupe")) == 4


CONTEXT, TURN = {"source": "context", "text": "c"}, {"source": "policy", "text": "p"}


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([{"source": "prompt", "text": "q"}, TURN, CONTEXT, TURN], "segment 3 is a context; .*a row of their own"),
        ([CONTEXT, TURN, CONTEXT, TURN], "segment 3 is a context"),
        ([CONTEXT, {"source": "prompt", "text": "q"}, TURN], "segment 2 is a prompt after a context"),
        ([CONTEXT | {"text": ""}, TURN], "the context is empty"),
        ([CONTEXT | {"ids": []}, TURN | {"ids": [1]}], "the context is empty"),
        ([CONTEXT | {"source": "contexts"}, TURN], "'contexts' is not prompt, policy, environment, context"),
    ],
)
def test_rows_that_are_no_sequence_are_named(replay: Replay, segments: list[dict[str, Any]], message: str) -> None:
    path = replay.folder / "sft.parquet"
    pq.write_table(pa.table({"segments": [[{"source": "prompt", "text": "q"}, TURN], segments]}), path)
    with pytest.raises(DataError, match=message) as caught:
        read_rows(str(path))
    assert f"{path}: row 1, column 'segments': " in str(caught.value)


def test_a_language_model_learns_no_context(replay: Replay) -> None:
    """What it repeats is in another row."""
    row = Row(("context", "policy", "environment"), ("ab", "cd", "ef"), None, "here")
    assert tokenise(replay.tokenizer, row, "lm", 99).loss_mask_L.tolist() == [False, False, True, True, True, True]
    assert tokenise(replay.tokenizer, row, "policy", 99).loss_mask_L.tolist() == [
        False,
        False,
        True,
        True,
        False,
        False,
    ]
