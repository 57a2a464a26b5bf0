"""What the builders replace: what a builder wrote, and nothing else."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from search_encoders import build_dense

from search_r1.data.corpus import command_line as corpus_tool
from search_r1.errors import EncoderError, TargetTakenError
from search_r1.search import index_builder
from search_r1.search.bm25 import index as bm25
from search_r1.search.bm25.index import Bm25Retriever
from search_r1.search.corpus import Corpus
from search_r1.search.dense import build as dense_build
from search_r1.search.dense import embeddings
from search_r1.search.manifest import manifest_path, only_builder, read_manifest


def _bm25(corpus: Path, folder: Path) -> int:
    arguments = ["--retrieval_method", "bm25", "--corpus_path", str(corpus), "--save_dir", str(folder)]
    return index_builder.main(arguments)


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def _unchanged(folder: Path) -> Iterator[None]:
    before = _contents(folder)
    yield
    assert _contents(folder) == before


@pytest.mark.parametrize(
    "files",
    [
        {"segments_1": "lucene", "_0.cfs": "postings"},  # the published index lies in a folder of this name
        {"notes.txt": "mine"},
        {"manifest.json": '{"name": "a web app"}', "icon.svg": "x"},
        {"manifest.json": "not JSON"},
    ],
)
def test_a_folder_that_no_builder_wrote_stays_as_it_is(
    files: dict[str, str], corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "data" / "bm25"
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    with _unchanged(tmp_path):
        assert _bm25(corpus_file, tmp_path / "data") == 2
    printed = capsys.readouterr().err
    assert str(folder) in printed and "--save_dir" in printed and "move" in printed
    with _unchanged(tmp_path), pytest.raises(TargetTakenError, match="not written by the index builder"):
        Bm25Retriever.build(Corpus(corpus_file)).save(folder)


def test_it_is_refused_before_the_index_is_built(
    corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build_index(*_: object) -> None:
        raise AssertionError("hours of work for an index that cannot be saved")

    monkeypatch.setattr(bm25, "build_index", build_index)
    (tmp_path / "bm25").write_text("a file in the place of the folder")
    assert _bm25(corpus_file, tmp_path) == 2
    assert (tmp_path / "bm25").read_text() == "a file in the place of the folder"


def test_an_own_index_is_replaced_and_what_lies_beside_its_files_stays(corpus_file: Path, tmp_path: Path) -> None:
    (tmp_path / "bm25").mkdir()  # an empty folder is in nobody's way
    assert _bm25(corpus_file, tmp_path) == 0
    (tmp_path / "bm25" / "notes.txt").write_text("mine")
    (tmp_path / "bm25" / "runs").mkdir()
    (tmp_path / "bm25" / "runs" / "first").write_text("mine too")
    corpus_file.write_text('{"id": "1", "contents": "another corpus"}\n')
    assert _bm25(corpus_file, tmp_path) == 0
    assert len(Bm25Retriever.load(tmp_path / "bm25", Corpus(corpus_file))) == 1
    assert (tmp_path / "bm25" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "bm25" / "runs" / "first").read_text() == "mine too"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bm25", "corpus.jsonl"]


def test_a_link_to_a_folder_stays_a_link(corpus_file: Path, tmp_path: Path) -> None:
    (tmp_path / "large_disk").mkdir()
    (tmp_path / "bm25").symlink_to(tmp_path / "large_disk")
    for _ in range(2):
        assert _bm25(corpus_file, tmp_path) == 0
        assert (tmp_path / "bm25").is_symlink() and (tmp_path / "large_disk" / "manifest.json").is_file()


@pytest.mark.parametrize("name", ["e5_Flat.index", "e5_Flat.index.json", "emb_e5.memmap", "emb_e5.memmap.json"])
def test_files_that_no_builder_wrote_stay_as_they_are(
    name: str,
    model_dir: Path,
    corpus_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The published index and vectors have these names and no manifest; they are refused before a model is loaded."""

    def load(*_: object) -> None:
        raise AssertionError("the encoder is loaded for nothing")

    monkeypatch.setattr(dense_build, "Encoder", load)
    (tmp_path / name).write_text('["published"]')
    with _unchanged(tmp_path):
        assert build_dense(model_dir, corpus_file, tmp_path) == 2
    printed = capsys.readouterr().err
    assert str(tmp_path / name) in printed and "--save_dir" in printed


