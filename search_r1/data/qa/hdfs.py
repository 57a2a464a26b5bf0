"""Copy the written files to HDFS with Hadoop's command-line client."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from verl.errors import ConfigError


def hdfs_client() -> str:
    """The path of the client. Raises `ConfigError` if there is none."""
    client = shutil.which("hdfs")
    if client is None:
        raise ConfigError("--hdfs_dir needs the program hdfs of Hadoop on the PATH; without it leave --hdfs_dir out")
    return client


def copy_to_hdfs(client: str, files: Sequence[Path], folder: str) -> None:
    """Copy `files` to `folder`, replacing files of the same names. Raises `ConfigError` with the client's message."""
    for words in (["-mkdir", "-p", folder], ["-put", "-f", *map(str, files), folder]):
        done = subprocess.run([client, "dfs", *words], capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigError(f"hdfs dfs {words[0]} to {folder} failed: {done.stderr.strip()}")
