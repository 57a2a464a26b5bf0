"""The public veRL and TRL, called in a process of their own: their `verl` and this project's cannot share one.

A call is plain data: the function as "module:name", its arguments (values, or other calls that are made first) and,
where wanted, the argument to differentiate with respect to. All calls go to one process in one file, and the answers
come back in another. The libraries lie outside the repository and the environment, in a folder named after the pins.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Two libraries, and what importing them takes beyond this project's own environment.
PINS = (
    "verl==0.9.1",
    "codetiming==1.4.0",
    "orjson==3.13.0",
    "pyvers==0.2.3",
    "tensordict==0.15.3",
    "trl==1.16.0",
    "accelerate==1.15.0",
    "datasets==5.2.0",
    "dill==0.4.1",
    "multiprocess==0.70.19",
    "pandas==3.1.1",
)
PIP_OPTIONS = ("--quiet", "--no-input", "--no-deps", "--only-binary=:all:", "--retries=1", "--timeout=10")
PIP_SECONDS = 180
CANNOT_IMPORT = 3


class Unavailable(Exception):
    """The public implementations cannot be installed or imported here; says why."""


@dataclass(frozen=True)
class Call:
    """`function` is "module:name"; `gradient` names the argument that the sum of the first result is derived by."""

    function: str
    given: dict[str, Any]
    gradient: str | None = None
    positional: bool = False


class Answer(NamedTuple):
    """What the function returned (always as a tuple), and the gradient that was asked for."""

    values: tuple[Any, ...]
    gradient: Tensor | None


@dataclass(frozen=True)
class Layout:
    """Where tokens lie: padded [B, L] as veRL has them, and flat [T], all rows one after the other, as this project.

    `valid_BL` bool marks tokens (the rest is padding), `mask_BL` bool those of the policy, `group_B` int64 the groups.
    """

    valid_BL: Tensor
    mask_BL: Tensor
    group_B: Tensor

    def flat(self, value_BL: Tensor) -> Tensor:
        """[T] from [B, L]: padding taken out."""
        return value_BL[self.valid_BL]

    def policy(self, value_BL: Tensor) -> Tensor:
        """[N] from [B, L]: policy tokens only."""
        return value_BL[self.mask_BL]

    @property
    def mask_T(self) -> Tensor:
        return self.flat(self.mask_BL)

    @property
    def row_T(self) -> Tensor:
        return self.flat(torch.arange(len(self.group_B))[:, None].expand_as(self.valid_BL))


def public_answers(calls: dict[str, Call], folder: Path) -> dict[str, Answer]:
    """Make all calls in one process; `folder` holds the two files. Raises Unavailable; RuntimeError if a call fails."""
    libraries = _installed()
    asked, answered = folder / "calls.pt", folder / "answers.pt"
    torch.save({name: asdict(call) for name, call in calls.items()}, asked)
    environment = os.environ | {"PYTHONPATH": str(libraries), "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    command = [sys.executable, __file__, str(libraries), str(asked), str(answered)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode == CANNOT_IMPORT:
        raise Unavailable(done.stderr.strip().splitlines()[-1])
    if done.returncode:
        raise RuntimeError(f"the public implementations failed:\n{done.stderr}")
    return {name: Answer(tuple(values), gradient) for name, (values, gradient) in torch.load(answered).items()}


def _installed() -> Path:
    """The folder with the libraries; installs them there first where it is missing."""
    key = hashlib.sha256(" ".join([sys.version, *PINS]).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "verl-public-reference"
    folder = cache / f"{PINS[0]}-{key}"
    if not folder.is_dir():
        try:
            cache.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Unavailable(f"there is no place for {PINS[0]} and what it needs: {error}") from None
        # Installed elsewhere and moved, so that a folder of that name is always complete.
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            _install(Path(scratch) / "libraries")
            if not folder.is_dir():
                (Path(scratch) / "libraries").rename(folder)
    return folder


def _install(target: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", *PIP_OPTIONS, "--target", str(target), *PINS]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_SECONDS)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"pip did not install {PINS[0]} and what it needs within {PIP_SECONDS} s") from None
    if done.returncode:
        message = (done.stderr.strip() or "no message").splitlines()[-1]
        raise Unavailable(f"pip could not install {PINS[0]} and what it needs: {message}")


def _answer_all(libraries: Path, asked: Path, answered: Path) -> None:
    torch.save({name: _answer(call, libraries) for name, call in torch.load(asked).items()}, answered)


def _answer(call: dict[str, Any], libraries: Path) -> tuple[list[Any], Tensor | None]:
    by = call["gradient"]
    if by is not None:
        call["given"][by].requires_grad_()
    result = _made(call, libraries)
    values = list(result) if isinstance(result, tuple) else [result]
    gradient = torch.autograd.grad(values[0].sum(), call["given"][by])[0] if by is not None else None
    return [value.detach() if isinstance(value, Tensor) else value for value in values], gradient


def _made(value: Any, libraries: Path) -> Any:
    """`value` itself, or what the call returns that it describes."""
    if not (isinstance(value, dict) and "function" in value):
        return value
    given = {name: _made(argument, libraries) for name, argument in value["given"].items()}
    function = _found(value["function"], libraries)
    return function(*given.values()) if value["positional"] else function(**given)


def _found(function: str, libraries: Path) -> Any:
    module_name, name = function.split(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        print(f"{module_name} in {libraries} cannot be imported: {error}", file=sys.stderr)
        sys.exit(CANNOT_IMPORT)
    if not Path(str(module.__file__)).is_relative_to(libraries):
        raise RuntimeError(f"{module_name} was taken from {module.__file__}, not from {libraries}")
    return attrgetter(name)(module)


if __name__ == "__main__":
    _answer_all(*map(Path, sys.argv[1:]))
