"""Where the stages run: the devices, the folder of the report, and programs with a log and a limit of time."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from processes import program

from first_run.result import Result, judged
from url_text import mask_text

ROOT = Path(__file__).resolve().parents[3]
BEAT_S = 20.0
ERROR_LINES = 40
ERROR = re.compile(r"\b\w*Error\b|\berror: ")
MOST_SHOWN = 400  # characters
MAKING_S = 1800.0
WARM_STEPS = 60


class StageError(Exception):
    """Why a stage ends early; becomes its FAIL."""


@dataclass
class Site:
    """`device` is "cuda" or "cpu" with `num_devices` of them (processes on CPU). `scratch` is removed at the end.

    `num_nodes` of the Ray cluster, with as many devices each, are to reach a bus bandwidth of `min_gbs` GB/s.
    """

    folder: Path
    device: str
    num_devices: int
    max_size: str
    scratch: Path
    stage: str = ""
    num_nodes: int = 1
    min_gbs: float = 0.0
    _made: dict[str, Path] = field(default_factory=dict, init=False)

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{self.stage}_{name}.log"

    def world(self) -> Path:
        """Data of a small TinyWiki, with its tokenizer and a policy of random weights in `policy_init`; made once."""
        folder = self.scratch / "tinywiki"
        sizes = {"--num_train": 600, "--num_test": 40, "--num_sft_rows": 3000}
        options = [word for name, value in sizes.items() for word in (name, str(value))]
        module = ["search_r1.data.tinywiki", "--output_dir", str(folder), *options]
        return self._once("tinywiki_data", module, folder)

    def policy(self) -> Path:
        """The same policy after a warm start: enough to search, far from enough to be right; made once."""
        world, folder = self.world(), self.scratch / "warm_start"
        settings = [
            f"data.train_files={world}/sft.parquet",
            f"model.path={world}/policy_init",
            f"trainer.default_local_dir={folder}",
            f"trainer.total_training_steps={WARM_STEPS}",
            f"trainer.device={self.device}",
        ]
        module = ["verl.trainer.sft", "--config-name", "tinywiki_sft", *settings]
        return self._once("warm_start", module, folder / f"global_step_{WARM_STEPS}")

    def _once(self, name: str, module: Sequence[str], made: Path) -> Path:
        if name not in self._made:
            self.run(name, [sys.executable, "-m", *module], MAKING_S)
            self._made[name] = made
        return self._made[name]

    def child(self, module: str, *arguments: str, limit_s: float, variables: Mapping[str, str] | None = None) -> Result:
        """The result of a module of this package in a process of its own."""
        written = self.scratch / f"{self.stage}_{module}.json"
        command = [sys.executable, "-m", f"first_run.{module}", "--device", self.device, "--result", str(written)]
        self.run(module, [*command, *arguments], limit_s, variables)
        return Result.read(written)

    def run(
        self,
        name: str,
        command: Sequence[str],
        limit_s: float,
        variables: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        accepted: Sequence[int] = (0,),
    ) -> str:
        """Its output, which is also the log `name`. Raises StageError when it fails or takes longer than `limit_s`."""
        log = self.log(name)
        with program(command, log, dict(variables or {}), cwd) as process:
            self._wait(process, name, log, limit_s)
        if process.returncode not in accepted:
            raise StageError(f"{name} ended with status {process.returncode}: {last_error(log)} (logs/{log.name})")
        return log.read_text(encoding="utf-8", errors="replace")

    def _wait(self, process: subprocess.Popen[bytes], name: str, log: Path, limit_s: float) -> None:
        started = time.monotonic()
        while (spent := time.monotonic() - started) < limit_s:
            try:
                process.wait(min(BEAT_S, limit_s - spent))
                return
            except subprocess.TimeoutExpired:
                seconds = f"{time.monotonic() - started:.0f} s"
                print(f"        {name}: {seconds} so far; {last_line(log)[:120]}", flush=True)
        raise StageError(f"{name} was ended after {limit_s:.0f} s; last line: {last_line(log)} (logs/{log.name})")


def checked(text: str, result_of: Sequence[str]) -> Result:
    """Of a program that prints a line with PASS or FAIL for each check."""
    lines = [line for line in text.splitlines() if line.startswith(("PASS", "FAIL"))]
    failed = [line.split(":")[0].removeprefix("FAIL").strip() for line in lines if line.startswith("FAIL")]
    figures = f"{len(lines) - len(failed)} of {len(result_of)} checks"
    figures += f"; not {', '.join(failed)}" if failed else ""
    return judged(not failed and len(lines) == len(result_of), figures, "```text\n" + "\n".join(lines) + "\n```")


def last_line(log: Path) -> str:
    lines = _lines(log)
    return lines[-1] if lines else "no output yet"


def last_error(log: Path) -> str:
    """The last line of the log that looks like an error, else its last line."""
    lines = _lines(log)
    found = next((line for line in reversed(lines) if ERROR.search(line)), lines[-1] if lines else "no output")
    return found[:MOST_SHOWN]


def _lines(log: Path) -> list[str]:
    text = mask_text(log.read_text(encoding="utf-8", errors="replace")) if log.exists() else ""
    return [line.strip() for line in text.splitlines() if line.strip()]
