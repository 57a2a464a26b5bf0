"""Packed against padded rows as long as search trajectories are: same numbers, less work, balance; the GPU check."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_cases import make_engine, relative_error
from engine_state import gradients

from verl.engine import varlen
from verl.engine.batching import Layout
from verl.engine.micro_batches import Budget, plan_all
from verl.engine.policy_engine import PolicyEngine
from verl.protocol import TrainBatch

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
sys.path += [str(SCRIPTS / "bench"), str(SCRIPTS / "gpu")]
import engine_check  # noqa: E402
from packing import WAYS, balance, in_order, main, search_batch  # noqa: E402

ACTOR = "actor_rollout_ref.actor"
BY_ROWS = (f"{ACTOR}.use_dynamic_bsz=false", f"{ACTOR}.ppo_micro_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=64")
REMOVE = "actor_rollout_ref.model.use_remove_padding"


def rl_batch(num_rows: int = 24) -> TrainBatch:
    """With everything that an update asks for; the window is that of the tiny model."""
    batch = search_batch(num_rows, longest=120)
    generator = torch.Generator().manual_seed(1)
    for name in ("old_log_probs", "advantages"):
        batch.tokens[name] = torch.randn(len(batch.tokens["ids"]), generator=generator)
    batch.tokens["old_log_probs"] -= 4.0
    return batch


@pytest.fixture(scope="module")
def engines(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, PolicyEngine]:
    folder = tmp_path_factory.mktemp("packing")
    return {packed: make_engine(model_path, folder, *BY_ROWS, f"{REMOVE}={packed}") for packed in (False, True)}


def test_packing_is_the_default(model_path: str, run_dir: Path, engines: dict[bool, PolicyEngine]) -> None:
    assert make_engine(model_path, run_dir).layout.packed
    assert engines[True].policy.model.config._attn_implementation == "varlen"
    assert not engines[False].layout.packed and engines[False].policy.model.config._attn_implementation == "sdpa"


def test_gradients_agree(engines: dict[bool, PolicyEngine]) -> None:
    batch = rl_batch()
    padded, packed = (gradients(engines[way], batch) for way in (False, True))
    assert relative_error(packed, padded) < 1e-5


def test_no_token_is_computed_that_is_not_real(engines: dict[bool, PolicyEngine]) -> None:
    """Counted at the model's embedding, through a whole pass of the engine."""
    batch = rl_batch()
    tokens = {}
    for packed, engine in engines.items():
        seen: list[int] = []
        embedding = engine.policy.model.get_input_embeddings()
        hook = embedding.register_forward_hook(lambda _, given, __, seen=seen: seen.append(given[0].numel()))
        gradients(engine, batch)
        hook.remove()
        tokens[packed] = sum(seen) / len(batch.tokens["ids"])
    assert tokens[True] <= 1.02
    assert tokens[False] > 1.1


@pytest.mark.parametrize("budget", [Budget(rows=8), Budget(rows=2), Budget(rows=1), Budget(tokens=16384)])
@pytest.mark.parametrize("square", [0.0, 1.5e-5, 1e-4])
def test_eight_ranks_wait_little_for_each_other(budget: Budget, square: float) -> None:
    lengths_B = search_batch(256).lengths_B
    computed, path = balance(lengths_B, 8, budget, "packed", square)
    assert computed == 1.0 and path <= 1.05


def test_padding_in_order_is_what_packing_is_measured_against() -> None:
    lengths_B = search_batch(256).lengths_B
    assert in_order(torch.ones(5), 2, 1, Budget(rows=1), None) == [[3], [4]]
    waste, path = balance(lengths_B, 8, Budget(rows=8), "padded, in order", 1.5e-5)
    assert waste > 1.5 and path > 2
    by_hand = balance(torch.tensor([10, 10, 4, 2]), 2, Budget(rows=2), "padded, in order", 0.0)
    assert by_hand == pytest.approx(((20 + 8) / 26, 20 * 2 / 26))


def test_every_micro_batch_is_about_as_large_as_the_next() -> None:
    """So the largest, which decides the memory, is not far above the mean."""
    lengths_B = search_batch(256).lengths_B
    parts = [rows for planned in plan_all(lengths_B, 8, Budget(rows=8), Layout(packed=True)) for rows in planned]
    tokens = [sum(int(lengths_B[row]) for row in rows) for rows in parts]
    assert len(tokens) == 32 and max(tokens) <= 1.05 * sum(tokens) / len(tokens)


def test_the_benchmark_shows_all_sides(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["packing.py", "--rows", "4", "--longest", "128", "--rounds", "1"])
    main()
    shown = capsys.readouterr().out
    for way in WAYS:
        assert shown.count(f"\n{way}  ") == 2


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[], tuple[int, list[str]]]:
    """The exit status and the lines of scripts/gpu/engine_check.py on the CPU."""
    monkeypatch.setattr(sys, "argv", ["engine_check.py", "--device", "cpu", "--shape", "tiny", "--tokens", "256"])

    def run() -> tuple[int, list[str]]:
        with pytest.raises(SystemExit) as ended:
            engine_check.main()
        return int(str(ended.value.code)), capsys.readouterr().out.splitlines()[1:]

    return run


def test_every_check_passes(shown: Callable[[], tuple[int, list[str]]]) -> None:
    status, lines = shown()
    assert status == 0, lines
    fused = "SKIP  fused layers"  # they need CUDA
    passed = [f"PASS  {name}" for name in ("head", "offload", "model FLOP utilisation")]
    expected = ["PASS  packed gradients", "PASS  bfloat16 log-probs", fused, *passed]
    assert [line.split(":")[0] for line in lines] == expected


def test_a_wrong_kernel_is_noticed(shown: Callable[[], tuple[int, list[str]]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that see each other; the checks after that one pass."""
    for check in ("short_log_probs", "fused_gradients", "head_formats", "offload", "utilisation"):
        monkeypatch.setattr(engine_check, check, lambda *_: engine_check.Result(True, ""))
    right = varlen._row_by_row
    monkeypatch.setattr(
        varlen,
        "_row_by_row",
        lambda q, k, v, lengths, lent, *rest: right(q, k, v, [sum(lengths)], [slice(0, 0)], *rest),
    )
    status, [first, *others] = shown()
    assert status == 1 and first.startswith("FAIL  packed gradients: float32")
    assert all(line.startswith("PASS") for line in others)
