"""Going on from a saved state: the same bits as without the break, on as many ranks or on others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_cases import make_batch, make_engine
from engine_state import assert_same_weights, save_state
from engine_workers import KL

from verl.engine.policy_engine import PolicyEngine
from verl.engine.sharding import local
from verl.errors import CheckpointError
from verl.storage import digest


def make(model_path: str, other_model_path: str, run_dir: Path) -> PolicyEngine:
    return make_engine(model_path, run_dir, *KL, anchor_path=other_model_path)


def train(engine: PolicyEngine, steps: range) -> list[dict[str, float]]:
    metrics = []
    for step in steps:
        metrics.append(engine.update(make_batch(seed=step)))
        engine.follow_anchor(0.9)
    return metrics


def assert_same(one: PolicyEngine, other: PolicyEngine) -> None:
    assert_same_weights(one, other)
    optimizers = one.resumable._optimizer_state(), other.resumable._optimizer_state()
    assert optimizers[0].keys() == optimizers[1].keys() and optimizers[0]
    assert all(torch.equal(local(tensor), local(optimizers[1][name])) for name, tensor in optimizers[0].items())


def test_going_on_gives_the_same_bits(model_path: str, other_model_path: str, run_dir: Path, tmp_path: Path) -> None:
    straight = make(model_path, other_model_path, run_dir)
    train(straight, range(3))
    straight.lr_factor = 0.5
    (tmp_path / "state").mkdir()
    straight.start_saving_state(tmp_path / "state")
    expected = train(straight, range(3, 6))  # while the files are written
    digests = straight.resumable.saved()
    assert digests and {name: digest(tmp_path / "state" / name) for name in digests} == digests
    assert digests.keys() == {path.name for path in (tmp_path / "state").iterdir()}
    broken = make(model_path, other_model_path, run_dir)
    broken.load_state(tmp_path / "state")
    assert (broken.step, broken.lr_factor) == (3, 0.5)
    assert train(broken, range(3, 6)) == expected
    assert_same(broken, straight)


def test_a_state_before_the_first_step(model_path: str, other_model_path: str, run_dir: Path, tmp_path: Path) -> None:
    straight = make(model_path, other_model_path, run_dir)
    save_state(straight, tmp_path)
    broken = make(other_model_path, model_path, run_dir)
    train(broken, range(2))  # an optimizer that was used is as good as new afterwards
    broken.load_state(tmp_path)
    assert train(broken, range(2)) == train(straight, range(2))
    assert_same(broken, straight)


def test_random_numbers_go_on(model_path: str, other_model_path: str, run_dir: Path, tmp_path: Path) -> None:
    engine = make(model_path, other_model_path, run_dir)
    save_state(engine, tmp_path)
    drawn = torch.rand(3)
    engine.load_state(tmp_path)
    assert torch.equal(torch.rand(3), drawn)


@pytest.mark.parametrize("harm", ["cut", "gone", "no_metadata", "other_shape"])
def test_a_damaged_state_is_named(
    model_path: str, other_model_path: str, run_dir: Path, tmp_path: Path, harm: str
) -> None:
    engine = make(model_path, other_model_path, run_dir)
    train(engine, range(1))
    save_state(engine, tmp_path)
    data = next(tmp_path.glob("__0_*"))
    if harm == "cut":
        data.write_bytes(data.read_bytes()[:1000])
    elif harm == "gone":
        data.unlink()
    elif harm == "no_metadata":
        (tmp_path / ".metadata").unlink()
    else:
        engine = make_engine(model_path, run_dir)  # has no anchor: what is asked for is there
        engine.load_state(tmp_path)
        tmp_path = save_state(engine, tmp_path / "without")
        engine = make(model_path, other_model_path, run_dir)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        engine.load_state(tmp_path)


def test_a_failed_write_is_told(model_path: str, other_model_path: str, run_dir: Path, tmp_path: Path) -> None:
    engine = make(model_path, other_model_path, run_dir)
    (tmp_path / "file").write_text("in the way")
    engine.start_saving_state(tmp_path / "file")
    for _ in range(2):  # whoever asks again is told again: the state must not pass for a saved one
        with pytest.raises(CheckpointError, match="file could not be written"):
            engine.resumable.saved()
    (tmp_path / "state").mkdir()
    engine.start_saving_state(tmp_path / "state")
    assert engine.resumable.saved() == engine.resumable.saved() != {}
