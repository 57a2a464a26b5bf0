"""The commands in README.md, CONTRIBUTING.md and docs/, and a copy of the scripts to rehearse them in."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

SHELLS = ("bash", "sh", "shell")
_FENCE = re.compile(r"^[ ]*```(\w*)[^\n]*\n(.*?)^[ ]*```$", re.MULTILINE | re.DOTALL)
_PROMPT = re.compile(r"^\$ ", re.MULTILINE)
_SPAN = re.compile(r"(?<!`)`((?:[^`\n]|\n(?!\n))+)`(?!`)")
_RUNS_A_PROGRAM = re.compile(r"(\w+=\S+ )*(\S*/)?(bash|python3?|torchrun|ray|curl|pip|git|search-r1)\s+[\w./\[-]")
_SETTING = re.compile(r"(\w+)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Command:
    """One program call: the variables set in front of it and its words."""

    where: str
    words: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def arguments(self) -> list[str]:
        """Those of the module or of the file that Python runs."""
        return list(self.words[3:] if self.words[1] == "-m" else self.words[2:])

    @property
    def line(self) -> str:
        """Program and arguments; however an interpreter is named, it is `python`."""
        program = re.sub(r"^python3(\.\d+)?$", "python", Path(self.words[0]).name)
        return " ".join([program, *self.words[1:]])


def all_commands() -> list[Command]:
    return [command for page in PAGES for command in commands_of(page.read_text(), str(page.relative_to(ROOT)))]


def commands_of(text: str, name: str) -> Iterator[Command]:
    """Those in shell blocks, behind a `$ ` in any block, and in `code` among the prose, with `name:line`."""
    for line, language, block in blocks(text):
        prompted = _PROMPT.search(block) is not None
        for offset, logical_line in _logical_lines(block):
            if logical_line.startswith("$ ") if prompted else language in SHELLS:
                yield from parse(logical_line.removeprefix("$ "), f"{name}:{line + offset}")
        if language == "json" and '"command":' in block:
            yield from _registered(json.loads(block), f"{name}:{line}")
    prose = _FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)
    for span in _SPAN.finditer(prose):
        if _RUNS_A_PROGRAM.match(span[1]):
            yield from parse(_example_of_usage(span[1]), f"{name}:{_line_of(prose, span.start())}")


def _registered(value: object, where: str) -> Iterator[Command]:
    """Programs that a JSON file names for another program to start: {"command": ..., "args": [...]}."""
    if isinstance(value, dict) and "command" in value:
        yield Command(where, (value["command"], *value.get("args", ())))
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _registered(inner, where)


def blocks(text: str) -> Iterator[tuple[int, str, str]]:
    """(number of its first line, language, content) of each fenced block."""
    for fence in _FENCE.finditer(text):
        yield _line_of(text, fence.start(2)), fence[1], fence[2]


def files_of(text: str) -> Iterator[tuple[str, str]]:
    """(name, content) of what a page tells its reader to write: a block behind a paragraph that names `mine/FILE`."""
    for line, language, block in blocks(text):
        before = "\n".join(text.splitlines()[: line - 2]).rstrip().rpartition("\n\n")[2]
        named = re.findall(r"`(mine/\w+\.\w+)`", before)
        if named and language in ("python", "text"):
            yield named[-1], block


def parse(line: str, where: str = "") -> Iterator[Command]:
    """The commands of one shell line, split at pipes and the like; comments and `> FILE` are left out."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;>")
    lexer.whitespace_split = True
    for is_operator, group in groupby(lexer, lambda word: word != "" and set(word) <= set("|&;")):
        if not is_operator:
            yield _command(list(group), where)


def _command(words: list[str], where: str) -> Command:
    variables = {}
    while setting := _SETTING.fullmatch(words[0]):
        variables[setting[1]] = setting[2]
        words = words[1:]
    return Command(where, tuple(takewhile(lambda word: word != ">", words)), variables)


def _logical_lines(block: str) -> Iterator[tuple[int, str]]:
    lines = iter(enumerate(block.splitlines()))
    for offset, line in lines:
        while line.endswith("\\"):
            line = line[:-1] + next(lines)[1].lstrip()
        yield offset, line


def _example_of_usage(text: str) -> str:
    """`[--option]` is given, `N` is a number."""
    return re.sub(r"\bN\b", "3", re.sub(r"\[(--[^\]]+)\]", r"\1", text))


