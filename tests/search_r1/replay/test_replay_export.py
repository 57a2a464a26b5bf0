"""Rejection sampling: what is kept, in which order, and that training gets the very ids that were sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from replay_world import bytes_of, encoded, failed, store, trajectory

from search_r1.replay.__main__ import main
from verl.config.sft import SftConfig, load_sft_config
from verl.data.sft_rows import read_rows
from verl.errors import DataError
from verl.protocol import Status, Trajectory
from verl.trainer.sft import Batches, load_tokenizer


def export(folder: Path, files: list[Path], *options: str) -> list[dict[str, Any]]:
    output = folder / "out" / "sft.parquet"
    assert main(["export", *map(str, files), "--output", str(output), *options]) == 0
    return pq.read_table(output).to_pylist()


def ids_of(row: dict[str, Any]) -> list[int]:
    return [token for segment in row["segments"] for token in segment["ids"]]


def sft_config(model: Path, folder: Path, num_rows: int) -> SftConfig:
    settings = [f"model.path={model}", f"trainer.default_local_dir={folder}", f"data.train_batch_size={num_rows}"]
    return load_sft_config("sft", settings)


def batch_of(file: Path, model: Path, folder: Path) -> Any:
    rows = read_rows(str(file))
    _, batch = Batches(sft_config(model, folder, len(rows)), load_tokenizer(str(model), False, "path"), rows).next(0)
    return batch


def half_a_letter(tokenizer: Any) -> tuple[int, ...]:
    """A turn that ends inside a letter: no text stands for these ids."""
    return bytes_of(tokenizer, "<search> é")[:-1]


def test_training_gets_the_sampled_ids_and_mask(byte_tokenizer: Any, tiny_model_dir: Path, tmp_path: Path) -> None:
    sampled = trajectory(byte_tokenizer, turns=(half_a_letter(byte_tokenizer), "<answer> Lune </answer>"))
    file = store(tmp_path, [sampled], byte_tokenizer)
    [row] = export(tmp_path, [file])
    assert [segment["source"] for segment in row["segments"]] == ["prompt", "policy", "environment", "policy"]
    assert row["segments"][3]["text"] == "<answer> Lune </answer><|endoftext|>"
    assert (row["data_source"], row["reward"]) == ("tinywiki", 1.0)
    batch = batch_of(tmp_path / "out" / "sft.parquet", tiny_model_dir, tmp_path)
    assert batch.tokens["ids"].tolist() == sampled.ids
    assert batch.tokens["loss_mask"].tolist() == sampled.loss_mask  # the prompt's first token is masked anyway
    text = "".join(byte_tokenizer.decode(list(segment.ids)) for segment in sampled.segments)
    assert list(encoded(byte_tokenizer, text)) != sampled.ids  # going through text would have changed them


def test_without_ids_the_text_is_tokenised(byte_tokenizer: Any, tiny_model_dir: Path, tmp_path: Path) -> None:
    sampled = trajectory(byte_tokenizer, turns=("<answer> the river </answer>",))
    [row] = export(tmp_path, [store(tmp_path, [sampled], byte_tokenizer)], "--text_only")
    assert all(segment.keys() == {"source", "text"} for segment in row["segments"])
    batch = batch_of(tmp_path / "out" / "sft.parquet", tiny_model_dir, tmp_path)
    assert len(batch.tokens["ids"]) < len(sampled.ids)
    assert byte_tokenizer.decode(batch.tokens["ids"].tolist()) == byte_tokenizer.decode(sampled.ids)


def test_another_tokenizer_is_noticed(byte_tokenizer: Any, tiny_model_dir: Path, tmp_path: Path) -> None:
    class Shifted:
        """Another vocabulary: every token has the number of the one before it."""

        def decode(self, ids: list[int]) -> str:
            return byte_tokenizer.decode([token + 1 for token in ids])

    file = store(tmp_path, [trajectory(byte_tokenizer)], Shifted())
    export(tmp_path, [file])
    with pytest.raises(
        DataError, match=r"sft.parquet: row 0, .*the tokenizer is not the one that wrote these ids.*--text_only"
    ):
        batch_of(tmp_path / "out" / "sft.parquet", tiny_model_dir, tmp_path)


@pytest.fixture
def mixed(byte_tokenizer: Any) -> list[Trajectory]:
    def made(reward: float | None = 1.0, **changes: Any) -> Trajectory:
        return trajectory(byte_tokenizer, reward, **changes)

    search, answer = "<search> x </search>", "<answer> Lune </answer>"
    return [
        made(1.0, turns=(search, search, answer)),  # 0: two searches
        made(1.0, turns=(search, f"<think>{' long' * 99}</think>{answer}")),  # 1: one search, the longest
        made(1.0, turns=(search, answer)),  # 2: one search, shorter
        made(1.0, turns=(search, answer)),  # 3: the same text
        made(1.5, turns=(search, search, search, answer)),  # 4: the best reward
        made(0.5),  # 5
        made(None),  # 6
        failed(byte_tokenizer),  # 7
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
    mixed: list[Trajectory], byte_tokenizer: Any, tmp_path: Path, options: tuple[str, ...], kept: list[int]
) -> None:
    rows = export(tmp_path, [store(tmp_path, mixed, byte_tokenizer)], *options)
    assert [ids_of(row) for row in rows] == [mixed[i].ids for i in kept]
    assert [row["reward"] for row in rows] == [mixed[i].reward for i in kept]


def test_files_are_put_together_and_nothing_is_dropped_silently(
    mixed: list[Trajectory], byte_tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [store(tmp_path, mixed[:5], byte_tokenizer, 1), store(tmp_path, mixed[5:], byte_tokenizer, 2)]
    export(tmp_path, files, "--per_prompt", "2")
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


def test_when_nothing_is_good_enough(byte_tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "sft.parquet"
    file = store(tmp_path, [trajectory(byte_tokenizer, 0.0)], byte_tokenizer)
    assert main(["export", str(file), "--output", str(output)]) == 1
    captured = capsys.readouterr()
    assert "dropped 1: reward below 1" in captured.out and "nothing was written" in captured.err
    assert not output.exists()
    assert main(["export", str(store(tmp_path, [], byte_tokenizer, 9)), "--output", str(output)]) == 1
    assert "no trajectory in" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["export", str(file), "--output", str(output), "--per_prompt", "0"])
