"""One FSDP worker, two, and two pairs that each hold a copy of the model give the same numbers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import engine_workers
import pytest
import torch
from engine_cases import make_batch, relative_error
from transformers import AutoModelForCausalLM

from verl.engine.batching import merge_rows


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, model_path: str, other_model_path: str) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("two_workers")
    ranks = engine_workers.run(folder, model_path, other_model_path, 2, engine_workers.evaluate)
    assert ranks[1]["policy"] == {}
    everyones = {name + "s": [rank[name] for rank in ranks] for name in ("part", "message")}
    return ranks[0] | everyones | {"folder": folder}


@pytest.fixture(scope="module")
def one(model_path: str, other_model_path: str) -> dict[str, Any]:
    return engine_workers.evaluate_alone(model_path, other_model_path)


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


def test_metrics_cover_all_ranks(one: dict[str, Any], two: dict[str, Any]) -> None:
    for mine, theirs in zip(one["metrics"], two["metrics"], strict=True):
        assert mine.keys() == theirs.keys()
        assert theirs == pytest.approx(mine, rel=1e-3, abs=1e-4)
    assert two["metrics"][0]["actor/num_updates"] == 4.0  # twice 6 + 6 of 12 rows, where 5 are asked for


def test_the_anchor_follows_to_the_same_bits(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert all(torch.equal(tensor, two["followed"][name]) for name, tensor in one["followed"].items())
    assert relative_error(two["followed"], two["policy"]) > 1e-2


def test_weights_and_anchor_after_updates(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert relative_error(two["policy"], one["policy"]) < 1e-3  # AdamW divides tiny gradients by their own size
    assert relative_error(two["anchor"], one["anchor"]) < 1e-3
    assert relative_error(two["anchor"], two["policy"]) > 1e-2


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
    assert all("step 3" in message for message in two["messages"])
    assert (two["folder"] / "failures" / "not_finite_step_3.pt").is_file()


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
