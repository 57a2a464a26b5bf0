"""What trainer.deterministic costs: the same run with and without it, in turn.

    .venv/bin/python scripts/bench/deterministic_mode.py --rounds 3 --output_dir runs/deterministic -- \
      --config-name tinywiki data.train_files=... (all arguments of verl.trainer.main_ppo)

Prints medians over all steps but the first of each run, and their ratio. Ends with status 1 unless all runs in the mode
have the same metrics in every step, to the last bit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

PHASES = ("step", "gen", "update_actor", "weight_sync")
SIDES = {"baseline": "trainer.deterministic=false", "deterministic": "trainer.deterministic=true"}
Rows = list[dict[str, float]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("arguments", nargs="+", help="after --: those of verl.trainer.main_ppo")
    args = parser.parse_args()
    runs: dict[str, list[Rows]] = {side: [] for side in SIDES}
    for number in range(args.rounds):
        for side, setting in SIDES.items():
            folder = args.output_dir.resolve() / f"{side}_{number}"
            own = (setting, f"trainer.default_local_dir={folder}", "trainer.logger=[]", "trainer.overwrite=archive")
            subprocess.run([sys.executable, "-m", "verl.trainer.main_ppo", *args.arguments, *own], check=True)
            runs[side].append([json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()])
    print(f"medians of {args.rounds} runs each, in seconds")
    for phase in PHASES:
        baseline, mode = (median(runs[side], f"timing_s/{phase}") for side in SIDES)
        print(f"{phase:14} baseline {baseline:.2f}  deterministic {mode:.2f}  ratio {mode / baseline:.2f}")
    for side in SIDES:
        same = all(without_times(rows) == without_times(runs[side][0]) for rows in runs[side])
        print(f"{side}: the metrics of all {args.rounds} runs are {'equal to the last bit' if same else 'NOT equal'}")
    return 0 if same else 1


def median(runs: list[Rows], name: str) -> float:
    return statistics.median(row[name] for rows in runs for row in rows if row["step"] > 1 and name in row)


def without_times(rows: Rows) -> Rows:
    return [{k: v for k, v in row.items() if k != "time" and not k.startswith(("timing", "memory"))} for row in rows]


if __name__ == "__main__":
    sys.exit(main())
