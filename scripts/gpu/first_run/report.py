"""report.md: one file to attach to a question, written anew after every stage."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from first_run.result import Outcome, Result
from first_run.site import ERROR_LINES, ROOT, Site
from first_run.stages import STAGES, Stage
from url_text import mask_text

NAME = "report.md"
Found = Sequence[tuple[Stage, Result]]


def write_report(site: Site, found: Found, ended: str) -> Path:
    """`ended` says how far the run has come."""
    lines = ["# First run on a node", "", *_head(site, ended), "", *_summary(found)]
    for stage, result in found:
        if result.outcome is not Outcome.SKIP:
            lines += ["", *_section(site, stage, result)]
    path = site.folder / NAME
    path.write_text(mask_text("\n".join(lines)) + "\n", encoding="utf-8")
    return path


def _head(site: Site, ended: str) -> list[str]:
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return [
        f"- {ended}, {when}",
        f"- command: `bash scripts/gpu/first_run.sh {' '.join(sys.argv[1:])}`",
        f"- commit: {_commit()}",
        f"- device: {site.device}, {site.num_devices} of them; logs: logs/ beside this file",
    ]


def _summary(found: Found) -> list[str]:
    lines = ["| stage | | result | s | |", "|---|---|---|---|---|"]
    for stage, result in found:
        figures = result.figures.replace("|", "/").replace("\n", " ")
        lines.append(f"| {stage.number} | {stage.name} | {result.outcome} | {result.seconds:.0f} | {figures} |")
    done = len(found)
    return lines + [f"| {stage.number} | {stage.name} | | | not reached |" for stage in STAGES[done:]]


def _section(site: Site, stage: Stage, result: Result) -> list[str]:
    lines = [f"## {stage.number}. {stage.name}: {result.outcome}", "", result.figures]
    if result.details:
        lines += ["", result.details]
    if result.outcome is Outcome.FAIL:
        for log in sorted((site.folder / "logs").glob(f"{stage.number:02d}_*.log")):
            tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-ERROR_LINES:]
            lines += ["", f"Last lines of logs/{log.name}:", "", "````text", *tail, "````"]
    return lines


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
