"""Starting Ray on the nodes of a cluster by SLURM and by ssh, with stand-ins for these programs and for Ray's."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from shlex import quote

import psutil
import pytest
from e2e_world import ROOT

# Of the loopback interface, and of this process alone: another one may have the port at another address.
ADDRESS = f"127.{os.getpid() >> 8 & 255}.{os.getpid() & 255}.9"
# `ray start` as it is called, where, and with which secret; it stays until it is ended. With $HEAD_FAILS the head does
# not start, and once there is a file $CALLS.lost it ends.
RAY = """#!/usr/bin/env bash
trap 'echo "${NODE:-here} ended" >>"$CALLS"; kill $(jobs -p) 2>/dev/null; exit' TERM HUP
echo "${NODE:-here} token=$RAY_AUTH_TOKEN mode=$RAY_AUTH_MODE niceness=$RAY_worker_niceness $*" >>"$CALLS"
if [[ "$*" == *--head* ]]; then
  if [[ -n ${HEAD_FAILS:-} ]]; then echo "no Ray today" >&2; exit 1; fi
  python3 -m http.server --bind "$ADDRESS" 6379 >"$CALLS.head" 2>&1 &
  until [[ -e $CALLS.lost ]]; do sleep 0.1; done
  kill %1; exit 1
fi
while :; do sleep 0.1; done
"""
SSH = '#!/usr/bin/env bash\nshift 2\nNODE=$1 exec bash -c "$2"\n'
# Ends with its tasks, with a status that is not 0 if one of them has one.
SRUN = """#!/usr/bin/env bash
options=()
for word in "$@"; do
  case "$word" in --nodelist=*) nodes=${word#*=} ;; --*) options+=("$word") ;; *) break ;; esac
  shift
done
echo "${options[*]} on $nodes" >>"$CALLS.srun"
tasks=() status=0
for node in ${nodes//,/ }; do NODE=$node "$@" & tasks+=($!); done
for task in "${tasks[@]}"; do wait "$task" || status=1; done
exit "$status"
"""
# The names are known on the last node alone; on the first, its own is a loopback address.
GETENT = """#!/usr/bin/env bash
echo "$NODE asked for $2 by $1" >>"$CALLS.getent"
[[ $NODE == n3 ]] || { echo "127.0.1.1 STREAM $2"; exit 0; }
[[ -z $ADDRESS || ( $1 == ahostsv4 && $ADDRESS == *:* ) ]] && exit 2
printf '%s\\n' "$ADDRESS      STREAM $2" "192.0.2.9      STREAM"
"""
SCONTROL = "#!/usr/bin/env bash\nprintf '%s\\n' n1 n2 n3\n"
HOSTNAME = "#!/usr/bin/env bash\necho ${HOSTNAME_I:-$ADDRESS} 192.0.2.9\n"
# A trainer takes a second to save its step.
PYTHON = f"""#!/usr/bin/env bash
[[ $2 == verl.trainer.* ]] || exec {quote(sys.executable)} "$@"
trap 'sleep 1; echo "the step in hand is saved"; exit 130' TERM
echo train >>"$CALLS"
while :; do sleep 0.1; done
"""
SLURM = "scripts/cluster/slurm.sbatch"
ON_SLURM = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_NUM_NODES": "3", "SLURM_GPUS_ON_NODE": "4"}
ON_SLURM |= {"SLURM_CPUS_ON_NODE": "48"}


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """A copy of the scripts, where Ray and the programs that reach other nodes are stand-ins."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in {"ray": RAY, "ssh": SSH, "srun": SRUN, "scontrol": SCONTROL, "hostname": HOSTNAME}.items():
        write_program(programs / name, text)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    variables = {"PATH": f"{programs}:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls"), "ADDRESS": ADDRESS}
    return os.environ | variables | {"HOME": str(tmp_path)}


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


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

    def notify(self) -> None:
        """As SLURM does before the end of a job's time: a signal to the script alone."""
        self._process.send_signal(signal.SIGTERM)

    def wait_until_all_have_ended(self) -> None:
        """What it has started, too."""
        deadline = time.monotonic() + 60
        while left := [one for one in psutil.process_iter() if self._is_of_it(one)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.1)

    def _is_of_it(self, one: psutil.Process) -> bool:
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            return os.getpgid(one.pid) == self._process.pid and one.status() != psutil.STATUS_ZOMBIE
        return False

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
    for script in started:
        script.wait_until_all_have_ended()  # the next test's head has the address of this one's


def test_a_cluster_by_ssh(cluster: dict[str, str], start: Callable[..., Script]) -> None:
    """The first host is the head, the secret is no argument, and what starts the nodes ends them."""
    given = {"RAY_AUTH_TOKEN": "s", "RAY_NODE_IP": ADDRESS}
    script = start("scripts/cluster/ssh.sh", "start", "localhost", "n2", "--", "--num-cpus=4", **given)
    head, other = calls(cluster, 2)
    same = "token=s mode=token niceness=0 start --block --disable-usage-stats"
    at = f"--dashboard-host={ADDRESS} --node-ip-address={ADDRESS}"
    assert head == f"localhost {same} --head --port=6379 {at} --num-cpus=4"
    assert other == f"n2 {same} --address={ADDRESS}:6379 --num-cpus=4"
    script.notify()
    assert script.ended()[1].startswith(f"the cluster's address: RAY_ADDRESS={ADDRESS}:6379")
    assert {"localhost ended", "n2 ended"} <= set(calls(cluster, 4))
    script.wait_until_all_have_ended()


def test_a_head_whose_name_is_a_loopback_address_here(start: Callable[..., Script]) -> None:
    """As on the head itself."""
    status, said = start("scripts/cluster/ssh.sh", "start", "localhost", "n2").ended()
    assert status == 2 and "localhost is 127.0.0.1 here" in said and "set RAY_NODE_IP" in said


@pytest.mark.parametrize("arguments", [(), ("start",), ("stop", "n1")])
def test_ssh_without_hosts(arguments: tuple[str, ...], start: Callable[..., Script]) -> None:
    status, said = start("scripts/cluster/ssh.sh", *arguments).ended()
    assert status == 2 and "usage: bash scripts/cluster/ssh.sh start HEAD NODE" in said


@pytest.fixture
def on_slurm(cluster: dict[str, str], start: Callable[..., Script], tmp_path: Path) -> Callable[..., Script]:
    """A job of three nodes, whose train script is that text."""
    write_program(tmp_path / "programs" / "getent", GETENT)

    def submit(script: str, *arguments: str, **variables: str) -> Script:
        (tmp_path / "train.sh").write_text(script)
        given = ON_SLURM | {"SLURM_SUBMIT_DIR": str(tmp_path), "HOSTNAME_I": "192.0.2.1"} | variables
        return start(SLURM, "train.sh", *arguments, **given)

    return submit


def test_a_run_on_slurm(cluster: dict[str, str], on_slurm: Callable[..., Script]) -> None:
    """Ray on all nodes with a secret of the job's own, then the script on the first one; its status is the job's.

    The head's address is the one that its name has on another node, whichever network `hostname -I` names first.
    """
    script = on_slurm('echo "train $RAY_ADDRESS $RAY_AUTH_TOKEN $N_GPUS $*" >>"$CALLS"; exit 3\n', "a=1")
    assert script.ended()[0] == 3
    head, second, third, train = calls(cluster, 4)
    token = head.split("token=")[1].split()[0]
    assert len(token) == 64 and f"token={token}" in second and f"token={token}" in third
    at = f"--dashboard-host={ADDRESS} --node-ip-address={ADDRESS}"
    assert head.startswith("n1 ") and head.endswith(f"--head --port=6379 {at}")
    assert [line[:2] for line in (second, third)] == ["n2", "n3"] and second.endswith(f"--address={ADDRESS}:6379")
    assert train == f"train {ADDRESS}:6379 {token} 4 trainer.sigterm_grace_s=900 trainer.nnodes=3 a=1"


def test_ray_gets_the_whole_of_each_node_on_slurm(cluster: dict[str, str], on_slurm: Callable[..., Script]) -> None:
    """A step of SLURM has one core otherwise, and the memory that belongs to it; the job's own memory is the node's."""
    assert on_slurm("exit 0\n").ended()[0] == 0
    address, *ray = Path(cluster["CALLS"] + ".srun").read_text().splitlines()
    assert address == "--overlap --nodes=1 --ntasks=1 on n3"
    same = "--cpus-per-task=48 --mem=0 on"
    assert ray == [f"--overlap --nodes=1 --ntasks=1 {same} n1", f"--overlap --nodes=2 --ntasks=2 {same} n2,n3"]
    options = [line for line in (ROOT / SLURM).read_text().splitlines() if line.startswith("#SBATCH ")]
    assert {"#SBATCH --mem=0", "#SBATCH --exclusive", "#SBATCH --signal=B:TERM@900"} <= set(options)


def test_an_ipv6_address_on_slurm(cluster: dict[str, str], on_slurm: Callable[..., Script]) -> None:
    """It is in brackets where a port follows, and only there."""
    if not has_ipv6():
        pytest.skip("this machine has no IPv6")
    script = on_slurm('echo "train $RAY_ADDRESS" >>"$CALLS"\n', ADDRESS="::1")
    assert script.ended()[0] == 0, script.ended()
    head, second, _, train = calls(cluster, 4)
    assert head.endswith("--dashboard-host=::1 --node-ip-address=::1") and second.endswith("--address=[::1]:6379")
    assert train == "train [::1]:6379"


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


def test_a_name_without_an_address_on_slurm(on_slurm: Callable[..., Script]) -> None:
    status, said = on_slurm("exit 0\n", ADDRESS="").ended()
    assert status == 2 and "the name n1 has no address on n3: set HEAD_ADDRESS" in said
    assert on_slurm("exit 0\n", HEAD_ADDRESS=ADDRESS).ended()[0] == 0


def test_a_head_that_does_not_start_ends_the_job(on_slurm: Callable[..., Script]) -> None:
    status, said = on_slurm("exit 0\n", HEAD_FAILS="1").ended()
    assert status == 2 and "no Ray today" in said and "error: Ray did not start on n1; its output is above" in said


def test_a_head_that_is_lost_ends_the_job(cluster: dict[str, str], on_slurm: Callable[..., Script]) -> None:
    """And the run with it, which would wait for a cluster that does not come back."""
    waits = 'trap \'echo "train told" >>"$CALLS"; exit 7\' TERM; echo train >>"$CALLS"; sleep 600 & wait\n'
    script = on_slurm(waits)
    calls(cluster, 4)
    Path(cluster["CALLS"] + ".lost").touch()
    status, said = script.ended()
    assert status == 1 and "error: Ray's head on n1 has ended, and with it the job" in said
    assert "train told" in calls(cluster, 5)


@pytest.fixture
def training_on_slurm(cluster: dict[str, str], on_slurm: Callable[..., Script], tmp_path: Path) -> Script:
    """A job whose train script is one of ours; its trainer is a stand-in and has begun."""
    write_program(tmp_path / "programs" / "python3", PYTHON)
    shutil.copy(ROOT / "train_grpo.sh", tmp_path)
    for name in ("train", "test"):
        (tmp_path / f"{name}.parquet").touch()
    script = on_slurm('exec bash train_grpo.sh "$@"\n', DATA_DIR=str(tmp_path), EXPERIMENT_NAME="job")
    calls(cluster, 4)
    return script


def test_the_notice_reaches_the_driver_on_slurm(cluster: dict[str, str], training_on_slurm: Script) -> None:
    """SIGTERM comes to the batch script alone, and goes on to the trainer; Ray stays until that has saved its step."""
    training_on_slurm.notify()
    status, said = training_on_slurm.ended()
    assert status == 130 and "the step in hand is saved" in said
    assert not [line for line in calls(cluster, 4) if "ended" in line]


def test_a_signal_to_every_process_leaves_the_log_whole(training_on_slurm: Script, tmp_path: Path) -> None:
    """tee writes what the trainer says after it."""
    training_on_slurm.end()
    training_on_slurm.ended()
    deadline = time.monotonic() + 60
    while "the step in hand is saved" not in (log := (tmp_path / "job.log").read_text()):
        assert time.monotonic() < deadline, log
        time.sleep(0.1)


def test_slurm_outside_of_the_repository(start: Callable[..., Script], tmp_path: Path) -> None:
    script, elsewhere = "scripts/cluster/slurm.sbatch", tmp_path / "elsewhere"
    assert "name a train script" in start(script, SLURM_SUBMIT_DIR=str(tmp_path)).ended()[1]
    status, said = start(script, "train.sh", SLURM_SUBMIT_DIR=str(elsewhere)).ended()
    assert status == 2 and f"{elsewhere} is not the repository" in said
