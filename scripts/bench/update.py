"""One update of a policy beside a padded Hugging Face loop and TRL's loss: tokens a second and memory, on CPU.

    .venv/bin/python scripts/bench/update.py [--rows 24] [--rounds 3] [--threads 1] [--trl PYTHON]

Rows have the lengths of search trajectories: 900 tokens on average, the longest 4,000; 40% are retrieved and, like the
prompt of 150, not trained on. An update is forward and backward of all rows, clipping, and an AdamW step, with a ratio
to the policy itself; tokens are those of the rows, without padding. Every side has a process of its own and they work
in turn; medians over the rounds, after one for warming up. Speed is by the processor's seconds, which other jobs on the
machine change less than the clock's; `from` and `to` are the least and the most of them. Memory is the most that a
process had in any round less what it had with the model loaded: gradients and optimizer state are in it.

ours        the engine: packed micro-batches of at most 4,096 tokens, the output layer at trained tokens only
HF, 1 row   a loop over a Hugging Face model: row by row, no padding, whole logits
HF, 4 rows  the same with four rows at a time, padded to the longest of them
TRL, N rows GRPOTrainer's loss, with N rows at a time; it pads to the longest row of the step

`--trl` is a Python that has TRL beside this project's packages; without it there are no rows for TRL.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SIDES = Path(__file__).with_name("update_sides.py")
MIB = 2**20


class Side:
    """A process that makes one update when it is told to."""

    def __init__(self, name: str, python: str, folder: Path, args: argparse.Namespace) -> None:
        self.name = name
        command = [python, str(SIDES), name, str(folder), str(args.rows), str(args.threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.memory: list[float] = []

    def update(self) -> None:
        """Raises RuntimeError when the process has ended."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("update\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("{"):
                found = json.loads(line)
                self.seconds.append(found["seconds"])
                self.cpu_seconds.append(found["cpu_seconds"])
                self.memory.append(found["bytes"] / MIB)
                return
        raise RuntimeError(f"{self.name} ended with status {self.process.wait()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=24, help="a multiple of 4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--trl", metavar="PYTHON", help="a Python that has TRL beside this project's packages")
    args = parser.parse_args()
    if args.rows % 4:
        parser.error("--rows must be a multiple of 4: rows are taken four at a time")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, SIDES, "write", folder], check=True)
        names = ["ours", "HF, 1 row", "HF, 4 rows"] + ["TRL, 1 row", "TRL, 4 rows"] * (args.trl is not None)
        sides = [Side(name, args.trl if "TRL" in name else sys.executable, Path(folder), args) for name in names]
        try:
            for _ in range(args.rounds + 1):
                for side in sides:
                    side.update()
        finally:
            for side in sides:
                side.process.kill()
                side.process.wait()
        show(sides, args)


def show(sides: list[Side], args: argparse.Namespace) -> None:
    counted = subprocess.run([sys.executable, SIDES, "tokens", "-", str(args.rows)], capture_output=True, check=True)
    tokens = int(counted.stdout)
    print(f"update of {args.rows} rows, {tokens} tokens; {args.threads} threads a side, {args.rounds} rounds")
    print(f"{'':14}{'s':>8}{'CPU s':>8}{'from':>8}{'to':>8}{'tokens/CPU s':>14}{'ours is':>9}{'MiB':>8}{'ours is':>9}")
    own_s, own_mib = statistics.median(sides[0].cpu_seconds[1:]), max(sides[0].memory)
    for side in sides:
        cpu, mib = side.cpu_seconds[1:], max(side.memory)
        middle = statistics.median(cpu)
        print(
            f"{side.name:14}{statistics.median(side.seconds[1:]):8.2f}{middle:8.2f}{min(cpu):8.2f}{max(cpu):8.2f}"
            f"{tokens / middle:14.0f}{middle / own_s:8.2f}x{mib:8.0f}{own_mib / mib:8.2f}x"
        )


if __name__ == "__main__":
    main()
