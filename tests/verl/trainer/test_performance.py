"""`perf/*` against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from verl.config import Config
from verl.protocol import Prompt, Status, Trajectory
from verl.tracking.spans import Span
from verl.trainer.model_shape import ModelShape, policy_shape
from verl.trainer.performance import Utilisation, idle_metrics, retriever_metrics, throughput_metrics

SHAPES = Path(__file__).parent / "shapes"


def test_throughput_is_by_second_and_device() -> None:
    found = throughput_metrics(6000, 12.0, 4)
    assert found == {"perf/total_num_tokens": 6000, "perf/time_per_step": 12, "perf/throughput": 125}


def test_idle_time_of_two_engines_and_a_rank() -> None:
    step = [Span("step", 0, 20)]
    engines = {
        # Samples for 6 of the 8 seconds in which it has episodes.
        "engine 0": [Span("rollouts", 1, 9), Span("generate", 1, 4), Span("generate", 6, 9), Span("wait", 4, 6)],
        # Samples for 4 of 4 seconds.
        "engine 1": [Span("rollouts", 2, 6), Span("generate", 2, 6)],
    }
    found = idle_metrics(step, engines, {"actor 0": [Span("update", 10, 15), Span("log_probs", 9, 10)]})
    assert found == {
        "perf/engine_idle_share": pytest.approx((14 / 20 + 16 / 20) / 2),
        "perf/rollout_idle_share": pytest.approx((2 / 8 + 0) / 2),
        "perf/driver_share": pytest.approx((1 + 5) / 20),  # before 1, and after 15
    }


def test_an_engine_that_had_no_episode_was_idle_all_the_time() -> None:
    found = idle_metrics([Span("step", 0, 10)], {"engine 0": []}, {})
    assert found == {"perf/engine_idle_share": 1.0, "perf/driver_share": 1.0}


def test_utilisation_by_hand() -> None:
    """10 parameters of which 2 are only looked up, 3 layers, hidden 4: rows of 2 and 5 tokens, twice."""
    shape = ModelShape(10, 3, 4, 16, 4, None, num_looked_up=2)
    utilisation = Utilisation(shape, epochs=2, promised_flops=1000.0)
    dense = 6 * 8 * (2 + 5)
    attention = 12 * 3 * 4 * (2 * 2 + 5 * 5) / 2
    assert utilisation.flops(torch.tensor([2, 5])) == 2 * (dense + attention)
    assert utilisation.metrics(torch.tensor([2, 5]), 4.0) == {"perf/mfu/actor": 2 * (dense + attention) / 4 / 1000}


def test_frozen_weights_have_no_gradient() -> None:
    shape = ModelShape(10, 0, 4, 16, 4, None, num_looked_up=2, num_adapted=3)
    assert Utilisation(shape, 1, 1.0).flops(torch.tensor([5])) == (4 * 8 + 2 * 3) * 5


@pytest.mark.parametrize("name", ["", "NVIDIA GeForce RTX 5090", "AMD Instinct MI300X"])
def test_a_device_without_data_sheet_has_no_utilisation(name: str) -> None:
    assert Utilisation.of(Config(), ModelShape(10, 3, 4, 16, 4, None), name, 8) is None


@pytest.mark.parametrize(
    ("name", "flops"),
    [("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA A100-PCIE-40GB", 312e12)],
)
def test_gpus_are_known_by_their_drivers_names(name: str, flops: float) -> None:
    config = Config()
    config.actor_rollout_ref.model.path = str(SHAPES / "Qwen2.5-7B")  # its embedding is not its head
    found = Utilisation.of(config, policy_shape(config), name, 8)
    assert found is not None and found.promised_flops == 8 * flops
    assert found.shape.num_looked_up == 152064 * 3584


def test_retriever_metrics_by_hand() -> None:
    """250 searches that took 1 to 250 ms, in a step of 20 s, beside turns that did not search."""
    milliseconds = [float(1 + place * 7 % 250) for place in range(250)]  # each once, in no order
    rows = [
        Trajectory(
            "g", Prompt((1,), "s", {}), [], Status.ANSWERED,
            events=[{"action": "search", "milliseconds": ms} for ms in milliseconds[place::5]] + [{"action": "answer"}],
        )
        for place in range(5)
    ]  # fmt: skip
    assert retriever_metrics(rows, 20.0) == {
        "perf/retriever/queries_per_s": 12.5,
        "perf/retriever/p50_ms": 125.0,
        "perf/retriever/p99_ms": 248.0,  # 99% of 250 are 247.5
    }
    assert retriever_metrics([replace(rows[0], events=[{"action": "answer"}])], 20.0) == {}
