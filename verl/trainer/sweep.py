"""Runs of several configurations, one after the other: `-m key=a,b ...` on the command line of a program that trains.

Each run is a process of its own, with a folder of its own in the run folder that was given. The same command resumes a
sweep that was interrupted: runs that finished are left as they are, one that was stopped resumes from its last saved
state. At the end there is a table, with the mean over seeds and its 95% confidence interval.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from types import FrameType
from typing import Any

from verl.config.loading.command_line import Combination, combinations, parse_arguments
from verl.config.loading.compose import in_quotes, parsed, to_yaml
from verl.config.loading.foreign import of_hydra
from verl.config.sections.schema import SftConfig
from verl.errors import ConfigError, DataError, SweepIncomplete
from verl.process.ranks import end_with_parent
from verl.process.startup import tell
from verl.process.storage import append, whole_file, writing
from verl.run.resuming import settings_in
from verl.run.run_folder import check_not_in_use, holds_run
from verl.tracking.run_data import load_run

FINISHED, TABLE = "sweep.jsonl", "sweep.md"
SEED = "trainer.seed"
COLUMNS = {
    "reward": "critic/score/mean",
    "validation": "val/test_score/mean",
    "test": "test/test_score/mean",
    "warm start loss": "sft/loss",
}
LENGTH = frozenset({"trainer.total_training_steps", "trainer.total_epochs"})  # a sweep may be continued for longer
# Student's t: 97.5% quantiles for 1, 2, ... degrees of freedom.
T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
log = logging.getLogger(__name__)

Load = Callable[[str, list[str], str | None], Any]


@dataclass(frozen=True)
class SweptRun:
    """A run of the sweep. `digest` is that of its settings."""

    name: str
    values: dict[str, str]
    folder: Path
    arguments: tuple[str, ...]
    digest: str


def sweep(module: str, schema: type, argv: Sequence[str], default_name: str, load: Load) -> Path:
    """Run `python -m module` for every combination of values; returns the file with the table, which is printed, too.

    `load(config_name, overrides, config_dir)` composes and checks one configuration, a `schema`: that of every run is
    checked before the first one starts. Raises ConfigError, and SweepIncomplete at the end if a run has not finished:
    it does not keep later ones from running. An interrupt is passed on to the run in hand, and ends the sweep.
    """
    # All configurations are checked before anything runs. A run is known by its settings, whatever its name is.
    arguments = parse_arguments(argv, default_name)
    found = combinations(schema, of_hydra(arguments.overrides))
    runs = _with_folders(found, arguments.config_name, arguments.config_dir, load)
    home = _home(runs)
    done = _finished(home / FINISHED)

    # One run after the other, each in a process of its own. A run that succeeded is noted at once, for a second try.
    statuses: dict[str, int] = {}
    for number, run in enumerate(runs, start=1):
        where = f"run {number} of {len(runs)}, {run.name}"
        if run.digest in done and holds_run(run.folder):
            tell(f"{where}: finished before")
            statuses[run.name] = 0
            continue
        tell(f"{where}: in {run.folder}")
        started = time.monotonic()
        statuses[run.name] = status = _run([sys.executable, "-m", module, *run.arguments])
        tell(f"{where}: ended with status {status} after {(time.monotonic() - started) / 60:.1f} min")
        if status == 0:
            append(home / FINISHED, json.dumps({"run": run.name, "settings": run.digest}).encode() + b"\n")

    # The table shows failed runs too; only then is the sweep said to be incomplete.
    text = table(runs, statuses)
    print(text)
    with whole_file(home / TABLE) as path:
        path.write_text(f"# Sweep\n\n{text}\n", encoding="utf-8")
    failed = [f"{name} (status {status})" for name, status in statuses.items() if status]
    if failed:
        raise SweepIncomplete(
            f"{len(failed)} of {len(runs)} runs failed: {', '.join(failed)}. The same command tries them again"
        )
    return home / TABLE


def _with_folders(found: Sequence[Combination], name: str, config_dir: str | None, load: Load) -> list[SweptRun]:
    """The runs, each with its own folder, its name, and what it needs to be resumed."""
    configs = [load(name, list(one.overrides), config_dir) for one in found]
    folders = [Path(config.trainer.default_local_dir) for config in configs]
    if len(set(folders)) < len(found):  # else the folder follows from a swept value, as in runs/${trainer.seed}
        folders = [folder / one.name for folder, one in zip(folders, found, strict=True)]
    runs = []
    for one, config, folder in zip(found, configs, folders, strict=True):
        own = [f"trainer.default_local_dir={in_quotes(str(folder))}"]
        given = {parsed(type(config), text).key_or_group for text in one.overrides}
        own += [] if given & {"trainer.resume_mode", "trainer.overwrite"} else ["trainer.resume_mode=auto"]
        # A warm start has no name beside its folder's.
        if not isinstance(config, SftConfig) and len({other.trainer.experiment_name for other in configs}) == 1:
            own.append(f"trainer.experiment_name={in_quotes(f'{config.trainer.experiment_name}-{one.name}')}")
        overrides = [*one.overrides, *own]
        config = load(name, overrides, config_dir)
        check_not_in_use(folder)
        _check_same_settings(folder, config)
        where = ["--config-name", name, *(["--config-dir", config_dir] if config_dir else [])]
        digest = hashlib.sha256(to_yaml(config).encode()).hexdigest()
        runs.append(SweptRun(one.name, one.values, folder, (*where, *overrides), digest))
    return runs


def _home(runs: Sequence[SweptRun]) -> Path:
    """The folder that the runs' folders are in, where the sweep's own files are; it can be written. Raises ConfigError
    and StorageError.
    """
    home = Path(os.path.commonpath([run.folder.absolute().parent for run in runs]))
    if home == Path(home.anchor):
        raise ConfigError(
            f"{runs[0].folder} and the folders of the other runs have only {home} in common, where the table of the "
            f"sweep would be written: give the runs folders that are in one folder, or run two sweeps"
        )
    with writing(home):
        home.mkdir(parents=True, exist_ok=True)
    append(home / FINISHED, b"")  # not after the hours of the first run
    return home


def _check_same_settings(folder: Path, config: Any) -> None:
    """Raise ConfigError if the folder holds a run whose other settings would go unnoticed in the table."""
    if not holds_run(folder) or config.trainer.overwrite == "archive":
        return
    changes = settings_in(folder, config)
    other = [str(change) for change in changes if not change.harmless and change.key not in LENGTH]
    if other:
        raise ConfigError(
            f"{folder} holds a run with other settings: {'; '.join(other)}. Give the sweep another folder with "
            "trainer.default_local_dir=FOLDER"
        )


def _finished(path: Path) -> set[str]:
    """The digests of the settings of runs that finished; a last line that was cut off does not count."""
    if not path.is_file():
        return set()
    found = set()
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            found.add(json.loads(line)["settings"])
    return found


def _run(command: Sequence[str]) -> int:
    """The exit status of a program, in a session of its own: a Ctrl-C reaches it once, passed on from here."""
    process = subprocess.Popen(command, start_new_session=True, preexec_fn=end_with_parent)
    with _signals_passed_on(process) as came:
        status = process.wait()
    if came:
        raise KeyboardInterrupt
    return status if status >= 0 else 128 - status  # ended by a signal


@contextmanager
def _signals_passed_on(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Yields the signals that came within the block."""
    came: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        came.append(number)
        process.send_signal(number)

    # A signal that is ignored stays ignored, as SIGINT is in the background of a shell.
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    heeded = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in heeded:
        signal.signal(number, pass_on)
    try:
        yield came
    finally:
        for number, handler in heeded.items():
            signal.signal(number, handler)


