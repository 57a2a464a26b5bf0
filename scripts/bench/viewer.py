"""How fast the viewer of trajectories answers on a run with many of them, and how much memory its server takes.

    .venv/bin/python scripts/bench/viewer.py --run runs/tinywiki_default_seed0/rl

Rows of the run are drawn with a fixed seed until there are enough; each gets a question, a reward and a group of its
own. Every request is a new query over the Parquet files; the first one of each kind is reported, and the median.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pyarrow as pa

from search_r1.viewer.runs import find_runs
from verl.tracking.trajectory_store import read_trajectory_table, trajectories_path, write_trajectory_table

GROUP = 8
REPEATS = 5


@dataclass(frozen=True)
class Request:
    """What is measured: a route with its query, and the seconds that it may take (None: no limit)."""

    what: str
    route: str
    query: dict[str, Any]
    limit_s: float | None = None


def main() -> int:
    """0 when every limit is kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="a run whose trajectories are drawn from")
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=100, help="files that they are spread over")
    parser.add_argument("--memory_mib", type=float, default=600.0, help="most memory of the server")
    parser.add_argument("--folder", type=Path, help="where to write (a temporary folder, removed at the end)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        made = Path(folder) / "many"
        num_bytes, num_tokens = multiply(args.run, made, args.trajectories, args.steps)
        print(f"{args.trajectories} trajectories of {num_tokens:.0f} tokens in {args.steps} files, ", end="")
        print(f"{num_bytes / 2**20:.0f} MiB; {os.cpu_count()} cores")
        with server(made) as (url, process):
            late = measure(url, args.steps)
            memory_mib = process.memory_info().rss / 2**20
    print(f"{'memory of the server':40} {memory_mib:8.0f} MiB")
    return int(late or memory_mib > args.memory_mib)


def multiply(run: Path, folder: Path, number: int, steps: int, seed: int = 0) -> tuple[int, float]:
    """Write `number` rows drawn from `run`; bytes of the files, and mean tokens of a row."""
    files = [file for found in find_runs([run]) for file in found.files if file.kind == "train"]
    table = pa.concat_tables([read_trajectory_table(file.path) for file in files], promote_options="default")
    rng, num_bytes, num_tokens = random.Random(seed), 0, 0
    for step in range(1, steps + 1):
        own = number // steps + (step <= number % steps)
        drawn = table.take([rng.randrange(len(table)) for _ in range(own)])
        path = trajectories_path(folder, "train", step)
        write_trajectory_table(path, varied(drawn, step, rng))
        num_bytes += path.stat().st_size
        num_tokens += sum(map(len, drawn["ids"].to_pylist()))
    (folder / "config.yaml").write_bytes((run / "config.yaml").read_bytes())
    return num_bytes, num_tokens / number


def varied(table: pa.Table, step: int, rng: random.Random) -> pa.Table:
    """Groups of `GROUP` rows with one question, equal in all steps; rewards 0 or 1; texts that end differently."""
    rows = range(len(table))
    columns = {
        "step": pa.array([step] * len(table), pa.int64()),
        "group_id": pa.array([f"train-{step}-{row // GROUP}" for row in rows]),
        "question": pa.array([f"{table['question'][row - row % GROUP]} ({row // GROUP})" for row in rows]),
        "reward": pa.array([float(rng.random() < 0.3) for _ in rows]),
        "response_text": pa.array([f"{table['response_text'][row]} {rng.getrandbits(64):x}" for row in rows]),
    }
    for name, values in columns.items():
        table = table.set_column(table.schema.get_field_index(name), name, values)
    return table


@contextmanager
def server(run: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Its address and its process."""
    command = [sys.executable, "-m", "search_r1.viewer", str(run), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = next((line for line in process.stderr if "serving" in line), "")
            found = re.search(r"http://\S+?:\d+", said)
            if found is None:
                raise SystemExit("the viewer did not start")
            yield found.group(), psutil.Process(process.pid)
        finally:
            process.terminate()


def requests_of(steps: int) -> list[Request]:
    """The longest of each kind: over all steps where the page can ask for that."""
    last, every = {"kind": "train", "step": steps}, {"kind": "train"}
    name, other = f"train_step_{steps}", "train_step_1"
    return [
        Request("the runs, asked every 2 s", "runs", {}, 0.3),
        Request("first page: the latest step", "rows", last, 1.0),
        Request("its filters", "facets", last, 1.0),
        Request("a page of all steps", "rows", {**every, "descending": True}, 1.0),
        Request("the filters of all steps", "facets", every, 2.0),
        Request("all: reward 0, two searches", "rows", {**every, "max_reward": 0, "min_searches": 2}, 2.0),
        Request("all: text of the response", "rows", {**every, "text": "a1b2"}, 2.0),
        Request("all: question", "rows", {**every, "question": "founder"}, 2.0),
        Request("all: longest first", "rows", {**every, "sort": "tokens", "descending": True}, 2.0),
        Request("all: by a component, last page", "rows", {**every, "sort": "component", "component": "exact_match",
                "offset": 50_000}, 2.0),
        Request("one trajectory", "trajectory", {"file": name, "row": 100}, 0.3),
        Request("one group", "group", {"file": name, "group": f"train-{steps}-3"}, 0.3),
        Request("two steps compared", "compare", {"file": other, "other_run": "many", "other_file": name}, 2.0),
    ]  # fmt: skip


def measure(url: str, steps: int) -> int:
    """Print a line a request; how many took too long the first time."""
    late = 0
    print(f"{'request':40} {'first s':>8} {'median s':>8} {'limit s':>8}")
    with httpx.Client(base_url=url, timeout=60) as client:
        for request in requests_of(steps):
            seconds = []
            for _ in range(REPEATS):
                begun = time.perf_counter()
                reply = client.get(f"/api/{request.route}", params={"run": "many", **request.query})
                json.loads(reply.raise_for_status().content)
                seconds.append(time.perf_counter() - begun)
            late += request.limit_s is not None and seconds[0] > request.limit_s
            median = statistics.median(seconds)
            print(f"{request.what:40} {seconds[0]:8.3f} {median:8.3f} {request.limit_s or 0:8.1f}", flush=True)
    return late


if __name__ == "__main__":
    sys.exit(main())
