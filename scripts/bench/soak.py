"""Does a long run hold ever more? Memory, file handles and Ray objects of every process, at the end of each step.

    .venv/bin/python scripts/bench/soak.py --run_dir RUN [--also PID] -- \\
      .venv/bin/python -m verl.trainer.main_ppo ... trainer.default_local_dir=RUN trainer.total_training_steps=300

Starts the command, watches it and all its descendants (and the processes `--also`, say a retrieval server), and
compares `--window` steps around step `--after` with the last `--window` steps. Memory grew when its median did by more
than `--limit`. What is counted (handles, objects, processes) comes and goes, and grew when there is more of it at every
one of the last steps than at any of the early ones. Writes every reading to soak.csv, a figure to soak.png, and prints
a table. Ends with 1 when something grew, with 2 when the command failed or was too short to tell. Linux only.
"""

from __future__ import annotations

import argparse
import csv
import json
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from growth import Series, Windows, growth_of, report
from process_watch import RUN, ProcessWatch, Reading

LENGTH = "response_length/mean"
POLL_S = 0.05


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run_dir", type=Path, required=True, help="where the command writes metrics.jsonl")
    parser.add_argument("--also", type=int, nargs="+", default=[], help="processes that the command does not start")
    parser.add_argument("--after", type=int, default=50, help="the step by which the run is warm")
    parser.add_argument("--window", type=int, default=20, help="steps that are taken together")
    parser.add_argument("--limit", type=float, default=0.05, help="growth that is allowed; 0.05 is 5%%")
    parser.add_argument("command", nargs="+", help="after --")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the command is ended too
    metrics = args.run_dir / "metrics.jsonl"
    if metrics.exists():
        parser.error(f"{metrics} is of an earlier run: choose another --run_dir")
    try:
        series, status = watch(args.command, args.run_dir, args.also)
    except KeyboardInterrupt:
        print(f"interrupted: what was read is in {args.run_dir / 'soak.csv'}", file=sys.stderr)
        return 130
    if status:
        print(f"the command ended with {status}", file=sys.stderr)
        return 2
    try:
        windows = Windows.of(args.after, args.window, last_step(series))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    growths = growth_of(series, windows)
    print(report(growths, windows, args.limit))
    draw(series, args.run_dir / "soak.png")
    return int(any(growth.grew(args.limit) for growth in growths))


def watch(command: Sequence[str], run_dir: Path, others: Sequence[int]) -> tuple[Series, int]:
    """Run the command; its series, which also go to soak.csv, and its exit status.

    The command is ended when this process is interrupted.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    series: Series = defaultdict(dict)
    with (run_dir / "soak.csv").open("w", newline="", buffering=1) as file, subprocess.Popen(command) as running:
        rows = csv.writer(file)
        rows.writerow(("step", "process", "quantity", "value"))
        try:
            watched = ProcessWatch(running.pid, others)
            for step, metrics in steps(run_dir / "metrics.jsonl", running):
                for process, quantity, value in (*watched.read(), *_work(metrics)):
                    series[process, quantity][step] = value
                    rows.writerow((step, process, quantity, round(value, 3)))
        except BaseException:
            running.terminate()
            raise
    return series, running.returncode


def steps(path: Path, running: subprocess.Popen[bytes]) -> Iterator[tuple[int, Mapping[str, float]]]:
    """Each step with its metrics as soon as they are written; of several that are, the latest."""
    size = 0
    while running.poll() is None:
        time.sleep(POLL_S)
        lines = path.read_bytes()[size:].splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith(b"\n")]
        if whole:
            size += sum(map(len, whole))
            metrics = json.loads(whole[-1])
            yield int(metrics["step"]), metrics


def _work(metrics: Mapping[str, float]) -> Iterator[Reading]:
    """How much there was to do: longer responses need more memory without any leak."""
    if LENGTH in metrics:
        yield RUN, "tokens a response", metrics[LENGTH]


def last_step(series: Series) -> int:
    return max((max(values) for values in series.values()), default=0)


def draw(series: Series, path: Path) -> None:
    """Resident memory of each process, and counts, by step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (memory, counts) = pyplot.subplots(2, 1, figsize=(9, 9), sharex=True)
    for axes in (memory, counts):
        axes.set_prop_cycle(color=pyplot.colormaps["tab20"].colors)
    for (process, quantity), values in series.items():
        if quantity == "rss MiB":
            memory.plot(list(values), list(values.values()), label=process)
        elif quantity in ("handles", "objects"):
            counts.plot(list(values), list(values.values()), label=f"{process}: {quantity}")
    memory.set(ylabel="resident memory, MiB", yscale="log")
    counts.set(ylabel="count", xlabel="step")
    for axes in (memory, counts):
        axes.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
