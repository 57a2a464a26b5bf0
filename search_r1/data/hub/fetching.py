"""Download one file from the hub, resuming an earlier attempt."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from httpx2 import HTTPError
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers

from search_r1.data.hub.checksums import is_whole
from search_r1.data.hub.listing import HubUnavailable, RemoteFile, first_line
from search_r1.data.qa.hub_bar import HubBar
from verl.errors import DataError


def fetch(remote: RemoteFile, target: Path) -> None:
    """Download to `target`, which appears only once it is complete.

    Received bytes stay in a hidden file next to it, even if this process is killed (`hf_hub_download` would start
    over). Raises `HubUnavailable` when the connection breaks, `DataError` when the checksum is wrong.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_file(remote, target)
    try:
        with partial.open("ab") as file:
            if file.tell() > remote.size:
                file.truncate(0)
            http_get(
                remote.url,
                file,
                resume_size=file.seek(0, 2),
                headers=build_hf_headers(),
                expected_size=remote.size,
                displayed_filename=remote.path,
                tqdm_class=cast(Any, HubBar),
            )
    except (HTTPError, OSError) as error:
        arrived = partial.stat().st_size if partial.exists() else 0
        raise HubUnavailable(
            f"{remote.url} stopped at {arrived} of {remote.size} bytes ({first_line(error)}); "
            "the same command resumes there"
        ) from error
    if not is_whole(partial, remote):
        partial.unlink()
        raise DataError(f"{remote.url}: what arrived has not the checksum that the hub gives; run the command again")
    partial.replace(target)


def partial_file(remote: RemoteFile, target: Path) -> Path:
    """The file's checksum is in the name, so that another version of the file does not resume from it."""
    return target.with_name(f".{target.name}.{remote.digest[:12]}.part")
