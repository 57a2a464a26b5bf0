"""One worker, two, two pairs with a copy of the model each, and two that share each row give the same numbers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import engine_workers
import pytest
import torch
from engine_cases import CPU, make_batch, make_engine, relative_error
from transformers import AutoModelForCausalLM

from verl.engine.batching import Layout, RankValues, merge_rows, model_input
from verl.engine.device.sequence_parallel import SequenceGroup
from verl.engine.micro_batches import Budget, micro_budget, plan_all
from verl.engine.model import layout_of
from verl.errors import ConfigError


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, model_path: str, other_model_path: str) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("two_workers")
    ranks = engine_workers.run(folder, model_path, other_model_path, 2, engine_workers.evaluate)
    assert ranks[1]["policy"] == {}
    everyones = {name + "s": [rank[name] for rank in ranks] for name in ("part", "message")}
    return ranks[0] | everyones | {"folder": folder}


@pytest.fixture(scope="module")
def one(model_path: str, other_model_path: str) -> dict[str, Any]:
    return engine_workers.alone(engine_workers.evaluate, model_path, other_model_path)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory, model_path: str, other_model_path: str) -> dict[str, Any]:
    """Hybrid sharding (HSDP): four workers, two copies of the model."""
    folder = tmp_path_factory.mktemp("pairs_of_workers")
    task = partial(engine_workers.evaluate, cases=("all_at_once", "top_k_kl"), sharding=engine_workers.IN_PAIRS)
    ranks = engine_workers.run(folder, model_path, other_model_path, 4, task)
    return ranks[0] | {"parts": [rank["part"] for rank in ranks], "folder": folder}


@pytest.mark.parametrize("case", engine_workers.CASES)
def test_gradient(one: dict[str, Any], two: dict[str, Any], case: str) -> None:
    assert relative_error(two["gradients"][case], one["gradients"][case]) < 1e-5
    reference = "all_at_once"
    if case in ("token_budget", "gradient_checkpointing", "one_unit"):  # the same loss, cut otherwise
        assert relative_error(two["gradients"][case], one["gradients"][reference]) < 1e-5


def test_two_copies_of_the_model_stay_one(one: dict[str, Any], pairs: dict[str, Any]) -> None:
    for case, gradient in pairs["gradients"].items():
        assert relative_error(gradient, one["gradients"][case]) < 1e-5
    for mine, theirs in zip(one["metrics"], pairs["metrics"], strict=True):
        assert theirs == pytest.approx(mine, rel=1e-3, abs=1e-4)
    for part in ("policy", "anchor"):
        assert relative_error(pairs[part], one[part]) < 1e-3
    test_saved_model_is_the_gathered_policy(pairs)
    assert all(torch.equal(tensor, pairs["policy"][name]) for name, tensor in pairs["restored"].items())
    assert sorted(row for rows, _ in pairs["parts"] for row in rows) == list(range(12))


def test_metrics_weights_and_anchor_after_updates(one: dict[str, Any], two: dict[str, Any]) -> None:
    for mine, theirs in zip(one["metrics"], two["metrics"], strict=True):
        assert mine.keys() == theirs.keys()
        assert theirs == pytest.approx(mine, rel=1e-3, abs=1e-4)
    assert two["metrics"][0]["actor/num_updates"] == 4.0  # twice 6 + 6 of 12 rows, where 5 are asked for
    for part in ("policy", "anchor"):
        assert relative_error(two[part], one[part]) < 1e-3  # AdamW divides tiny gradients by their own size
    assert all(torch.equal(tensor, two["followed"][name]) for name, tensor in one["followed"].items())
    assert all(relative_error(two[part], two["policy"]) > 1e-2 for part in ("anchor", "followed"))


def test_saved_model_is_the_gathered_policy(two: dict[str, Any]) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(two["folder"] / "saved", dtype=torch.float32)
    assert all(torch.equal(parameter, two["policy"][name]) for name, parameter in loaded.named_parameters())


def test_saved_weights_are_put_back_on_every_shard(one: dict[str, Any], two: dict[str, Any]) -> None:
    for results in (one, two):
        assert all(torch.equal(tensor, results["policy"][name]) for name, tensor in results["restored"].items())


def test_log_probs_of_both_ranks_make_the_batch(one: dict[str, Any], two: dict[str, Any]) -> None:
    batch = make_batch(12)
    rows = [part[0] for part in two["parts"]]
    assert sorted(rows[0] + rows[1]) == list(range(12)) and rows[0] and rows[1]
    for name in ("log_prob", "entropy"):
        merged = merge_rows(batch.lengths_B, [(part[0], part[1][name]) for part in two["parts"]])
        expected = merge_rows(batch.lengths_B, [(one["part"][0], one["part"][1][name])])
        torch.testing.assert_close(merged, expected, atol=2e-2, rtol=0)
    difference = merged - expected
    assert difference.abs().mean() < 1e-3


def test_numerical_error_reaches_every_rank(two: dict[str, Any]) -> None:
    assert all("step 4" in message for message in two["messages"])
    assert (two["folder"] / "failures" / "not_finite_step_4.pt").is_file()


@pytest.mark.parametrize(
    ("savers", "loaders", "sharding"),
    [(1, 2, ()), (2, 1, ()), pytest.param(4, 1, engine_workers.IN_PAIRS, marks=pytest.mark.slow)],
)
def test_a_state_is_read_by_another_number_of_workers(
    tmp_path: Path, model_path: str, other_model_path: str, savers: int, loaders: int, sharding: tuple[str, ...]
) -> None:
    paths = (model_path, other_model_path)
    (tmp_path / "saved").mkdir()
    (tmp_path / "loaded").mkdir()
    save = partial(engine_workers.save_and_go_on, sharding=sharding)
    saved = engine_workers.run(tmp_path / "saved", *paths, savers, save)[0]
    load = partial(engine_workers.load_and_go_on, tmp_path / "saved" / "state")
    for loaded in engine_workers.run(tmp_path / "loaded", *paths, loaders, load):
        for part in ("policy", "anchor", "moments"):
            assert loaded[part].keys() == saved[part].keys() and saved[part]
            assert all(torch.equal(tensor, loaded[part][name]) for name, tensor in saved[part].items()), part
        assert loaded["step"] == saved["step"] == 2
        assert loaded["next"] == pytest.approx(saved["next"], rel=1e-3, abs=1e-4)


def test_rows_go_to_who_wants_them(tmp_path: Path, model_path: str, other_model_path: str) -> None:
    """By hand: four rows of 2, 1, 3 and 2 tokens."""
    ranks = engine_workers.run(tmp_path, model_path, other_model_path, 2, engine_workers.exchange_rows)
    (rows, first), (others, second) = (rank["got"] for rank in ranks)
    assert (rows, others) == ([3, 1], [0, 3, 2])  # by owner, in the order in which they are wanted
    assert first["value"].tolist() == [30, 31, 10]
    assert second["value"].tolist() == [0, 1, 30, 31, 20, 21, 22]
    assert second["pair"].tolist() == [[0, 0], [1, -1], [30, -30], [31, -31], [20, -20], [21, -21], [22, -22]]
    assert [rank["again"][0] for rank in ranks] == [[], [1]]
    assert [rank["found"]["value"].tolist() for rank in ranks] == [[30, 31, 10], [30, 31, 0, 1]]
    assert all("no rank has row 1" in rank["message"] for rank in ranks)


def test_the_same_update_with_columns_that_stay(tmp_path: Path, model_path: str, other_model_path: str) -> None:
    """Two ranks, two shuffled epochs: metrics and weights to the last bit."""
    ranks = engine_workers.run(tmp_path, model_path, other_model_path, 2, engine_workers.learn_from_own_columns)
    for rank in ranks:
        (metrics, weights), (expected, expected_weights) = rank["own"], rank["whole"]
        assert metrics == expected and metrics[0]["actor/kl_loss"] > 0
        assert all(torch.equal(weight, expected_weights[name]) for name, weight in weights.items())


def test_rows_that_nobody_found(tmp_path: Path, model_path: str) -> None:
    engine = make_engine(model_path, tmp_path)
    batch = make_batch(3)
    own = RankValues([0, 2], {"top_index": torch.zeros(int(batch.lengths_B[[0, 2]].sum()), 4, dtype=torch.int32)})
    with pytest.raises(ValueError, match="no rank has row 1"):
        engine.update(batch, own)


SHARING_CASES = (
    "all_at_once",
    "token_budget",
    "one_row_for_two_workers",
    "gradient_checkpointing",
    "top_k_kl",
    "per_sequence",
)


def layout(size: int, place: int) -> Layout:
    return Layout(True, sequence=SequenceGroup(torch.distributed.group.WORLD, size, place))


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory, model_path: str, other_model_path: str) -> list[dict[str, Any]]:
    """Two ranks that share the tokens of a row. Four heads, two of keys."""
    folder = tmp_path_factory.mktemp("sharing")
    task = partial(engine_workers.evaluate, cases=SHARING_CASES, sharding=engine_workers.shared_by(2))
    return engine_workers.run(folder, model_path, other_model_path, 2, task)


@pytest.mark.parametrize("case", SHARING_CASES)
def test_gradients_of_shared_rows(one: dict[str, Any], sharing: list[dict[str, Any]], case: str) -> None:
    for rank in sharing:
        assert relative_error(rank["gradients"][case], one["gradients"][case]) < 1e-5


def test_updates_with_shared_rows(one: dict[str, Any], sharing: list[dict[str, Any]]) -> None:
    for mine, theirs in zip(one["metrics"], sharing[0]["metrics"], strict=True):
        assert theirs == pytest.approx(mine, rel=1e-3, abs=1e-4)
    for part in ("policy", "anchor"):
        assert relative_error(sharing[0][part], one[part]) < 1e-3
    assert all("step 4" in rank["message"] for rank in sharing)


def test_log_probs_of_shared_rows(one: dict[str, Any], sharing: list[dict[str, Any]]) -> None:
    lengths_B = make_batch(12).lengths_B
    for rank in sharing:
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


def test_slices_of_shared_rows_by_hand() -> None:
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


def test_a_group_of_ranks_holds_more() -> None:
    assert micro_budget(True, 100, 8, ranks_per_row=4) == Budget(tokens=400)
    assert micro_budget(False, 100, 8, ranks_per_row=4) == Budget(rows=32)  # 8 over one worker


def test_settings_that_cannot_share_rows(model_path: str, run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="must divide the number of workers, 1"):
        make_engine(model_path, run_dir, *engine_workers.shared_by(2))
    model = make_engine(model_path, run_dir).policy.model
    sequence = SequenceGroup(torch.distributed.group.WORLD, 3, 0)
    with pytest.raises(ConfigError, match=r"must divide the number of attention heads of the model \(4\)"):
        layout_of([model], True, sequence)
    model._is_stateful = True
    with pytest.raises(ConfigError, match="Qwen2ForCausalLM keeps a state"):
        layout_of([model], True, SequenceGroup(torch.distributed.group.WORLD, 2, 0))
