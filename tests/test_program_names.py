"""The usage line of every program begins with the words that start it."""

from __future__ import annotations

import runpy
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAIN = 'if __name__ == "__main__"'
WITHOUT_OPTIONS = {
    "verl.config.docs": "writes its page",
    "verl.run.process_cleanup": "is started by training",
}


def modules() -> list[str]:
    files = [path for room in ("verl", "search_r1") for path in sorted((ROOT / room).rglob("*.py"))]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files if MAIN in path.read_text()]
    return [name.removesuffix(".__main__") for name in names if name not in WITHOUT_OPTIONS]


@pytest.mark.parametrize("module", modules())
def test_usage_of_a_module(module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["-m", "--help"])
    with pytest.raises(SystemExit) as ended, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that the module was imported before, by another test
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert not ended.value.code
    assert capsys.readouterr().out.split()[:4] == ["usage:", "python", "-m", module]
