"""The question-answer sets: their splits, which one a test takes, and the names of their original files."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field

from verl.errors import DataError

FLASHRAG_REPO = "RUC-NLPIR/FlashRAG_datasets"


@dataclass(frozen=True)
class QaSet:
    """A set under its name in the FlashRAG collection, which is also its `data_source`."""

    name: str
    splits: tuple[str, ...]
    """Of `train`, `dev` and `test`, those that FlashRAG has."""
    originals: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By split: patterns of the file names under which the set's authors publish it."""

    def source_split(self, wanted: str) -> str:
        """The split to read for `train` or `test`: a test takes `test`, else `dev`, else `train`.

        Decided by what is published, not by which files are there: a forgotten file is an error, not another test set.
        Raises `DataError` when there is no training split.
        """
        candidates = ("train",) if wanted == "train" else ("test", "dev", "train")
        for split in candidates:
            if split in self.splits:
                return split
        raise DataError(f"{self.name} has no {wanted} split, only {', '.join(self.splits)}")


SETS = {
    found.name: found
    for found in (
        # The test questions of NQ and TriviaQA are what their authors call dev.
        QaSet("nq", ("train", "dev", "test"), {"train": ("NQ-open.train.jsonl",), "test": ("NQ-open.dev.jsonl",)}),
        QaSet(
            "triviaqa",
            ("train", "dev", "test"),
            {"train": ("unfiltered-web-train.json",), "test": ("unfiltered-web-dev.json",)},
        ),
        QaSet("popqa", ("test",), {"test": ("popQA.tsv",)}),
        QaSet(
            "hotpotqa",
            ("train", "dev"),
            {
                "train": ("hotpot_train_v1*.json",),
                "dev": ("hotpot_dev_fullwiki_v1.json", "hotpot_dev_distractor_v1.json"),
            },
        ),
        QaSet("2wikimultihopqa", ("train", "dev")),
        QaSet(
            "musique",
            ("train", "dev"),
            {"train": ("musique_ans_v1.0_train.jsonl",), "dev": ("musique_ans_v1.0_dev.jsonl",)},
        ),
        QaSet("bamboogle", ("test",), {"test": ("Bamboogle*.csv",)}),
        QaSet("strategyqa", ("train",), {"train": ("strategyqa_train.json",)}),
    )
}


def qa_set(name: str) -> QaSet:
    """Raises `DataError` for an unknown name."""
    if name not in SETS:
        near = difflib.get_close_matches(name.lower(), SETS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise DataError(f"there is no set {name!r}, only {', '.join(SETS)}{hint}")
    return SETS[name]


def qa_sets(names: str) -> list[QaSet]:
    """Those of a list with commas, in its order. Raises `DataError` for an unknown or repeated name, or none."""
    words = [word.strip() for word in names.split(",") if word.strip()]
    if not words or len(set(words)) != len(words):
        raise DataError(
            f"--data_sources {names!r} has to name some of {', '.join(SETS)}, each once, with commas between"
        )
    return [qa_set(word) for word in words]
