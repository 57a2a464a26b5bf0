"""`search-r1`: which programs it starts, with which arguments, and what it says of them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from search_r1 import command
from search_r1.command import PROGRAMS, Program, make, programs

ROOT = Path(__file__).resolve().parents[2]
ALL = programs()
HEAVY = ("torch", "vllm", "ray", "transformers")


def search_r1(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", "from search_r1.command import main; main()", *arguments]
    return subprocess.run(words, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("program", ALL.values(), ids=lambda program: program.target)
def test_what_a_command_starts_is_there(program: Program) -> None:
    if program.is_script:
        assert (ROOT / program.target).is_file()
    else:
        assert importlib.util.find_spec(program.target) is not None


HELP_OF_EACH = """
import io, json, runpy, sys
from contextlib import redirect_stdout
targets, told = sys.argv[1:], {}
for target in targets:
    sys.argv = [target, "--help"]
    with redirect_stdout(io.StringIO()) as shown:
        try:
            run = runpy.run_path if "/" in target else runpy.run_module
            run(target, run_name="__main__")
        except SystemExit as end:
            assert not end.code, (target, end.code)
    told[target] = shown.getvalue(), [name for name in %r if name in sys.modules]
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def helps() -> dict[str, tuple[str, list[str]]]:
    """Of each program that is Python: its own help, and what takes seconds to import and was imported by then."""
    targets = [one.target for words, one in ALL.items() if words[0] != "bench" and not one.target.endswith(".sh")]
    return json.loads(printed(HELP_OF_EACH % (HEAVY,), *targets))


def printed(code: str, *arguments: str) -> str:
    words = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("words", [words for words in ALL if words[0] != "bench"], ids=" ".join)
def test_help_has_an_example_and_that_of_the_program(
    words: tuple[str, ...],
    helps: dict[str, tuple[str, list[str]]],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program, started = ALL[words], list[list[str]]()
    monkeypatch.setattr(os, "execvp", lambda file, command: started.append([file, *command]))
    make()([*words, "--help"], prog_name="search-r1", standalone_mode=False)
    first, empty, example, *_ = capfd.readouterr().out.splitlines()
    expected = f"    search-r1 {' '.join(words)} {program.example}".rstrip()
    assert (first, empty, example) == (program.summary, "", expected)
    [[file, *command]] = started
    assert file == command[0] and command == program.words(("--help",))
    if program.target in helps:
        own, _ = helps[program.target]
    else:
        own = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert any("usage:" in line or "bash scripts/" in line for line in own.splitlines())
    assert required_of(own) <= set(program.example.split()), "it would not start as it stands"


def test_help_imports_nothing_that_takes_seconds(helps: dict[str, tuple[str, list[str]]]) -> None:
    """They ran one after the other: the first program that imports too much is the first with something here."""
    assert {target: heavy for target, (_, heavy) in helps.items() if heavy} == {}
    assert all("usage:" in own for own, _ in helps.values())


def test_help_of_a_benchmark_is_read_and_not_run() -> None:
    """It has each option that the program itself has; that of a program that imports torch comes without torch."""
    names = [words[1] for words in ALL if words[0] == "bench"]
    shown = printed(
        "import sys; from search_r1.command import make\n"
        "for name in sys.argv[1:]:\n"
        "    print('\\f'); make()(['bench', name, '--help'], standalone_mode=False)\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)",
        *names,
    )
    helps = dict(zip(names, shown.split("\f")[1:], strict=True))
    assert all("options:" in text and ALL["bench", name].summary in text for name, text in helps.items())
    for name in ("viewer", "retrieval-load"):
        command = [sys.executable, ROOT / ALL["bench", name].target, "--help"]
        own = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        options = set(re.findall(r"--\w+", own.partition("options:")[2])) - {"--help"}
        assert options and options <= set(re.findall(r"--\w+", helps[name]))


def required_of(help_text: str) -> set[str]:
    """The options that a usage line has outside of brackets."""
    usage, _, _ = help_text.partition("usage:")[2].partition("\n\n")
    while (without := re.sub(r"\[[^\[\]]*\]", "", usage)) != usage:
        usage = without
    return {word for word in usage.split() if word.startswith("--")}


def test_all_commands_are_listed() -> None:
    shown = search_r1("--help").stdout
    listed = [line.split()[0] for line in shown.partition("Commands:\n")[2].splitlines() if line[2:3].strip()]
    assert listed == [*(one.name for one in PROGRAMS), "data", "bench"]
    assert "retrieval-bm25" in search_r1("bench").stderr + search_r1("bench", "--help").stdout


def test_nothing_heavy_is_imported() -> None:
    """Else not even --help would answer at once."""
    code = "import sys, search_r1.command; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = printed(code)
    assert not {"torch", "numpy", "ray", "vllm", "transformers", "pyarrow", "omegaconf", "verl"} & set(loaded.split())


def test_arguments_and_the_exit_status_go_through() -> None:
    refused = search_r1("train", "--config-name", "tinywiki", "trainer.no_such_key=1")
    assert refused.returncode == 2 and "no_such_key" in refused.stderr
    shown = search_r1("train", "--config-name", "tinywiki", "--cfg", "job", "max_turns=3")
    assert shown.returncode == 0 and shown.stdout.count("max_turns: 3") == 1


def test_an_unknown_command_is_told() -> None:
    shown = search_r1("trian")
    assert shown.returncode == 2 and "No such command 'trian'" in shown.stderr


def test_a_script_without_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "CLONE", tmp_path)
    with pytest.raises(command.click.ClickException, match="clone the repository and start it there"):
        PROGRAMS[0].words(())


def test_a_shell_can_complete_the_commands() -> None:
    assert "_search_r1_completion" in search_r1(_SEARCH_R1_COMPLETE="bash_source").stdout.lower()
    completed = search_r1(_SEARCH_R1_COMPLETE="bash_complete", COMP_WORDS="search-r1 d", COMP_CWORD="1").stdout
    assert [line.partition(",")[2] for line in completed.split()] == ["dry-run", "doctor", "data"]


def test_the_package_installs_it() -> None:
    said: dict[str, object] = {}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("setuptools.setup", said.update)
        runpy.run_path(str(ROOT / "setup.py"), run_name="__main__")
    assert said["entry_points"] == {"console_scripts": ["search-r1 = search_r1.command:main"]}
    assert said["py_modules"] == ["infer", "long_task", "program_end", "text_file", "url_text"]
