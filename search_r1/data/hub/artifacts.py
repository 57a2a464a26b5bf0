"""What can be downloaded: repositories on the hub, their files, and what is made from them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from search_r1.data.qa.source_files import FLASHRAG_REPO, SETS
from verl.errors import ConfigError


@dataclass(frozen=True)
class Artifact:
    """Files of one dataset repository. Paths are relative to the folder into which everything is saved."""

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


_CORPUS = ("wiki-18.jsonl.gz",), ("wiki-18.jsonl.gz",)
_PARTS = ("part_*",), ("part_aa", "part_ab")
_QUESTIONS = tuple(f"{found.name}/{split}.jsonl" for found in SETS.values() for split in found.splits)
_PROMPTS = ("train.parquet", "test.parquet")

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
