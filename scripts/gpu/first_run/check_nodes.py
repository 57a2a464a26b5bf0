"""All-reduce over the GPUs of several nodes of the Ray cluster at RAY_ADDRESS, whose ranks start and meet as those of a
run do: right sums, the bandwidth, and the transport between the nodes.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import uuid
from pathlib import Path

from first_run.check_all_reduce import SIZES, measured
from first_run.child import run_child
from first_run.result import Result, judged
from verl.config import load_config
from verl.single_controller.cluster import connect, disconnect
from verl.single_controller.nodes import check_nodes
from verl.single_controller.worker_group import ResourcePool, WorkerGroup
from verl.workers.base import RankWorker

LIMIT_S = 300.0
USED = re.compile(r"via (NET/[A-Za-z]+)(?:/\d+)?((?:/GDRDMA)?)")  # a channel of NCCL between two nodes
CHOSEN = re.compile(r"NCCL INFO (NET/[A-Za-z]+)\b.*\bUsing\b")


class BandwidthRank(RankWorker):
    """One rank of the check, on any of the nodes."""

    role = "actor"

    def bandwidth(self, mib: int) -> tuple[float, bool]:
        """See `check_all_reduce.measured`."""
        return measured(mib, self.device)

    def transports(self, log: str) -> set[str]:
        """What NCCL has written to this process's log on this node, which is removed."""
        path = Path(f"{log}.{os.getpid()}")
        if not path.exists():
            return set()
        text = path.read_text(errors="replace")
        path.unlink()
        return transports_in(text)


def transports_in(text: str) -> set[str]:
    """The transports between nodes in NCCL's INFO lines, such as NET/IB or NET/IB/GDRDMA: those of its channels if it
    has opened any to another node, else the one that it has chosen. The network card then reads GPU memory itself
    (GDRDMA).
    """
    used = {name + direct for name, direct in USED.findall(text)}
    return used or set(CHOSEN.findall(text)[:1])


def check(args: argparse.Namespace) -> Result:
    # The ranks of a run on these nodes, with NCCL's account of itself in a file for each.
    log = f"{tempfile.gettempdir()}/first_run_nccl_{uuid.uuid4().hex}"
    sizes = (f"trainer.nnodes={args.nodes}", f"trainer.n_gpus_per_node={args.ranks}", f"trainer.device={args.device}")
    config = load_config("tinywiki", ["actor_rollout_ref.model.path=none", *sizes])
    variables = {"PYTHONPATH": os.environ["PYTHONPATH"], "NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{log}.%p"}
    connect(worker_logs=False, num_nodes=args.nodes)
    pool = ResourcePool(args.nodes, args.ranks, args.device)
    try:
        pool.reserve(LIMIT_S)
        check_nodes(pool, args.result.parent, LIMIT_S, gather=True)
        group = WorkerGroup(BandwidthRank, pool, config, timeout_s=LIMIT_S, env_vars=variables)
        group.call_all("join", group.call_first("rendezvous"))
        found = {mib: group.call_all("bandwidth", mib) for mib in SIZES[args.device]}
        transports = set().union(*group.call_all("transports", log))
        group.shutdown()
    finally:
        pool.release()
        disconnect()

    # The slowest rank's figure counts.
    rates = {mib: min(rate for rate, _ in ranks) for mib, ranks in found.items()}
    right = all(correct for ranks in found.values() for _, correct in ranks)
    lines = [f"| {mib} | {rate:.2f} |" for mib, rate in rates.items()]
    by = ", ".join(sorted(transports)) or "gloo"
    best = max(rates.values())
    figures = f"{args.nodes} nodes of {args.ranks} ranks, bus bandwidth up to {best:.2f} GB/s by {by}"
    if not right:
        figures = "the sum is wrong"
    elif best < args.min_gbs:
        figures += f", less than {args.min_gbs:g} GB/s (--min_gbs): docs/multinode.md says what to look at"
    table = "\n".join(["| MiB | bus bandwidth, GB/s |", "|---|---|", *lines])
    return judged(right and best >= args.min_gbs, figures, table)


if __name__ == "__main__":
    run_child(check, ("--ranks", int), ("--nodes", int), ("--min_gbs", float))
