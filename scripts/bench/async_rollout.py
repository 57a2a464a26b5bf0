"""What sampling ahead of training gains when the retriever is slow: the same run in each mode, in turn.

    .venv/bin/python scripts/bench/async_rollout.py --delay_ms 10 200 1000 --output_dir runs/async -- \
      --config-name tinywiki retriever.url=http://127.0.0.1:8000/retrieve data.train_files=...

Behind -- stand all arguments of verl.trainer.main_ppo. A proxy between the run and its retriever holds every answer
back for each `--delay_ms`, in turn, and an exponentially distributed time beyond it.

Prints medians over all steps but the first two and the last of each run: of a step, of the loop's wait for its batch,
of the share of time in which engines have no request, in all and while they have trajectories, and of the age of the
weights.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

URL = "retriever.url="
OVER_SAMPLE = "actor_rollout_ref.rollout.over_sample"
MODES = {
    "off": ("trainer.async_rollout=off",),
    "one_step_off": ("trainer.async_rollout=one_step_off",),
    "bounded_2": ("trainer.async_rollout=bounded", "trainer.max_staleness=2"),
    "over_sample": ("trainer.async_rollout=off",),
    "over_sample_one_step_off": ("trainer.async_rollout=one_step_off",),
}
COLUMNS = (
    "timing_s/step",
    "timing_s/gen",
    "timing_s/update_actor",
    "perf/engine_idle_share",
    "perf/rollout_idle_share",
    "rollout/staleness/mean",
)
Rows = list[dict[str, float]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay_ms", type=float, nargs="+", default=[200.0])
    parser.add_argument("--tail", type=float, default=0.5, help="mean of the time beyond it, as a share of it")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--over_sample", type=float, default=0.5, help="in the modes of that name")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("arguments", nargs="+", help="after --: those of verl.trainer.main_ppo, with retriever.url")
    args = parser.parse_args()
    urls = [argument.removeprefix(URL) for argument in args.arguments if argument.startswith(URL)]
    if len(urls) != 1:
        parser.error(f"give {URL}http://..., once, behind --")
    arguments = [argument for argument in args.arguments if not argument.startswith(URL)]
    for delay_ms in args.delay_ms:
        runs: dict[str, list[Rows]] = {mode: [] for mode in args.modes}
        with slow_retriever(urls[0], delay_ms / 1000, args.tail) as url:
            for number in range(args.rounds):
                for mode in args.modes:
                    folder = args.output_dir.resolve() / f"{mode}_{delay_ms:g}_{number}"
                    share = args.over_sample if mode.startswith("over_sample") else 0.0
                    own = [*MODES[mode], f"{OVER_SAMPLE}={share}", URL + url]
                    runs[mode].append(run(folder, [*arguments, *own]))
        print(
            f"\nmedians of {args.rounds} runs each, {delay_ms:g} ms + Exp({args.tail * delay_ms:g} ms) before an answer"
        )
        print(f"{'':25}" + "".join(f"{name.partition('/')[2]:>19}" for name in COLUMNS))
        for mode, found in runs.items():
            print(f"{mode:25}" + "".join(f"{median(found, name):>19.3f}" for name in COLUMNS), flush=True)
    return 0


def run(folder: Path, arguments: Sequence[str]) -> Rows:
    own = (f"trainer.default_local_dir={folder}", "trainer.logger=[]", "trainer.overwrite=archive")
    subprocess.run([sys.executable, "-m", "verl.trainer.main_ppo", *arguments, *own], check=True)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def median(runs: list[Rows], name: str) -> float:
    """NaN where no step has it."""
    values = [row[name] for rows in runs for row in rows[:-1] if row["step"] > 2 and name in row]
    return statistics.median(values) if values else float("nan")


@contextmanager
def slow_retriever(url: str, delay_s: float, tail: float) -> Iterator[str]:
    """The address of a proxy that asks `url` and answers `delay_s` later, and a tail of that share of it."""
    draws = random.Random(0)

    class Proxy(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            headers = {"Content-Type": self.headers.get("Content-Type", "application/json")}
            with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as answer:
                content = answer.read()
            time.sleep(delay_s + draws.expovariate(1.0) * tail * delay_s)
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            pass

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    proxy.daemon_threads = True
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{proxy.server_port}/retrieve"
    finally:
        proxy.shutdown()


if __name__ == "__main__":
    sys.exit(main())
