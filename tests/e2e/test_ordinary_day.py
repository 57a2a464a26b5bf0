"""An ordinary user's first day in a clone with a space and an é in its path, under everything that goes wrong there."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

import pytest
from e2e_world import ROOT, free_port
from pdf_files import pdf_of

# What each step promises is tested for root in the default tier: test_run_retriever.py, test_finished_phase.py, ...
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

HARBOUR = "The harbour of Skarn is 412 metres wide."
PAGE = "<html><head><title>Skarn</title></head><body><h1>Skarn</h1><p>Skarn is a town in the north.</p></body></html>"


@pytest.fixture(scope="module")
def user() -> Iterator[str]:
    """Who is not root, has no home folder, and can run this Python."""
    if os.getuid() or not (shutil.which("useradd") and shutil.which("runuser")):
        pytest.skip("only root can make another user")
    name = f"day{secrets.token_hex(4)}"
    subprocess.run(["useradd", "--no-create-home", "--home-dir", "/nonexistent", name], check=True)
    try:
        tried = subprocess.run(["runuser", "-u", name, "--", sys.executable, "-V"], capture_output=True, check=False)
        if tried.returncode:
            pytest.skip(f"{sys.executable} can be run by root alone")
        yield name
    finally:
        subprocess.run(["userdel", name], check=False)


@pytest.fixture(scope="module")
def day(user: str) -> Iterator[str]:
    """All that was printed on the day."""
    folder = Path(mkdtemp(prefix="day-", dir="/tmp"))
    try:
        clone = folder / "my search é"
        copy_of_the_clone(clone)
        papers = folder / "my papers"
        papers.mkdir()
        make_papers(papers)
        home, temporary = folder / "home of mine", folder / ("t" * (100 - len(str(folder)) - 1))
        for made in (home, temporary):
            made.mkdir()
        (temporary / "ray").mkdir()
        (temporary / "ray" / "ray_current_cluster").write_text("10.255.255.1:6379")  # of a Ray that is gone
        subprocess.run(["chown", "-R", user, folder], check=True)
        variables = {
            **{"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "TMPDIR": str(temporary)},
            **{"DAY": str(folder), "PORT": str(free_port()), "VIEW_PORT": str(free_port())},
            **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"),
        }
        script = f"umask 077; exec bash {Path(__file__).with_name('ordinary_day.sh').name}"
        shutil.copy(Path(__file__).with_name("ordinary_day.sh"), clone)
        done = subprocess.run(
            ["runuser", "-u", user, "--", "env", f"HOME={home}", "bash", "-c", script],
            cwd=clone,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=2300,
            check=False,
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # ignored in the background of a shell
        )
        assert done.returncode == 0 and "== done" in done.stdout, done.stdout[-8000:]
        yield done.stdout
    finally:
        subprocess.run(["pkill", "-KILL", "-u", user], check=False)
        shutil.rmtree(folder, ignore_errors=True)


def copy_of_the_clone(clone: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone / name)
    (clone / ".venv").symlink_to(ROOT / ".venv")


def make_papers(papers: Path) -> None:
    """30 files: two PDFs, a page, and notes, one of which cannot be read."""
    (papers / "handbook.pdf").write_bytes(pdf_of(["Contents", HARBOUR]))
    (papers / "survey.pdf").write_bytes(pdf_of(["A survey of the coast."]))
    (papers / "skarn.html").write_text(PAGE)
    for number in range(26):
        (papers / f"note é {number}.md").write_text(f"# Note {number}\n\nThe ferry {number} leaves at noon.\n")
    (papers / "photo.txt").write_bytes(b"\x89PNG\r\n\x1a\n\x00\xff")


def part(day: str, title: str) -> str:
    return day.split(f"== {title}\n")[1].split("\n== ")[0]


def test_no_traceback_is_seen(day: str) -> None:
    assert "Traceback" not in day


def test_an_interrupted_quickstart_goes_on_without_repeating(day: str) -> None:
    assert "ended with 130" in part(day, "quickstart, interrupted")
    resumed = day.split("== quickstart, resumed\n")[1].split("\n== infer")[0]
    assert resumed.count("done before, and unchanged: skipped") == 2
    assert "step 12/12" in resumed and "step 0/12" not in resumed


def test_the_command_that_the_run_printed_answers(day: str) -> None:
    printed = part(day, "infer, as a run prints it")
    assert "infer --run" in printed and "..." in printed


def test_questions_about_own_documents_find_file_and_page(day: str) -> None:
    assert "photo.txt" in part(day, "documents"), "what cannot be read is named"
    found = part(day, "questions about them")
    assert HARBOUR in found and "handbook.pdf, page 2" in found
