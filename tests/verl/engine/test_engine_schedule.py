"""Learning rates worked out by hand, and the device settings."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from run_config import run_config

from verl.config.model import OptimConfig
from verl.engine.device import Precision, backend_of, resolve_device, resolve_precision
from verl.engine.optimizer import Schedule
from verl.errors import ConfigError


def optim(**values: Any) -> OptimConfig:
    return OptimConfig(**({"lr": 1e-3} | values))


def test_warm_up_then_constant() -> None:
    schedule = Schedule.from_config(optim(lr_warmup_steps_ratio=0.4), 10)  # 4 steps of warm-up
    rates = [schedule.at(step) for step in range(7)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3, 1e-3])


def test_the_published_warm_up_length() -> None:
    schedule = Schedule.from_config(optim(lr=1e-6, lr_warmup_steps_ratio=0.285), 1005)
    assert schedule.warmup_steps == 286
    assert schedule.at(0) == pytest.approx(1e-6 / 286)
    assert schedule.at(285) == schedule.at(1004) == 1e-6


def test_without_warm_up_the_first_step_has_the_full_rate() -> None:
    assert Schedule.from_config(optim(), 10).at(0) == 1e-3


def test_cosine_falls_to_its_minimum() -> None:
    schedule = Schedule.from_config(optim(warmup_style="cosine", lr_warmup_steps_ratio=0.2, min_lr_ratio=0.1), 10)
    assert [schedule.at(step) for step in (0, 1, 2)] == pytest.approx([0.5e-3, 1e-3, 1e-3])
    assert schedule.at(6) == pytest.approx(0.55e-3)  # half-way: 0.1 + 0.9 / 2
    assert schedule.at(4) == pytest.approx(1e-3 * (0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2))
    assert schedule.at(10) == schedule.at(50) == pytest.approx(0.1e-3)
    assert Schedule.from_config(optim(warmup_style="cosine"), 4).at(4) == pytest.approx(0.0)


def test_bad_schedules_are_named() -> None:
    """By the type and the bounds of the setting, before there is an engine."""
    key = "actor_rollout_ref.actor.optim"
    with pytest.raises(ConfigError, match="optim.warmup_style: expected one of constant, cosine, got 'linear'"):
        run_config([f"{key}.warmup_style=linear"])
    with pytest.raises(ConfigError, match="optim.lr_warmup_steps_ratio: must be at most 1, got 3"):
        run_config([f"{key}.lr_warmup_steps_ratio=3"])


def test_device_and_precision() -> None:
    cpu = resolve_device("cpu")
    assert cpu == torch.device("cpu") and backend_of(cpu) == "gloo"
    assert resolve_precision(cpu, "auto", "float32") == Precision(torch.float32, torch.float32)
    assert resolve_precision(torch.device("cuda"), "auto", "float32").param_dtype is torch.bfloat16
    assert backend_of(torch.device("cuda")) == "cpu:gloo,cuda:nccl"
    with pytest.raises(ConfigError, match="device 'tpu'"):
        resolve_device("tpu")
    with pytest.raises(ConfigError, match="number format 'int8'"):
        resolve_precision(cpu, "int8", "float32")


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_cuda_without_a_device() -> None:
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="sees no CUDA device"):
        resolve_device("cuda")
