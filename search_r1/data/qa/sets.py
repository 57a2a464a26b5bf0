"""The question-answer sets known by name: their splits, and the names of their original files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

FLASHRAG_REPO = "RUC-NLPIR/FlashRAG_datasets"


@dataclass(frozen=True)
class QaSet:
    """A set, with its name in the FlashRAG collection, which is also its `data_source`."""

    name: str
    splits: tuple[str, ...]
    """The splits among `train`, `dev` and `test` that FlashRAG has."""
    originals: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By split: patterns of the file names under which the set's authors publish it."""


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
