"""`corpus_tool audit --subsets`: answerable questions, in splits that share no passage and no text."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from served_app import served_corpus, write_passages

from search_r1.data.corpus.answer_matching import CorpusTitles
from search_r1.data.corpus.command_line import main, parse_arguments
from search_r1.data.corpus.subsets import SHARES, SPLITS, Answerable, split

PASSAGES = {
    "river": '"Ildra"\nThe Ildra is a river. It flows through the city of Vonmark.',
    "city": '"Vonmark"\nVonmark is a city of the country Sael.',
    "poet": '"Nara Quill"\nNara Quill was a poet, born in 1931 in the village of Tolm.',
}
BRIDGE = {"supporting_facts": {"title": ["Ildra", "Vonmark"], "sent_id": [0, 0]}}
ROWS: list[dict[str, Any]] = [
    {"id": "born", "question": "When was the poet Nara Quill born?", "golden_answers": ["1931"], "level": "easy"},
    {"id": "village", "question": "In which village was Nara Quill born?", "golden_answers": ["Tolm"]},
    {"id": "land", "question": "In which country is the river Ildra?", "golden_answers": ["Sael"], "metadata": BRIDGE},
    {"id": "unbridged", "question": "Which country has the river Ildra?", "golden_answers": ["Sael"]},
    {"id": "opera", "question": "Who wrote the opera Belvane?", "golden_answers": ["Orrin Dace"]},
    {"id": "yes", "question": "Is the Ildra a river?", "golden_answers": ["yes"]},
]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_in(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {
        subset: [
            json.loads(line) for name in SPLITS for line in (folder / subset / f"{name}.jsonl").read_text().splitlines()
        ]
        for subset in ("direct", "second_query")
    }


def test_answerable_questions_by_the_search_that_answers_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, questions = write_passages(tmp_path / "corpus.jsonl", PASSAGES), write_rows(tmp_path / "q.jsonl", ROWS)
    folder = tmp_path / "subsets"
    with served_corpus(corpus) as url:
        given = ["audit", "--corpus_path", str(corpus), "--questions", str(questions), "--url", url]
        assert main([*given, "--subsets", str(folder), "--subset_k", "1"]) == 0
        found = rows_in(folder)
        assert sorted(row["id"] for row in found["direct"]) == ["born", "village"]
        second = {row["id"]: row for row in found["second_query"]}
        assert second.pop("unbridged")["metadata"] == {"titles": ["Ildra", "Vonmark"]}, "linked by the first passage"
        assert list(second) == ["land"]
        assert all(row in ROWS for row in [*found["direct"], *second.values()]), "other rows are as in the file"
        # both questions about the poet are answered by one passage, so they are in one split
        held = [name for name in SPLITS if (folder / "direct" / f"{name}.jsonl").read_text().count("\n")]
        assert len(held) == 1
        assert "| direct       |" in capsys.readouterr().out
        # What is wrong ends it before anything is written.
        again = write_rows(tmp_path / "again.jsonl", ROWS[:1])
        none = tmp_path / "none"
        assert main([*given[:5], str(again), *given[5:], "--subsets", str(none)]) == 2
        assert "the id 'born' is also in" in capsys.readouterr().err and not none.exists()
        (tmp_path / "file").touch()
        assert main([*given, "--subsets", str(tmp_path / "file")]) == 1
        assert "could not be written" in capsys.readouterr().err


def test_titles_that_a_text_names() -> None:
    titles = CorpusTitles(["Emma (novel)", "Emma (film)", "Jane Austen", "Austen", "Rock", "York", "York Times"])
    assert titles.named_in("Jane Austen's book is Emma.") == ["Jane Austen", "Emma (novel)", "Emma (film)"]
    assert titles.named_in("A rock fan read the York Times in York.") == ["York Times", "York"]
    assert CorpusTitles(["O'Neil", "Jean-Luc"]).named_in("Jean-Luc met O'Neil.") == ["Jean-Luc", "O'Neil"]
    assert CorpusTitles([]).named_in("Emma") == [] == titles.named_in("")
    apart = f"Emma{' ' * 200_000}Woodhouse \t (novel)"  # to try the brackets after every blank would take minutes
    assert CorpusTitles([apart]).named_in("Emma Woodhouse") == [apart]


def test_splits_share_neither_passage_nor_text() -> None:
    """150 groups of 1 to 3 questions, connected by passages or by the same text."""
    found = []
    for group in range(150):
        for member in range(1 + group % 3):
            evidence = {f"p{group}.{member}", f"p{group}.{max(0, member - 1)}"}  # a chain
            found.append(Answerable("direct", {"question": f"Question {group} {member}?"}, frozenset(evidence)))
        found.append(Answerable("second_query", {"question": f"question {group} 0"}, frozenset({f"other {group}"})))
    splits = split(found)
    by_group: dict[str, set[str]] = {}
    for one, name in zip(found, splits, strict=True):
        by_group.setdefault(one.row["question"].split()[1], set()).add(name)
    assert all(len(names) == 1 for names in by_group.values())
    counts = Counter(splits)
    assert {name: round(counts[name] / len(found), 2) for name in SPLITS} == dict(zip(SPLITS, SHARES, strict=True))
    assert Counter(split(found, shares=(0.2, 0.2, 0.6))).most_common(1)[0][0] == "test"
    assert split(found, seed=1) != splits and split(found) == splits


def test_subsets_need_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["audit", "--corpus_path", "c", "--questions", "q", "--subsets", "s"])
    assert "--subsets needs --url" in capsys.readouterr().err
