"""The image: there is no Docker on the machines of the tests, so what its file names is looked up."""

from __future__ import annotations

import fnmatch
import re
import subprocess
from pathlib import Path

import pytest
from e2e_world import ROOT

FILE = ROOT / "docker" / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments), continued lines joined."""
    lines = [line for line in FILE.read_text().splitlines() if not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [
        (word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line.strip())
    ]


def given(word: str) -> list[str]:
    return [rest for name, rest in instructions() if name == word]


def test_it_has_what_is_known_of_a_dockerfile() -> None:
    known = {"FROM", "RUN", "ARG", "WORKDIR", "USER", "COPY", "ENV", "ENTRYPOINT", "CMD"}
    words = [word for word, _ in instructions()]
    assert words[0] == "FROM" and set(words) <= known
    assert given("FROM") == ["python:3.11-slim-bookworm"]  # the Python that the locks were made with


def test_it_does_not_end_as_root() -> None:
    words = [word for word, _ in instructions()]
    assert given("USER") == ["${UID}"] and "UID=1000" in given("ARG")
    assert any("useradd" in run and "--uid ${UID}" in run for run in given("RUN"))
    after = words[words.index("USER") :]
    assert "COPY" in after and "RUN" in after  # what is copied and installed belongs to the user
    assert all("--chown=${UID}" in copied for copied in given("COPY"))


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_the_set_up_has_its_options(kind: str) -> None:
    """Each option of the RUN line is one of the script's, with the files that it reads; `--help` ends it at once."""
    (line,) = [run for run in given("RUN") if "scripts/setup.sh" in run]
    assert "KIND=cpu" in given("ARG")
    words = line.split("&&")[0].replace("${KIND}", kind).replace('"', "").split()
    assert words[:2] == ["bash", "scripts/setup.sh"] and (ROOT / "requirements" / f"{kind}.lock").is_file()
    done = subprocess.run([*words, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--image" in done.stdout, done.stderr
    wrong = subprocess.run([*words, "--fast"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 1 and "unknown option '--fast'" in wrong.stderr


def test_what_the_set_up_needs_is_in_the_image() -> None:
    """Nothing that git has is left out, but results; what git ignores is."""
    left_out = (Path(f"{FILE}.dockerignore")).read_text().split()
    git = ["git", "-c", f"safe.directory={ROOT}", "ls-files"]  # also somebody else's clone
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, timeout=60)
    if listed.returncode == 128:
        pytest.skip("this is no git checkout")
    tops = {name.partition("/")[0] for name in listed.stdout.split()}
    assert not [top for top in tops for pattern in left_out if fnmatch.fnmatch(top, pattern)]
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text().split() if not re.search(r"[*]", line)}
    assert ignored - {"__pycache__"} <= set(left_out)
    (copied,) = given("COPY")
    assert copied.split()[1:] == [".", "."]


def test_nccl_finds_the_network_card() -> None:
    """Without these libraries it uses TCP, and says so only in a log that is off."""
    [packages] = [run for run in given("RUN") if "apt-get install" in run]
    assert {"libibverbs1", "ibverbs-providers"} <= set(packages.split())


def test_its_command_is_installed() -> None:
    assert given("ENTRYPOINT") == ['["search-r1"]']
    assert '"search-r1 = ' in (ROOT / "setup.py").read_text()
