"""scripts/gpu/engine_check.py on the CPU: every check runs, and the first one notices rows that see each other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from verl.engine import varlen

sys.path.append(str(Path(__file__).resolve().parents[3] / "scripts" / "gpu"))
import engine_check  # noqa: E402

CHECKS = ("packed gradients", "bfloat16 log-probs", "head", "offload", "model FLOP utilisation")


def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    options = ["--device", "cpu", "--shape", "tiny", "--tokens", "256"]
    monkeypatch.setattr(sys, "argv", ["engine_check.py", *options])
    with pytest.raises(SystemExit) as ended:
        engine_check.main()
    return int(str(ended.value.code)), capsys.readouterr().out


def test_every_check_passes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = shown(monkeypatch, capsys)
    assert status == 0, text
    assert [line.split(":")[0] for line in text.splitlines()[1:]] == [f"PASS  {name}" for name in CHECKS]


def test_a_wrong_kernel_is_noticed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = varlen._row_by_row
    monkeypatch.setattr(
        varlen,
        "_row_by_row",
        lambda q, k, v, lengths, lent, *rest: right(q, k, v, [sum(lengths)], [slice(0, 0)], *rest),
    )
    status, text = shown(monkeypatch, capsys)
    assert status == 1
    assert "FAIL  packed gradients: float32" in text
