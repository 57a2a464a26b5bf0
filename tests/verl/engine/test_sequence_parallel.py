"""Ranks that share the tokens of a row give the numbers of one rank that has them all. Four heads, two of keys."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import engine_workers
import pytest
import torch
from engine_cases import CPU, make_batch, make_engine, relative_error

from verl.engine.batching import Layout, merge_rows, model_input
from verl.engine.micro_batches import Budget, plan_all
from verl.engine.mini_batches import micro_budget
from verl.engine.model import layout_of
from verl.engine.sequence_parallel import SequenceGroup
from verl.errors import ConfigError


def layout(size: int, place: int) -> Layout:
    return Layout(True, sequence=SequenceGroup(torch.distributed.group.WORLD, size, place))


@pytest.fixture(scope="module")
def one(model_path: str, other_model_path: str) -> dict[str, Any]:
    return engine_workers.evaluate_alone(model_path, other_model_path)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, model_path: str, other_model_path: str) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("two_ranks")
    task = partial(engine_workers.evaluate, sharding=engine_workers.shared_by(2))
    return engine_workers.run(folder, model_path, other_model_path, 2, task)


@pytest.mark.parametrize("case", engine_workers.CASES)
def test_gradients(one: dict[str, Any], two: list[dict[str, Any]], case: str) -> None:
    for rank in two:
        assert relative_error(rank["gradients"][case], one["gradients"][case]) < 1e-5


def test_updates(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    for mine, theirs in zip(one["metrics"], two[0]["metrics"], strict=True):
        assert theirs == pytest.approx(mine, rel=1e-3, abs=1e-4)
    for part in ("policy", "anchor"):
        assert relative_error(two[0][part], one[part]) < 1e-3
    assert all("step 3" in rank["message"] for rank in two)


def test_log_probs(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    lengths_B = make_batch(12).lengths_B
    for rank in two:
        rows, found = rank["part"]
        assert rows == list(range(12))
        for name in ("log_prob", "entropy"):
            expected_T = merge_rows(lengths_B, [(one["part"][0], one["part"][1][name])])
            assert (found[name] - expected_T).abs().mean() < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_groups_and_repeated_heads(
    one: dict[str, Any], size: int, tmp_path: Path, model_path: str, other_model_path: str
) -> None:
    """Two groups of two have different rows; a group of four has more ranks than there are heads of keys."""
    cases, sharding = ("all_at_once", "top_k_kl", "one_row_for_two_workers"), engine_workers.shared_by(size)
    task = partial(engine_workers.evaluate, cases=cases, sharding=sharding)
    ranks = engine_workers.run(tmp_path, model_path, other_model_path, 4, task)
    for case in cases:
        assert all(relative_error(rank["gradients"][case], one["gradients"][case]) < 1e-5 for rank in ranks)
    groups = [[rank["part"][0] for rank in ranks[start : start + size]] for start in range(0, 4, size)]
    assert all(rows == group[0] for group in groups for rows in group)
    assert sorted(row for group in groups for row in group[0]) == list(range(12))


def test_slices_by_hand() -> None:
    """5 tokens for 2 ranks: 3 each, the last is filling. Tokens 1 to 4 but the second row's first are selected."""
    batch = make_batch(2)
    batch.lengths_B = torch.tensor([2, 3])
    batch.tokens = {"ids": torch.tensor([7, 8, 9, 10, 11]), "loss_mask": torch.tensor([True] * 5)}
    first, last = (model_input(batch, CPU, layout(2, place)) for place in (0, 1))
    assert first.ids_BL.tolist() == [[7, 8, 9]] and last.ids_BL.tolist() == [[10, 11, 0]]
    assert first.position_ids_BL is not None and last.position_ids_BL is not None
    assert first.position_ids_BL.tolist() == [[0, 1, 0]] and last.position_ids_BL.tolist() == [[1, 2, 0]]
    for inputs in (first, last):
        assert inputs.label_N.tolist() == [8, 10, 11]
        assert inputs.packed is not None and inputs.packed.lengths == (2, 3, 1)
        assert inputs.share is not None and inputs.share.counts == (2, 1)
    assert first.select_N.tolist() == [0, 2]  # 8 is predicted by 7, and 10, which the other rank has, by 9
    assert last.select_N.tolist() == [0]


def test_rows_are_dealt_to_groups() -> None:
    lengths_B = torch.tensor([9, 7, 5, 3])
    first, again, other, same = plan_all(lengths_B, 4, Budget(rows=4), layout(2, 0))
    assert first == again and other == same
    assert sorted(first[0] + other[0]) == [0, 1, 2, 3]


def test_a_group_holds_more() -> None:
    assert micro_budget(True, 100, 8, ranks_per_row=4) == Budget(tokens=400)
    assert micro_budget(False, 100, 8, ranks_per_row=4) == Budget(rows=32)  # 8 over one worker


def test_settings_that_cannot_work(model_path: str, run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="must divide the number of workers, 1"):
        make_engine(model_path, run_dir, *engine_workers.shared_by(2))
    model = make_engine(model_path, run_dir).policy.model
    sequence = SequenceGroup(torch.distributed.group.WORLD, 3, 0)
    with pytest.raises(ConfigError, match=r"must divide the number of attention heads of the model \(4\)"):
        layout_of([model], True, sequence)
    model._is_stateful = True
    with pytest.raises(ConfigError, match="Qwen2ForCausalLM keeps a state"):
        layout_of([model], True, SequenceGroup(torch.distributed.group.WORLD, 2, 0))