def test_vectors_that_were_kept_are_not_removed_by_a_later_run(
    model_dir: Path, corpus_file: Path, tmp_path: Path
) -> None:
    assert build_dense(model_dir, corpus_file, tmp_path, "--save_embedding") == 0
    kept = (tmp_path / "emb_e5.memmap").read_bytes()
    assert build_dense(model_dir, corpus_file, tmp_path, "--faiss_type", "HNSW8") == 0
    assert (tmp_path / "emb_e5.memmap").read_bytes() == kept


def test_an_own_index_is_built_again_after_a_run_that_was_killed(
    model_dir: Path, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """At no moment is there an index of ours that the next run takes for a stranger's, or an old manifest fits."""
    assert build_dense(model_dir, corpus_file, tmp_path) == 0
    whole = read_manifest(manifest_path(tmp_path / "e5_Flat.index"))
    write = dense_build.write_manifest
    calls: list[dict[str, Any]] = []

    def killed(path: Path, fields: dict[str, Any]) -> None:
        calls.append(fields)
        if fields.get("bytes"):
            raise KeyboardInterrupt
        write(path, fields)

    monkeypatch.setattr(dense_build, "write_manifest", killed)
    assert build_dense(model_dir, corpus_file, tmp_path) == 130
    assert "interrupted: the same command goes on" in capsys.readouterr().err
    left = read_manifest(manifest_path(tmp_path / "e5_Flat.index"))
    assert left is not None and left["num_rows"] == 0, "an unfinished index must not look whole"
    monkeypatch.undo()
    assert build_dense(model_dir, corpus_file, tmp_path) == 0
    assert read_manifest(manifest_path(tmp_path / "e5_Flat.index")) == whole


def test_an_encoding_that_fails_leaves_the_former_index_whole(
    model_dir: Path, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build_dense(model_dir, corpus_file, tmp_path) == 0
    before = _contents(tmp_path)

    def fail(*_: object) -> None:
        raise EncoderError("no memory")

    monkeypatch.setattr(dense_build, "build_index", fail)
    assert build_dense(model_dir, corpus_file, tmp_path, "--save_embedding") == 2
    assert {name: data for name, data in _contents(tmp_path).items() if name in before} == before


@pytest.mark.parametrize("method", ["e5", "bm25"])
def test_two_builders_of_one_folder(
    method: str, model_dir: Path, corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second one would write over the vectors of the first, which then builds its index of zeros."""
    folder = tmp_path / "indexes"
    with only_builder(folder):
        with _unchanged(tmp_path):
            assert build_dense(model_dir, corpus_file, folder, method=method) == 2
        assert f"another process builds an index in {folder}; wait" in capsys.readouterr().err
    assert not list(folder.iterdir())
    (folder / ".building").touch()  # as one that was killed leaves it
    assert build_dense(model_dir, corpus_file, folder, method=method) == 0
    assert not (folder / ".building").exists()


def test_a_file_system_without_locks(
    model_dir: Path, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    assert build_dense(model_dir, corpus_file, tmp_path, method="bm25") == 0


@pytest.mark.parametrize("method", ["e5", "bm25"])
def test_a_folder_that_cannot_be_written_is_told_in_a_line(
    method: str, model_dir: Path, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "taken").touch()
    assert build_dense(model_dir, corpus_file, tmp_path / "taken", method=method) == 1
    assert f"error: {tmp_path}/taken cannot be written: File exists" in capsys.readouterr().err

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(bm25, "write_manifest", full)
    monkeypatch.setattr(embeddings, "write_manifest", full)
    assert build_dense(model_dir, corpus_file, tmp_path, method=method) == 1
    assert "cannot be written: No space left on device; make room" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--output", "--report"])
def test_completing_a_corpus_never_writes_over_what_it_reads(
    option: str, corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gold = tmp_path / "gold.jsonl"
    gold.write_text(json.dumps({"id": "g", "contents": '"Gold"\nA passage.'}) + "\n")
    paths = {"--output": str(tmp_path / "new.jsonl")} | {option: str(gold)}
    arguments = ["complete", "--corpus_path", str(corpus_file), "--add", str(gold)]
    with _unchanged(tmp_path):
        assert corpus_tool.main([*arguments, *(part for pair in paths.items() for part in pair)]) == 2
    assert option in capsys.readouterr().err


def test_an_audit_never_writes_over_what_it_reads(corpus_file: Path, tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"id": "1", "question": "Which river?", "golden_answers": ["Lune"]}\n')
    arguments = ["audit", "--corpus_path", str(corpus_file), "--questions", str(questions)]
    for option, path in (("--output", corpus_file), ("--details", questions)):
        with _unchanged(tmp_path):
            assert corpus_tool.main([*arguments, option, str(path)]) == 2
