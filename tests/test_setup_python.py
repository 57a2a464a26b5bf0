"""Which Python scripts/setup.sh takes, and what it says of those that it does not."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from shlex import quote

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYTHON = """#!/bin/sh
case "$1 $2" in
  -V*) echo Python {version}.1 ;;
  "-m venv") echo made by "$0"; [ -z "$NO_VENV" ] || exit 1; mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip") exit 1 ;;
  "-c "*libnuma*) ;;
  *) exec {real} -c "import sys; sys.version_info = ({major}, {minor}, 1); sys.abiflags = '{flags}'; $2" ;;
esac
"""
"""An interpreter that says it has another version, and installs nothing."""
APT_CACHE = '#!/bin/sh\nfor known in $KNOWN; do [ "$2" != "$known" ] || exit 0; done\nexit 100\n'


class Machine:
    """A clone, and a PATH with nothing but the interpreters of this machine and the tools that the script calls."""

    def __init__(self, folder: Path) -> None:
        self.clone, self.tools = folder / "clone", folder / "tools"
        for name in ("scripts", "requirements"):
            shutil.copytree(ROOT / name, self.clone / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "setup.py", self.clone)
        self.tools.mkdir()
        used = "bash sh cat sed grep sort split wc cut sha256sum df awk uname mkdir cp rm dirname nproc xargs"
        for name in used.split():
            (self.tools / name).symlink_to(str(shutil.which(name)))
        self.put("apt-cache", APT_CACHE)

    def put(self, name: str, text: str) -> Path:
        (self.tools / name).write_text(text)
        (self.tools / name).chmod(0o755)
        return self.tools / name

    def python(self, name: str, version: str, flags: str = "") -> Path:
        major, minor = version.split(".")
        of_it = {"version": version, "major": major, "minor": minor, "flags": flags}
        return self.put(name, PYTHON.format(real=quote(sys.executable), **of_it))

    def set_up(self, **variables: str) -> subprocess.CompletedProcess[str]:
        script = str(self.clone / "scripts" / "setup.sh")
        variables = {"PATH": str(self.tools), "KNOWN": "", "NO_VENV": ""} | variables
        return subprocess.run(["bash", script], env=variables, capture_output=True, text=True, timeout=60)

    def refusal(self, **variables: str) -> str:
        """The one line that the script ends with, before it has made anything."""
        done = self.set_up(**variables)
        assert done.returncode == 1 and not done.stdout and len(done.stderr.splitlines()) == 1, done
        assert not (self.clone / ".venv" / "bin").exists()
        return done.stderr


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize("by", ["python3", "python{}", "PYTHON"])
def test_each_supported_python_is_taken_without_a_remark(machine: Machine, version: str, by: str) -> None:
    path = machine.python("mine" if by == "PYTHON" else by.format(version), version)
    done = machine.set_up(**({"PYTHON": str(path)} if by == "PYTHON" else {}))
    head, made = done.stdout.splitlines()[:2]
    assert head == f"setup: .venv with Python {version}.1" and made == f"made by {path}"
    assert "note" not in done.stdout and "could not be installed" in done.stderr, "pip is a stand-in"


def test_the_lowest_python_is_the_default_and_an_unfit_python3_none(machine: Machine) -> None:
    machine.python("python3", "3.14")
    for version in ("3.14", "3.13", "3.12", "3.11"):
        path = machine.python(f"python{version}", version)
        if version != "3.14":
            shutil.rmtree(machine.clone / ".venv", ignore_errors=True)
            assert f"made by {path}\n" in machine.set_up().stdout
    machine.put("python3.11", "#!/bin/sh\nexit 127\n")  # of pyenv: a name without that version
    shutil.rmtree(machine.clone / ".venv")
    assert f"made by {machine.tools / 'python3.12'}\n" in machine.set_up().stdout


@pytest.mark.parametrize("version", ["2.7", "3.10", "3.14", "3.15"])
def test_another_python_is_refused_before_anything_is_made(machine: Machine, version: str) -> None:
    path = machine.python("python3", version)
    assert f"no Python 3.11 to 3.13 found (python3: Python {version}.1)" in machine.refusal()
    named = machine.refusal(PYTHON=str(path))
    assert f"PYTHON={path} (Python {version}.1) is not Python 3.11 to 3.13" in named


def test_what_is_no_python_is_named(machine: Machine) -> None:
    assert "no Python 3.11 to 3.13 found (python3: no Python)" in machine.refusal()
    assert "PYTHON=/nowhere (no Python) is not" in machine.refusal(PYTHON="/nowhere")


def test_a_python_without_the_gil_is_refused(machine: Machine) -> None:
    assert "is not Python 3.11 to 3.13" in machine.refusal(PYTHON=str(machine.python("python3.13t", "3.13", flags="t")))


def test_the_hint_names_what_the_system_has(machine: Machine) -> None:
    """Ubuntu 24.04 has no python3.11-venv, Debian 13 neither that nor python3.12-venv."""
    machine.python("python3", "3.10")
    assert "install it: apt-get install python3.12-venv\n" in machine.refusal(KNOWN="python3.10-venv python3.12-venv")
    assert "install it: apt-get install python3.13-venv\n" in machine.refusal(KNOWN="python3.13-venv")
    (machine.tools / "apt-cache").unlink()
    assert "uv python install 3.13" in machine.refusal()


def test_a_python_without_its_venv_module_gets_the_name_of_its_package(machine: Machine) -> None:
    machine.python("python3", "3.12")
    assert machine.set_up(NO_VENV="1").stderr.endswith("apt-get install python3-venv\n")
    machine.python("python3.11", "3.11")  # beside the system's own
    assert machine.set_up(NO_VENV="1").stderr.endswith("apt-get install python3.11-venv\n")


def test_an_environment_of_another_python_is_refused(machine: Machine) -> None:
    (machine.clone / ".venv" / "bin").mkdir(parents=True)
    machine.python("python3", "3.14").rename(machine.clone / ".venv" / "bin" / "python")
    refused = machine.set_up()
    assert ".venv has Python 3.14.1, 3.11 to 3.13 is needed; remove .venv" in refused.stderr
    assert not refused.stdout
