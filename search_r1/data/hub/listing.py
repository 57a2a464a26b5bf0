"""The files of a repository with their sizes and checksums, as the hub lists them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch

from httpx2 import HTTPError
from huggingface_hub import HfApi, hf_hub_url
from huggingface_hub.errors import RepositoryNotFoundError

from search_r1.data.hub.artifacts import Artifact
from verl.errors import DataError, VerlError


class HubUnavailable(VerlError):
    """The hub could not be reached, or the connection broke."""


@dataclass(frozen=True)
class RemoteFile:
    path: str
    url: str
    size: int
    """Bytes."""
    sha256: str | None
    """Known for files in large file storage; else `blob_id` (git's SHA-1 of the content) is there."""
    blob_id: str | None

    @property
    def digest(self) -> str:
        return self.sha256 or self.blob_id or ""


def list_files(artifact: Artifact) -> tuple[str, list[RemoteFile]]:
    """(revision, files of the artifact by name).

    Raises `HubUnavailable`, or `DataError` if there is no such repository or one of its files is missing.
    """
    # What the hub has in its main version; its name goes into the addresses, so that no later version is mixed in.
    try:
        info = HfApi().dataset_info(artifact.repo, files_metadata=True)
    except RepositoryNotFoundError as error:
        raise DataError(
            f"the hub has no dataset repository {artifact.repo} that can be read without a login"
        ) from error
    except (HTTPError, OSError) as error:
        raise HubUnavailable(f"{artifact.repo} could not be listed: {first_line(error)}") from error
    revision = info.sha or "main"
    found = [
        RemoteFile(
            sibling.rfilename,
            hf_hub_url(artifact.repo, sibling.rfilename, repo_type="dataset", revision=revision),
            sibling.size or 0,
            sibling.lfs.sha256 if sibling.lfs else None,
            sibling.blob_id,
        )
        for sibling in info.siblings or []
        if any(fnmatch(sibling.rfilename, pattern) for pattern in artifact.patterns)
    ]
    # Without the files that are needed, it is another repository.
    missing = unmatched(artifact.needed, [file.path for file in found])
    if missing:
        raise DataError(f"the repository {artifact.repo} has no {', '.join(missing)}; give the right one by --repo_id")
    return revision, sorted(found, key=lambda file: file.path)


def unmatched(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """The patterns that match none of the names."""
    names = list(names)
    return [pattern for pattern in patterns if not any(fnmatch(name, pattern) for name in names)]


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
