"""No code of ours runs what it reads: no pickle, eval or exec, no unsafe loading, no code that comes with a model."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [
    *sorted((ROOT / "verl").rglob("*.py")),
    *sorted((ROOT / "search_r1").rglob("*.py")),
    ROOT / "infer.py",
    ROOT / "long_task.py",
    ROOT / "program_end.py",
    ROOT / "text_file.py",
    ROOT / "url_text.py",
]

UNSAFE_MODULES = frozenset({"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"})
UNSAFE_NAMES = frozenset({"eval", "exec", "compile", "__import__"})
UNSAFE_CALLS = frozenset(
    {"yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "os.system", "os.popen", "pandas.read_pickle"}
)

# `trust_remote_code=...` may only hand on the setting of that name.
TRUST_SETTING = re.compile(r"([\w.]+\.)?trust_remote_code")

ALLOWED = {
    ("verl/weight_sync/ipc.py", "import pickle"): "CUDA memory handles that the trainer of this very run wrote",
    ("verl/weight_sync/ipc.py", "pickle.loads"): "the same: they come through Ray from the trainer's worker",
}
# Not seen here, because PyTorch does it: torch.distributed.checkpoint unpickles the `.metadata` of a saved state. It is
# read only from a folder whose manifest verifies; SECURITY.md says that such a folder must be one you trust.


def findings(source: str) -> Iterator[str]:
    """What is unsafe in a module, in a few words each."""
    names: dict[str, str] = {}  # local name -> what it stands for
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
                if top in UNSAFE_MODULES:
                    yield f"import {alias.name}"
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            if node.module.partition(".")[0] in UNSAFE_MODULES:
                yield f"import {node.module}"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            yield from _of_call(node, names)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield from _of_option(key.value, value)


def _of_call(call: ast.Call, names: dict[str, str]) -> Iterator[str]:
    first, dot, rest = ast.unparse(call.func).partition(".")
    called = names.get(first, first) + dot + rest
    options = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    if called in UNSAFE_NAMES | UNSAFE_CALLS or called.partition(".")[0] in UNSAFE_MODULES:
        yield called
    elif called == "torch.load" and "weights_only" not in options:
        yield "torch.load without weights_only=True"
    elif called == "numpy.load" and "allow_pickle" in options:
        yield "numpy.load with allow_pickle"
    for name, value in options.items():
        yield from _of_option(name, value)


def _of_option(name: str, value: ast.expr) -> Iterator[str]:
    text = ast.unparse(value)
    if name == "trust_remote_code" and text != "False" and not TRUST_SETTING.fullmatch(text):
        yield f"trust_remote_code={text}"
    elif name == "weights_only" and text != "True":
        yield f"weights_only={text}"
    elif name == "shell" and text != "False":
        yield f"shell={text}"


def test_nothing_unsafe_is_called_but_what_is_listed_with_a_reason() -> None:
    found = {(str(path.relative_to(ROOT)), what) for path in SOURCES for what in findings(path.read_text())}
    assert len(SOURCES) > 200
    assert found == set(ALLOWED), "left: unsafe and not listed, or listed and gone"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", ["import pickle"]),
        ("from pickle import loads as read\nread(x)", ["import pickle", "pickle.loads"]),
        ("import torch\ntorch.load(f)", ["torch.load without weights_only=True"]),
        ("from torch import load\nload(f, weights_only=False)", ["weights_only=False"]),
        ("import torch as t\nt.load(f, weights_only=True)", []),
        ("import yaml\nyaml.load(f)", ["yaml.load"]),
        ("import yaml\nyaml.safe_load(f)", []),
        ("eval(x)", ["eval"]),
        ("model.eval()", []),
        ("exec(x)", ["exec"]),
        ("re.compile(x)", []),
        ("f(x, trust_remote_code=True)", ["trust_remote_code=True"]),
        ("f(x, trust_remote_code=not trust_remote_code)", ["trust_remote_code=not trust_remote_code"]),
        ("f(x, trust_remote_code=config.actor.model.trust_remote_code)", []),
        ("options = {'trust_remote_code': True}", ["trust_remote_code=True"]),
        ("subprocess.run(x, shell=True)", ["shell=True"]),
        ("import numpy as np\nnp.load(f, allow_pickle=True)", ["numpy.load with allow_pickle"]),
    ],
)
def test_what_counts_as_unsafe(source: str, found: list[str]) -> None:
    assert sorted(findings(source)) == sorted(found)


def test_remote_code_is_off_unless_asked_for() -> None:
    from verl.config import load_config
    from verl.config.loading.run import load_sft_config

    assert load_config("ppo_trainer").actor_rollout_ref.model.trust_remote_code is False
    assert load_sft_config("sft").model.trust_remote_code is False