def _line_of(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


STAND_IN = """\
#!/usr/bin/env bash
printf '%s\\0' $# "${0##*/}" "$@" >>"$CALLS"
case "$*" in
  "-m venv "*)
    mkdir -p "$3/bin"; touch "$3/bin/Python.h"
    for tool in python ruff lint-imports; do cp "$0" "$3/bin/$tool"; done ;;
  *"timing_s/step"*) echo 40 ;;
  *"import pathlib, socket"*) echo 8001 ;;
  *"import http.client"*) exec wait_for_server ;;
  *sysconfig*) echo "${0%/*}" ;;
  *is_available*) echo True ;;
  "-m verl.run.finished_phase "*) PYTHONPATH=REPOSITORY exec INTERPRETER "$@" ;;
  "-m verl.run.resuming "*) exit "${REFUSED:-0}" ;;
  "-m verl.run.last_checkpoint "*) ls -d "$3"/{actor/,}global_step_1 2>/dev/null | head -n 1 ;;
esac
for argument in "$@"; do
  case "$option" in
    --subsets)
      mkdir -p "$argument"/{direct,second_query}; touch "$argument"/second_query/{train,validation,test}.jsonl
      for split in train validation test; do echo '{}' >"$argument/direct/$split.jsonl"; done
      echo '{}' >"$argument/second_query/train.jsonl" ;;
    --output_dir | --local_dir | --save_dir) mkdir -p "$argument"; touch "$argument/corpus.jsonl" ;;
    --output) mkdir -p "${argument%/*}"; touch "$argument" ;;
  esac
  option=$argument
  case "$argument" in
    trainer.default_local_dir=*)
      mkdir -p "${argument#*=}/"{,actor/}global_step_1
      touch "${argument#*=}/global_step_1/config.json" ;;
  esac
done
""".replace("REPOSITORY", shlex.quote(str(ROOT))).replace("INTERPRETER", shlex.quote(sys.executable))
# Ends well for each server once, when it has been called: a script starts them in the background.
WAIT_FOR_SERVER = """\
#!/usr/bin/env bash
answered=$(cat "$CALLS.answered" 2>/dev/null || echo 0)
for _ in {1..1200}; do
  started=$(grep -aos search_r1.search.retrieval_server "$CALLS" | wc -l)
  if ((started > answered)); then echo "$started" >"$CALLS.answered"; exit 0; fi
  sleep 0.05
done
exit 1
"""
NVIDIA_SMI = "#!/usr/bin/env bash\necho 580.65.06\n"
DF = "#!/usr/bin/env bash\necho Filesystem; echo disk 0 0 999999999 0% /\n"


class Checkout:
    """The scripts for real, but their Python and tools only write down how they are called.

    A stand-in leaves behind what the script looks for afterwards: an environment, a corpus, a model folder. Files of
    rows that a command names are there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "checkout"
        self._programs = folder / "programs"
        self._calls = folder / "calls"
        for name in ("scripts", "requirements"):
            shutil.copytree(ROOT / name, self.folder / name)
        scripts = (path for folder in ("", "example/**/", "search_r1/**/") for path in ROOT.glob(f"{folder}*.sh"))
        for path in (ROOT / "setup.py", ROOT / "example" / "questions.jsonl", *scripts):
            target = self.folder / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
        self._programs.mkdir()
        programs = {"python3": STAND_IN, "python3.11": STAND_IN, "ray": STAND_IN, "df": DF}
        programs |= {"wait_for_server": WAIT_FOR_SERVER}
        for name, text in (programs | {"nvidia-smi": NVIDIA_SMI, "gcc": STAND_IN, "Python.h": ""}).items():
            (self._programs / name).write_text(text)
            (self._programs / name).chmod(0o755)

    def rehearse(self, command: Command) -> list[Command]:
        """Run a script to its end; the calls it made, in order."""
        self._calls.write_bytes(b"")
        self._calls.with_suffix(".answered").unlink(missing_ok=True)
        for name in (word for word in command.words if word.endswith(".jsonl")):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text('{"id": "river", "contents": "\\"Ildra\\"\\nThe Ildra is a river."}\n')
        paths = os.pathsep.join([str(self._programs), os.environ["PATH"]])
        of_a_user = {"HOME": str(self.folder), "RAY_AUTH_TOKEN": "secret"}
        variables = {"PATH": paths, "CALLS": str(self._calls)} | of_a_user | command.variables
        done = subprocess.run(
            command.words, cwd=self.folder, env=variables, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{command.line} ended with {done.returncode}: {done.stdout}{done.stderr}"
        return list(self._read_calls(command.where))

    def _read_calls(self, where: str) -> Iterator[Command]:
        fields = iter(self._calls.read_text().split("\0")[:-1])
        for count in fields:
            yield Command(where, tuple(next(fields) for _ in range(int(count) + 1)))
