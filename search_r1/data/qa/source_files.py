"""Where the file of a split comes from: a local folder, or the FlashRAG collection on the hub."""

from __future__ import annotations

from pathlib import Path

from search_r1.data.qa.sets import FLASHRAG_REPO, QaSet
from verl.errors import DataError

_SUFFIXES = (".jsonl", ".json", ".tsv", ".csv")


def source_file(qa_set: QaSet, split: str, input_dir: Path | None) -> Path:
    """`<input_dir>/<set>/<split>.jsonl` or the original file beside it (each also as .gz); without a folder, the hub's.

    Raises `DataError` that says which file to place where.
    """
    return _from_hub(qa_set, split) if input_dir is None else _from_folder(qa_set, split, input_dir)


def _from_folder(qa_set: QaSet, split: str, input_dir: Path) -> Path:
    folder = input_dir / qa_set.name
    originals = qa_set.originals.get(split, ())
    for name in (*(f"{split}{suffix}" for suffix in _SUFFIXES), *originals):
        found = sorted(path for end in ("", ".gz") for path in folder.glob(f"{name}{end}"))
        if found:
            return found[0]
    or_original = f", or the original {' or '.join(originals)}" if originals else ""
    raise DataError(
        f"{folder}: the {split} split is not there; place {split}.jsonl in this folder "
        f"({_url(qa_set, split)}){or_original}"
    )


def _from_hub(qa_set: QaSet, split: str) -> Path:
    # slow to import, and not needed with a folder
    from httpx2 import HTTPError
    from huggingface_hub import hf_hub_download

    name = f"{qa_set.name}/{split}.jsonl"
    try:
        return Path(hf_hub_download(FLASHRAG_REPO, name, repo_type="dataset"))
    except (OSError, HTTPError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(
            f"{name} of {FLASHRAG_REPO} could not be fetched ({reason}); without a network, fetch "
            f"{_url(qa_set, split)} elsewhere, place it as DIR/{name} and pass --input_dir DIR"
        ) from error


def _url(qa_set: QaSet, split: str) -> str:
    return f"https://huggingface.co/datasets/{FLASHRAG_REPO}/resolve/main/{qa_set.name}/{split}.jsonl"
