"""The command line of the first run; `scripts/gpu/first_run.sh` starts it."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path

from first_run.report import NAME, write_report
from first_run.result import Outcome, Result
from first_run.site import Site
from first_run.stages import SIZES, STAGES, Stage, run_stages

INTERRUPTED = 130  # as shells have it
PROCESSES = 2  # that stand for GPUs on a CPU


def main() -> int:
    """0: nothing failed; 1: something did; 2: the command line is wrong; 130: interrupted."""
    args = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, _interrupt)
    folder = new_folder(args.output_dir)
    print(f"report: {folder / NAME}", flush=True)
    with tempfile.TemporaryDirectory(prefix="first_run_", dir=args.scratch or folder) as scratch:
        site = Site(folder, args.device, count_devices(args.device), args.max_size, Path(scratch).resolve())
        site.num_nodes, site.min_gbs = args.nodes, args.min_gbs if args.device == "cuda" else 0.0
        return run(site, args.stages)


def run(site: Site, numbers: list[int]) -> int:
    found: list[tuple[Stage, Result]] = []
    try:
        for entry in run_stages(site, numbers):
            found.append(entry)
            write_report(site, found, "under way")
    except KeyboardInterrupt:
        print("interrupted; what runs has been ended", flush=True)
        write_report(site, found, f"interrupted in stage {int(site.stage or 1)}")
        return INTERRUPTED
    write_report(site, found, "complete")
    failed = [str(stage.number) for stage, result in found if result.outcome is Outcome.FAIL]
    print(f"{'FAIL: stage ' + ', '.join(failed) if failed else 'no stage failed'}; {site.folder / NAME}", flush=True)
    return 1 if failed else 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bash scripts/gpu/first_run.sh", description=__doc__)
    parser.add_argument("--max_size", choices=SIZES, default="7b", help="largest model (%(default)s)")
    parser.add_argument("--stages", type=numbers_of, default=numbers_of("1-11"), help="as in 1-4 or 1,5-7")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu tries the stages without a GPU")
    parser.add_argument("--nodes", type=int, default=1, help="of the Ray cluster at RAY_ADDRESS, for stage 11")
    parser.add_argument(
        "--min_gbs", type=float, default=10.0, help="bus bandwidth in GB/s that stage 11 asks of GPUs (%(default)s)"
    )
    parser.add_argument("--output_dir", type=Path, help="a new folder for the report (runs/first_run/DATE)")
    parser.add_argument("--scratch", type=Path, help="folder with room for models, emptied at the end (the output_dir)")
    return parser.parse_args(argv)


def numbers_of(text: str) -> list[int]:
    """`1,5-7` as numbers of stages. Raises what argparse turns into a message."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    if not numbers or not set(numbers) <= {stage.number for stage in STAGES}:
        raise argparse.ArgumentTypeError(f"{text}: stages have the numbers 1 to {len(STAGES)}")
    return numbers


def new_folder(asked: Path | None) -> Path:
    """Never one that is there."""
    folder = asked or Path("runs/first_run") / time.strftime("%Y-%m-%d_%H-%M-%S")
    number = 1
    while True:
        path = folder if number == 1 else folder.with_name(f"{folder.name}_{number}")
        try:
            (path / "logs").mkdir(parents=True)
            return path.resolve()
        except FileExistsError:
            number += 1
        if asked is not None:
            sys.exit(f"error: {asked} is there already; name a new folder")


def count_devices(device: str) -> int:
    """Without a context on any of them, which would take memory."""
    if device == "cpu":
        return PROCESSES
    import torch

    return torch.cuda.device_count()


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