def table(runs: Sequence[SweptRun], statuses: dict[str, int]) -> str:
    """Markdown: the last measured values of each run, then the mean of runs that differ in their seed alone."""
    # A metric that no run has gets no column.
    found = {run.name: _last_values(run.folder) for run in runs}
    columns = [column for column in COLUMNS if any(column in values for _, values in found.values())]
    rows = [["run", "step", *columns, "status"]]
    seeds: dict[str, list[dict[str, float]]] = {}  # by the other settings: the values of runs that finished
    for run in runs:
        step, values = found[run.name]
        status = "finished" if statuses[run.name] == 0 else f"failed ({statuses[run.name]})"
        rows.append([run.name, step, *(mean_and_interval(_present([values], column)) for column in columns), status])
        if SEED in run.values and statuses[run.name] == 0:
            rest = "".join(f", {key}={value}" for key, value in run.values.items() if key != SEED)
            seeds.setdefault(rest, []).append(values)
    # Runs that differ in their seed alone get a common row.
    for rest, members in seeds.items():
        if len(members) > 1:
            means = (mean_and_interval(_present(members, column)) for column in columns)
            rows.append([f"mean of {len(members)} seeds{rest}", "", *means, ""])
    # All cells of a column have the same width: the table is also printed as text.
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows)


def mean_and_interval(values: Sequence[float]) -> str:
    """The mean of values, one for each seed, with its 95% confidence interval by Student's t if there are several."""
    if not values:
        return ""
    mean = fmean(values)
    if len(values) == 1:
        return f"{mean:.4g}"
    quantile = T_975[min(len(values) - 1, len(T_975)) - 1]
    half = quantile * stdev(values) / math.sqrt(len(values))
    return f"{mean:.4g} [{mean - half:.4g}, {mean + half:.4g}]"


def _last_values(folder: Path) -> tuple[str, dict[str, float]]:
    """The last step of a run, and the last value that each column has."""
    try:
        run = load_run(folder)
    except DataError:  # it failed before its first step
        return "", {}
    curves = {column: run.curve(metric) for column, metric in COLUMNS.items()}
    return str(max(run.metrics)), {column: curve[max(curve)] for column, curve in curves.items() if curve}


def _present(rows: Sequence[dict[str, float]], column: str) -> list[float]:
    return [values[column] for values in rows if column in values]
