"""A copy of what was written on HDFS, by the client that Hadoop installs."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from verl.errors import ConfigError


def hdfs_client() -> str:
    """Raises `ConfigError` when there is none."""
    client = shutil.which("hdfs")
    if client is None:
        raise ConfigError("--hdfs_dir needs the program hdfs of Hadoop on the PATH; without it leave --hdfs_dir out")
    return client


def copy_to_hdfs(client: str, files: Sequence[Path], folder: str) -> None:
    """Replaces files of the same names. Raises `ConfigError` with what the client says."""
    for words in (["-mkdir", "-p", folder], ["-put", "-f", *map(str, files), folder]):
        done = subprocess.run([client, "dfs", *words], capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigError(f"hdfs dfs {words[0]} to {folder} failed: {done.stderr.strip()}")
