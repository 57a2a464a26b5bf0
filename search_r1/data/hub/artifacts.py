"""What can be downloaded: repositories on the hub, their files with sizes and checksums as the hub lists them, and what
is made from them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatch

from httpx2 import HTTPError
from huggingface_hub import HfApi, hf_hub_url
from huggingface_hub.errors import RepositoryNotFoundError

from search_r1.data.qa.source_files import FLASHRAG_REPO, SETS
from verl.errors import ConfigError, DataError, VerlError


@dataclass(frozen=True)
class Artifact:
    """Files of one repository. Paths are relative to the folder into which everything is saved."""

    name: str
    repo: str
    patterns: tuple[str, ...]
    """The files of the repository that belong to it (fnmatch)."""
    needed: tuple[str, ...]
    """Patterns that each need a matching file on disk if the hub cannot be reached."""
    folder: str = ""
    joined: str | None = None
    """The file made by concatenating its files."""
    unpacked: str | None = None
    """The file made by decompressing its only file."""
    repo_type: str = "dataset"
    """What kind of repository it is: dataset or model."""


_CORPUS = ("wiki-18.jsonl.gz",), ("wiki-18.jsonl.gz",)
_PARTS = ("part_*",), ("part_aa", "part_ab")
_QUESTIONS = tuple(f"{found.name}/{split}.jsonl" for found in SETS.values() for split in found.splits)
_PROMPTS = ("train.parquet", "test.parquet")
_HOTPOTQA = ("train-00000-of-00002", "train-00001-of-00002", "validation-00000-of-00001")
_HOTPOTQA_FILES = tuple(f"distractor/{name}.parquet" for name in _HOTPOTQA)
_2WIKI_FILES = ("train.parquet", "dev.parquet")

ARTIFACTS = {
    "corpus": [
        Artifact(
            "corpus",
            "PeterJinGo/wiki-18-corpus",
            *_CORPUS,
            unpacked="wiki-18.jsonl",
        )
    ],
    "e5": [Artifact("e5", "PeterJinGo/wiki-18-e5-index", *_PARTS, joined="e5_Flat.index")],
    # its parts have the same names as those of e5
    "hnsw": [
        Artifact(
            "hnsw", "PeterJinGo/wiki-18-e5-index-HNSW64", *_PARTS, folder="e5_HNSW64_parts", joined="e5_HNSW64.index"
        )
    ],
    "bm25": [Artifact("bm25", "PeterJinGo/wiki-18-bm25-index", ("bm25/*",), ("bm25/segments_*",))],
    "qa": [
        Artifact("qa", FLASHRAG_REPO, _QUESTIONS, _QUESTIONS, folder="qa"),
        Artifact("qa", "PeterJinGo/nq_hotpotqa_train", _PROMPTS, _PROMPTS, folder="nq_hotpotqa_train"),
    ],
    "contexts": [
        Artifact("contexts", "hotpotqa/hotpot_qa", _HOTPOTQA_FILES, _HOTPOTQA_FILES, folder="hotpot_qa"),
        Artifact("contexts", "xanhho/2WikiMultihopQA", _2WIKI_FILES, _2WIKI_FILES, folder="2wikimultihopqa"),
    ],
}


def artifacts(what: str, e5_repo: str | None = None) -> list[Artifact]:
    """The artifacts in a comma-separated list of names; `e5_repo` replaces the repository of the flat index.

    Raises `ConfigError` for an unknown name.
    """
    names = [name.strip() for name in what.split(",") if name.strip()]
    unknown = [name for name in names if name not in ARTIFACTS]
    if unknown or not names:
        raise ConfigError(f"--what {what!r} has to name some of {','.join(ARTIFACTS)}, with commas between")
    chosen = [artifact for name in dict.fromkeys(names) for artifact in ARTIFACTS[name]]
    return [replace(one, repo=e5_repo) if e5_repo and one.name == "e5" else one for one in chosen]


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
    hub = HfApi()
    ask = hub.model_info if artifact.repo_type == "model" else hub.dataset_info
    try:
        info = ask(artifact.repo, files_metadata=True)
    except RepositoryNotFoundError as error:
        raise DataError(
            f"the hub has no {artifact.repo_type} repository {artifact.repo} that can be read without a login"
        ) from error
    except (HTTPError, OSError) as error:
        raise HubUnavailable(f"{artifact.repo} could not be listed: {first_line(error)}") from error
    revision = info.sha or "main"
    found = [
        RemoteFile(
            sibling.rfilename,
            hf_hub_url(artifact.repo, sibling.rfilename, repo_type=artifact.repo_type, revision=revision),
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
        advice = "; give the right one by --repo_id" if artifact.repo_type == "dataset" else ""
        raise DataError(f"the repository {artifact.repo} has no {', '.join(missing)}{advice}")
    return revision, sorted(found, key=lambda file: file.path)


def unmatched(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """The patterns that match none of the names."""
    names = list(names)
    return [pattern for pattern in patterns if not any(fnmatch(name, pattern) for name in names)]


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
