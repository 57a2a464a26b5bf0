"""When gradients are reduced, counted; what is gathered when, by PyTorch's own record; over real gloo ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import engine_workers
import pytest
from engine_cases import relative_error

MICRO_BATCHES = 3  # of each rank, in tests/verl/engine/engine_workers.py
UNITS = 3  # two layers, and the root


@pytest.fixture(scope="module")
def by_setting(
    tmp_path_factory: pytest.TempPathFactory, model_path: str, other_model_path: str
) -> dict[tuple[int, str], dict[str, Any]]:
    """Of rank 0, by the number of ranks (four are two pairs) and by `reduce_gradients`."""
    found = {}
    for num_ranks in (2, 4):
        folder = tmp_path_factory.mktemp(f"reduction_{num_ranks}")
        task = partial(engine_workers.count_collectives, in_pairs=num_ranks == 4)
        rank = engine_workers.run(folder, model_path, other_model_path, num_ranks, task)[0]
        found |= {(num_ranks, name): counted for name, counted in rank.items()}
    return found


@pytest.mark.parametrize(
    ("num_ranks", "setting", "reductions"),
    [(2, "micro_batch", MICRO_BATCHES), (2, "mini_batch", 1), (4, "micro_batch", MICRO_BATCHES), (4, "mini_batch", 1)],
)
def test_collectives(
    by_setting: dict[tuple[int, str], dict[str, Any]], num_ranks: int, setting: str, reductions: int
) -> None:
    found = by_setting[num_ranks, setting]
    assert found["num_micro_batches"] == MICRO_BATCHES
    assert found["counts"]["reduce-scatter"] == UNITS * reductions
    # Between replicas once, whatever the setting; and once the sum of the metrics.
    assert found["counts"]["all-reduce"] == 1 + UNITS * (num_ranks == 4)
    # Each layer for the forward and for the backward, the root once.
    assert found["counts"]["all-gather"] == MICRO_BATCHES * (2 * (UNITS - 1) + 1)


def test_the_gradient_is_the_same(by_setting: dict[tuple[int, str], dict[str, Any]]) -> None:
    expected = by_setting[2, "micro_batch"]["gradient"]
    for found in by_setting.values():
        assert relative_error(found["gradient"], expected) < 1e-6


def test_weights_are_gathered_one_unit_ahead(by_setting: dict[tuple[int, str], dict[str, Any]]) -> None:
    """In the forward the gathering of layer 1 begins before layer 0 is done, in the backward the other way round."""
    events = by_setting[2, "micro_batch"]["events"]
    forward = ["gather root", "gather 0", "gather 1", "done 0", "done 1"]
    backward = ["gather 1", "gather 0", "backward done 1", "backward done 0"]
    assert events[: len(forward) + len(backward)] == forward + backward
