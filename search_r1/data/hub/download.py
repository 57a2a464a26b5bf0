"""Download an artifact, verify it, and make the files that are used from it; complete files are kept."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from httpx2 import HTTPError
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers

from program_end import exit_status
from search_r1.data.hub.artifacts import (
    ARTIFACTS,
    Artifact,
    HubUnavailable,
    RemoteFile,
    artifacts,
    first_line,
    list_files,
    unmatched,
)
from search_r1.data.hub.making import ChecksumFile, is_joined, is_whole, join, require_disk, sha256_of, unpack
from search_r1.data.qa.hub_bar import HubBar
from search_r1.search.manifest import takes_lock
from verl.errors import DataError, translated
from verl.process.storage import writing

_UNPACKED_TIMES = 4  # how much larger than packed a corpus is taken to be


class Downloader:
    """Stores everything under `folder`, with the checksums in `checksums.json`."""

    def __init__(self, folder: Path, remove_parts: bool = False) -> None:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._remove_parts = folder, remove_parts
        self._record = ChecksumFile(folder)

    def get(self, artifact: Artifact) -> None:
        """Download and verify an artifact, and make the file that is used from it.

        Raises `HubUnavailable`, which says what to put where, `DataError` for wrong files or too little disk, and
        `StorageError` if a file cannot be written.
        """
        try:
            revision, remote = list_files(artifact)
        except HubUnavailable as error:
            # Without the hub, what was placed by hand has to do.
            self._make(artifact, self._placed(artifact, error))
            return
        if self._is_made(artifact, remote):
            print(f"{self._product(artifact)}: whole")
            return
        self._require_disk(artifact, remote)
        for file in remote:
            self._get_file(artifact, file, revision)
        self._make(artifact, [self._path(artifact, file.path) for file in remote])

    def _get_file(self, artifact: Artifact, file: RemoteFile, revision: str) -> None:
        path = self._path(artifact, file.path)
        if is_whole(path, file):
            print(f"{path}: whole")
        else:
            if path.exists():
                print(f"{path}: is not what the hub has, and is fetched again")
            with translated(HubUnavailable, lambda error: HubUnavailable(f"{error}; the same command resumes there")):
                fetch(file, path)
            print(f"{path}: fetched")
        self._note(path, {"repo": artifact.repo, "revision": revision, "checked_against_hub": True}, file.sha256)

    def _make(self, artifact: Artifact, paths: Sequence[Path]) -> None:
        product = self._product(artifact)
        if product is None or not paths:
            return
        sha256 = join(paths, product) if artifact.joined else unpack(paths[0], product)
        sources = {self._name(path): self._record.get(self._name(path))["sha256"] for path in paths}
        self._note(product, {"made_from": sources}, sha256)
        print(f"{product}: made from {', '.join(path.name for path in paths)}")
        if self._remove_parts:
            for path in paths:
                path.unlink()

    def _is_made(self, artifact: Artifact, remote: Sequence[RemoteFile]) -> bool:
        """Whether the product is there and comes from what the hub has."""
        product = self._product(artifact)
        if product is None or not product.is_file():
            return False
        if artifact.joined:
            return is_joined(product, remote)
        entry = self._record.get(self._name(product))
        made_from = {self._name(self._path(artifact, file.path)): file.sha256 for file in remote}
        return entry.get("made_from") == made_from and entry.get("sha256") == sha256_of(product)

    def _placed(self, artifact: Artifact, error: HubUnavailable) -> list[Path]:
        """The files that were placed by hand, [] when what they make is whole. Raises `HubUnavailable`."""
        # What was made is enough: its parts may have been removed since (--remove_parts).
        product = self._product(artifact)
        entry = self._record.get(self._name(product)) if product else {}
        if product and product.is_file() and entry.get("sha256") == sha256_of(product):
            print(f"{product}: whole, as recorded (the hub was not asked: {error})")
            return []
        folder = self._folder / artifact.folder
        paths = sorted({path for pattern in artifact.patterns for path in folder.glob(pattern) if path.is_file()})
        missing = unmatched(artifact.needed, [path.relative_to(folder).as_posix() for path in paths])
        if missing:
            raise HubUnavailable(f"{error}\n{self._instructions(artifact, missing)}") from error
        for path in paths:
            self._check_placed(path)
        return paths

    def _check_placed(self, path: Path) -> None:
        entry, found = self._record.get(self._name(path)), sha256_of(path)
        if entry.get("sha256", found) != found:
            raise DataError(f"{path} is not the file of {self._folder / 'checksums.json'}; place it anew")
        if not entry:
            self._note(path, {"checked_against_hub": False}, found)
        print(f"{path}: there{'' if entry.get('checked_against_hub') else ', not checked against the hub'}")

    def _instructions(self, artifact: Artifact, missing: Sequence[str]) -> str:
        folder = (self._folder / artifact.folder).resolve()
        url = f"https://huggingface.co/datasets/{artifact.repo}"
        lines = ["Without a network, fetch elsewhere and place:"]
        lines += [f"  {folder / name}  from  {url}/resolve/main/{name}" for name in missing if "*" not in name]
        lines += [f"  {folder / name}: all such files of {url}" for name in artifact.patterns if "*" in name]
        return "\n".join([*lines, "Then run the same command again."])

    def _require_disk(self, artifact: Artifact, remote: Sequence[RemoteFile]) -> None:
        size = sum(file.size for file in remote)
        missing = 0
        for file in remote:
            path = self._path(artifact, file.path)
            there = path if path.exists() else partial_file(file, path)
            missing += max(0, file.size - (there.stat().st_size if there.exists() else 0))
        made = size if artifact.joined else _UNPACKED_TIMES * size if artifact.unpacked else 0
        require_disk(self._folder, missing + made, f"{artifact.name} ({artifact.repo})")

    def _note(self, path: Path, more: dict[str, Any], sha256: str | None = None) -> None:
        entry = {"sha256": sha256 or sha256_of(path), "bytes": path.stat().st_size} | more
        self._record.set(self._name(path), entry)

    def _product(self, artifact: Artifact) -> Path | None:
        name = artifact.joined or artifact.unpacked
        return self._folder / name if name else None

    def _path(self, artifact: Artifact, name: str) -> Path:
        return self._folder / artifact.folder / name

    def _name(self, path: Path) -> str:
        return path.relative_to(self._folder).as_posix()


# Download one file from the hub, resuming an earlier attempt.


def fetch(remote: RemoteFile, target: Path) -> None:
    """Download to `target`, which appears only once it is complete.

    Received bytes stay in a hidden file next to it, even if this process is killed (`hf_hub_download` would start
    over). Raises `HubUnavailable` when the connection breaks, `DataError` when the checksum is wrong or another process
    is fetching the file, `StorageError` if it cannot be written.
    """
    partial = partial_file(remote, target)
    with _appending(partial, target) as file:
        # Continue where an earlier attempt stopped; a file that is too long cannot be its beginning.
        if file.tell() > remote.size:
            file.truncate(0)
        try:
            http_get(
                remote.url,
                file,
                resume_size=file.seek(0, 2),
                headers=build_hf_headers(),
                expected_size=remote.size,
                displayed_filename=remote.path,
                tqdm_class=cast(Any, HubBar),
            )
            file.flush()
        except (HTTPError, OSError) as error:
            arrived = os.fstat(file.fileno()).st_size
            raise HubUnavailable(
                f"{remote.url} stopped at {arrived} of {remote.size} bytes ({first_line(error)})"
            ) from error

        # A wrong file is removed, or every further attempt would end with it.
        if not is_whole(partial, remote):
            partial.unlink(missing_ok=True)
            raise DataError(
                f"{remote.url}: what arrived has not the checksum that the hub gives; run the command again"
            )
        partial.replace(target)


@contextmanager
def _appending(partial: Path, target: Path) -> Iterator[BinaryIO]:
    """The file of the bytes received so far, for this process alone: those of two would be mixed in it."""
    with writing(target):
        partial.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("ab") as file:
            if not takes_lock(file, partial):
                raise DataError(f"{target} is being fetched by another process; run the command again when it is done")
            yield file


def partial_file(remote: RemoteFile, target: Path) -> Path:
    """The hidden file of the bytes received so far, with the checksum in its name: another version starts anew."""
    return target.with_name(f".{target.name}.{remote.digest[:12]}.part")


# The program scripts/download.py.


def main(description: str | None, arguments: Sequence[str] | None = None) -> int:
    """Download what the arguments name. Returns the exit status, as `exit_status` says.

    A missing artifact does not stop the others.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--save_path", type=Path, required=True, help="folder for all downloads")
    add("--what", default="corpus,e5", help=f"what to download: any of {','.join(ARTIFACTS)} (default: %(default)s)")
    add("--repo_id", help="dataset repository of the flat e5 index, if not Search-R1's")
    add(
        "--remove_parts",
        action="store_true",
        help="delete the downloaded parts once the file made from them is complete",
    )
    args = parser.parse_args(arguments)

    def download() -> None:
        chosen, downloader = artifacts(args.what, args.repo_id), Downloader(args.save_path, args.remove_parts)
        missing = [error for one in chosen if (error := _get(downloader, one)) is not None]
        if missing:
            raise HubUnavailable("\nerror: ".join(map(str, missing)))

    return exit_status(download, "the same command resumes")


def _get(downloader: Downloader, artifact: Artifact) -> HubUnavailable | None:
    try:
        downloader.get(artifact)
    except HubUnavailable as error:
        return error
    return None
