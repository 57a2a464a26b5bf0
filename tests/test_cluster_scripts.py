"""Starting Ray on the nodes of a cluster by SLURM and by ssh, with stand-ins for these programs and for Ray's."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from e2e_world import ROOT

# Of the loopback interface, and of this process alone: another one may have the port at another address.
ADDRESS = f"127.{os.getpid() >> 8 & 255}.{os.getpid() & 255}.9"
# `ray start` as it is called, where, and with which secret; it stays until it is ended.
RAY = """#!/usr/bin/env bash
trap 'echo "${NODE:-here} ended" >>"$CALLS"; kill $(jobs -p) 2>/dev/null; exit' TERM HUP
echo "${NODE:-here} token=$RAY_AUTH_TOKEN mode=$RAY_AUTH_MODE niceness=$RAY_worker_niceness $*" >>"$CALLS"
if [[ "$*" == *--head* ]]; then python3 -m http.server --bind "$ADDRESS" 6379 >"$CALLS.head" 2>&1 & fi
while :; do sleep 0.1; done
"""
SSH = '#!/usr/bin/env bash\nshift 2\nNODE=$1 exec bash -c "$2"\n'
SRUN = """#!/usr/bin/env bash
for word in "$@"; do
  case "$word" in --nodelist=*) nodes=${word#*=} ;; --*) ;; *) break ;; esac
  shift
done
for node in ${nodes//,/ }; do NODE=$node "$@" & done
wait
"""
SCONTROL = "#!/usr/bin/env bash\nprintf '%s\\n' n1 n2 n3\n"
HOSTNAME = "#!/usr/bin/env bash\necho $ADDRESS 192.0.2.9\n"


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """A copy of the scripts, where Ray and the programs that reach other nodes are stand-ins."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in {"ray": RAY, "ssh": SSH, "srun": SRUN, "scontrol": SCONTROL, "hostname": HOSTNAME}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    variables = {"PATH": f"{programs}:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls"), "ADDRESS": ADDRESS}
    return os.environ | variables | {"HOME": str(tmp_path)}


def calls(cluster: dict[str, str], number: int) -> list[str]:
    """In order, when there are so many."""
    path, deadline = Path(cluster["CALLS"]), time.monotonic() + 60
    while len(lines := path.read_text().splitlines() if path.exists() else []) < number:
        assert time.monotonic() < deadline, lines
        time.sleep(0.05)
    return sorted(lines)


class Script:
    """One that runs, with what it starts, until the end of the test at the latest."""

    def __init__(self, cluster: dict[str, str], *command: str, **variables: str) -> None:
        folder = Path(cluster["CALLS"]).parent
        self._said = folder / "said"
        with self._said.open("w") as said:  # no pipe: what it leaves behind would hold it open
            self._process = subprocess.Popen(
                ["bash", *command],
                cwd=folder,
                env=cluster | variables,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )

    def ended(self) -> tuple[int, str]:
        """Its status, and all that it said."""
        status = self._process.wait(timeout=60)
        return status, self._said.read_text()

    def end(self) -> None:
        """It and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)


@pytest.fixture
def start(cluster: dict[str, str]) -> Iterator[Callable[..., Script]]:
    started: list[Script] = []

    def begin(*command: str, **variables: str) -> Script:
        started.append(Script(cluster, *command, **variables))
        return started[-1]

    yield begin
    for script in started:
        script.end()


def test_a_cluster_by_ssh(cluster: dict[str, str], start: Callable[..., Script]) -> None:
    """The first host is the head, the secret is no argument, and what starts the nodes ends them."""
    script = start("scripts/cluster/ssh.sh", "start", "localhost", "n2", "--", "--num-cpus=4", RAY_AUTH_TOKEN="s")
    head, other = calls(cluster, 2)
    same = "token=s mode=token niceness=0 start --block --disable-usage-stats"
    assert head == f"localhost {same} --head --port=6379 --dashboard-host={ADDRESS} --num-cpus=4"
    assert other == f"n2 {same} --address=127.0.0.1:6379 --num-cpus=4"
    script.end()
    assert {"localhost ended", "n2 ended"} <= set(calls(cluster, 4))


@pytest.mark.parametrize("arguments", [(), ("start",), ("stop", "n1")])
def test_ssh_without_hosts(arguments: tuple[str, ...], start: Callable[..., Script]) -> None:
    status, said = start("scripts/cluster/ssh.sh", *arguments).ended()
    assert status == 2 and "usage: bash scripts/cluster/ssh.sh start HEAD NODE" in said


def test_a_run_on_slurm(cluster: dict[str, str], start: Callable[..., Script], tmp_path: Path) -> None:
    """Ray on all nodes with a secret of the job's own, then the script on the first one; its status is the job's."""
    (tmp_path / "train.sh").write_text('echo "train $RAY_ADDRESS $RAY_AUTH_TOKEN $N_GPUS $*" >>"$CALLS"; exit 3\n')
    given = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_NUM_NODES": "3", "SLURM_GPUS_ON_NODE": "4"}
    script = start("scripts/cluster/slurm.sbatch", "train.sh", "a=1", SLURM_SUBMIT_DIR=str(tmp_path), **given)
    assert script.ended()[0] == 3
    head, second, third, train = calls(cluster, 4)
    token = head.split("token=")[1].split()[0]
    assert len(token) == 64 and f"token={token}" in second and f"token={token}" in third
    assert head.startswith("n1 ") and head.endswith(f"--head --port=6379 --dashboard-host={ADDRESS}")
    assert [line[:2] for line in (second, third)] == ["n2", "n3"] and second.endswith(f"--address={ADDRESS}:6379")
    assert train == f"train {ADDRESS}:6379 {token} 4 trainer.sigterm_grace_s=120 a=1 trainer.nnodes=3"


def test_slurm_outside_of_the_repository(start: Callable[..., Script], tmp_path: Path) -> None:
    script, elsewhere = "scripts/cluster/slurm.sbatch", tmp_path / "elsewhere"
    assert "name a train script" in start(script, SLURM_SUBMIT_DIR=str(tmp_path)).ended()[1]
    status, said = start(script, "train.sh", SLURM_SUBMIT_DIR=str(elsewhere)).ended()
    assert status == 2 and f"{elsewhere} is not the repository" in said
