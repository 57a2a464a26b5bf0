"""Evaluations compared: numbers by hand, several seeds, and what cannot be compared."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from search_r1.evaluation.compare import compared, run
from search_r1.evaluation.statistics import permutation_p
from search_r1.evaluation.store import RECORDS, Record
from verl.errors import DataError


def evaluation(folder: Path, **answers: str) -> Path:
    """A folder with the results of sets, such as nq="110": right, right, wrong."""
    records = [
        Record(name, str(number), "Who?", ["x"], "x", "finished", None, True, {"em": float(right), "f1": None})
        for name, rights in answers.items()
        for number, right in enumerate(rights)
    ]
    folder.mkdir()
    (folder / RECORDS).write_text("".join(json.dumps(record.to_json()) + "\n" for record in records))
    return folder


def test_the_p_value_is_that_of_the_sign_test() -> None:
    """Five questions won and none lost: 2 of 2^5 signs are as far from 0. Four won and one lost: 12 of 32."""
    assert permutation_p(np.array([1.0, 1, 1, 1, 1, 0, 0])) == pytest.approx(2 / 32, abs=0.003)
    assert permutation_p(np.array([1.0, 1, 1, 1, -1])) == pytest.approx(12 / 32, abs=0.005)
    assert permutation_p(np.array([0.0, 0.0])) == 1


def test_pairs_by_hand(tmp_path: Path) -> None:
    before = [
        evaluation(tmp_path / "a0", nq="1000", hotpotqa="00"),
        evaluation(tmp_path / "a1", nq="0000", hotpotqa="00"),
    ]
    after = [
        evaluation(tmp_path / "b0", nq="1110", hotpotqa="00"),
        evaluation(tmp_path / "b1", nq="0110", hotpotqa="10"),
    ]
    rows = {(row["seed"], row["set"]): row for row in compared(before, after, "em")}
    assert {seed for seed, _ in rows} == {"0", "1", "all"}
    first, pooled = rows["0", "nq"], rows["all", "all"]
    assert (first["before"], first["after"], first["difference"]) == (0.25, 0.75, 0.5)
    assert first["p"] == pytest.approx(0.5, abs=0.01)  # two won: 2 of 4 signs
    # Over both seeds two questions of nq are won twice and one of hotpotqa once: 2.5 of 6 questions.
    assert pooled["difference"] == pytest.approx(2.5 / 6) and pooled["questions"] == 6
    assert pooled["p"] == pytest.approx(0.25, abs=0.01)  # not 2 / 2^5: a question's seeds change sides together
    assert pooled["low"] <= pooled["difference"] <= pooled["high"]


def test_sets_whose_names_share_what_is_before_a_slash_are_rows_of_their_own(tmp_path: Path) -> None:
    before = evaluation(tmp_path / "a", **{"org/easy": "11", "org/hard": "00"})
    after = evaluation(tmp_path / "b", **{"org/easy": "00", "org/hard": "11"})
    rows = {row["set"]: row["difference"] for row in compared([before], [after], "em")}
    assert rows == {"org/easy": -1, "org/hard": 1, "all": 0}


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    one, other = evaluation(tmp_path / "a", nq="10"), evaluation(tmp_path / "b", nq="100")
    with pytest.raises(DataError, match="do not have the same questions: nq/2 is in one of them"):
        compared([one], [other], "em")
    renamed = evaluation(tmp_path / "c", nq="10")
    records = (renamed / RECORDS).read_text().splitlines()
    changed = json.loads(records[1]) | {"golden_answers": ["y"]}
    (renamed / RECORDS).write_text(f"{records[0]}\n{json.dumps(changed)}\n")
    with pytest.raises(DataError, match=r"the same questions: the gold answers of nq/1 are \['x'\] and \['y'\]"):
        compared([one], [renamed], "em")
    with pytest.raises(DataError, match="1 evaluations cannot be paired with 2"):
        compared([one], [other, one], "em")
    with pytest.raises(DataError, match="question nq/0 has no f1; finish the evaluation first"):
        compared([one], [one], "f1")
    with pytest.raises(DataError, match="holds no records of an evaluation"):
        compared([tmp_path / "absent"], [one], "em")
    records = [replace(Record(**json.loads(line)), failure="retriever") for line in (one / RECORDS).open()]
    (one / RECORDS).write_text("".join(json.dumps(record.to_json()) + "\n" for record in records))
    with pytest.raises(DataError, match="question nq/0 has no em"):
        compared([one], [one], "em")


def test_verdicts_of_different_judges_are_not_compared(tmp_path: Path) -> None:
    strict = {"model": "strict", "url": "http://a/v1", "rubric": {"name": "correctness", "fingerprint": "1"}}
    folders = []
    for name, judge in (("a", strict), ("b", strict | {"url": "http://b/v1"}), ("c", strict | {"model": "lenient"})):
        folders.append(evaluation(tmp_path / name, nq="10"))
        records = [Record(**json.loads(line)) for line in (folders[-1] / RECORDS).open()]
        judged = (replace(record, metrics=record.metrics | {"judge": 1.0}) for record in records)
        (folders[-1] / RECORDS).write_text("".join(json.dumps(record.to_json()) + "\n" for record in judged))
        (folders[-1] / "settings.json").write_text(json.dumps({"judge": judge}))
    assert compared(folders[:1], folders[1:2], "judge")[0]["difference"] == 0
    with pytest.raises(DataError, match="c and .*a have verdicts of different judges: .*'lenient'"):
        compared(folders[:1], folders[2:], "judge")
    assert compared(folders[:1], folders[2:], "em")[0]["difference"] == 0


def test_the_command_prints_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [str(evaluation(tmp_path / name, nq=rights)) for name, rights in (("a", "1000"), ("b", "1100"))]
    monkeypatch.setattr(
        "sys.argv", ["compare", "--before", folders[0], "--after", folders[1], "--output", f"{tmp_path}/c"]
    )
    run()
    assert "| 0 | nq | 4 | 0.250 | 0.500 | +0.250 [+0.000, +0.750] | 1 |" in capsys.readouterr().out
    assert json.loads((tmp_path / "c").read_text())[0]["difference"] == 0.25
    # Two questions that differ alike: resampled, they would give an interval without a width.
    folders = [str(evaluation(tmp_path / name, nq=rights)) for name, rights in (("d", "00"), ("e", "11"))]
    monkeypatch.setattr("sys.argv", ["compare", "--before", folders[0], "--after", folders[1]])
    run()
    assert "| 0 | nq | 2 | 0.000 | 1.000 | +1.000 (all alike) | 0.497 |" in capsys.readouterr().out
