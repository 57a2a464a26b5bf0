"""Running the scripts of scripts/ as their users do, in this process."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[3]
REAL_QUESTIONS = ROOT.parent / "shared" / "data" / "qa"


def run_script(name: str, *arguments: object) -> int:
    """Its exit status."""
    path = str(ROOT / "scripts" / name)
    with patch.object(sys, "argv", [path, *map(str, arguments)]):
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            return int(end.code or 0)
    return 0


def write_lines(path: Path, rows: list[object]) -> Path:
    """One JSON value a line; a string is written as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def questions(count: int, name: str = "q") -> list[dict]:
    return [
        {"id": f"{name}_{i}", "question": f"{name} {i}", "golden_answers": [f"answer {i}", "other"]}
        for i in range(count)
    ]
