"""Tell the runs of a Ray cluster that one of its nodes will be taken away, and wait until they have ended.

    python scripts/cluster/give_notice.py --wait_s 870

This is for what a scheduler calls before it stops a node, such as the preStop hook of a pod. The driver of every run,
on whichever node, gets SIGTERM once, however many nodes call this: it finishes the step in hand and saves it, if
trainer.sigterm_grace_s allows it. It uses the cluster of RAY_ADDRESS, or the one that this machine is a node of, whose
dashboard must be running.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import ray
from ray.job_submission import DriverInfo, JobStatus, JobSubmissionClient
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


def main() -> int:
    """0: no run is left; 1: one still runs after the wait."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wait_s", type=float, required=True, help="seconds until the node is stopped")
    args = parser.parse_args()
    cluster = ray.init(address="auto", logging_level="error", log_to_driver=False)
    nodes = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
    told = []
    for driver in drivers(f"http://{cluster.dashboard_url}"):
        if driver.node_ip_address not in nodes:  # lost, and the run with it
            continue
        there = NodeAffinitySchedulingStrategy(nodes[driver.node_ip_address], soft=False)
        task = ray.remote(tell).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
        told.append(task.remote(int(driver.pid), args.wait_s))
        print(f"told the run of process {driver.pid} on {driver.node_ip_address}", flush=True)
    return 0 if all(ray.get(told)) else 1


def drivers(dashboard: str) -> Iterator[DriverInfo]:
    """The drivers of the cluster's jobs that run, except this program, here and on other nodes that are stopped."""
    for job in JobSubmissionClient(dashboard).list_jobs():
        if job.status == JobStatus.RUNNING and job.driver_info and Path(__file__).name not in job.entrypoint:
            yield job.driver_info


def tell(pid: int, wait_s: float) -> bool:
    """Send SIGTERM to a process of this node, unless another call has; returns whether it has ended `wait_s` later.

    A second SIGTERM would end the run at once.
    """
    try:
        process = psutil.Process(pid)
        mark = Path(tempfile.gettempdir()) / f"notice-{pid}-{process.create_time():.2f}"
        with contextlib.suppress(FileExistsError):
            mark.touch(exist_ok=False)
            process.terminate()
    except psutil.NoSuchProcess:
        return True
    return not psutil.wait_procs([process], timeout=wait_s)[1]


if __name__ == "__main__":
    sys.exit(main())
