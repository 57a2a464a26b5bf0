"""scripts/download.py as its users run it, against a local server with the hub's addresses."""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, cast

import pytest
from data_scripts import ROOT, run_script
from huggingface_hub.file_download import _get_progress_bar_context
from local_hub import REVISION, LocalHub, asked_from_here, running

import long_task
from search_r1.data.hub import download as hub_download
from search_r1.data.hub.artifacts import ARTIFACTS, artifacts
from search_r1.data.hub.making import require_disk
from search_r1.data.qa.hub_bar import HubBar
from verl.errors import ConfigError, DataError

PARTS = [random.Random(seed).randbytes(size) for seed, size in ((1, 300_000), (2, 120_001))]
CORPUS = b"".join(b'{"id": "%d", "contents": "\\"T\\"\\ntext"}\n' % number for number in range(5000))
E5, WIKI, SETS = "PeterJinGo/wiki-18-e5-index", "PeterJinGo/wiki-18-corpus", "RUC-NLPIR/FlashRAG_datasets"
CHUNK = 10 * 1024 * 1024  # what huggingface_hub writes at once


def tar_of(**files: bytes) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"folder/{name}.jsonl")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


@functools.cache
def packed_corpus() -> bytes:
    return gzip.compress(CORPUS)


def repositories() -> dict[str, dict[str, bytes]]:
    questions = ARTIFACTS["qa"][0].patterns
    return {
        E5: {".gitattributes": b"x", "part_aa": PARTS[0], "part_ab": PARTS[1]},
        "PeterJinGo/wiki-18-e5-index-HNSW64": {"part_ab": PARTS[0], "part_aa": PARTS[1]},
        WIKI: {"wiki-18.jsonl.gz": packed_corpus(), "README.md": b"x"},
        "PeterJinGo/wiki-18-bm25-index": {"bm25/segments_1": b"s", "bm25/_0.cfs": b"index", "README.md": b"x"},
        SETS: {name: f'{{"of": "{name}"}}\n'.encode() for name in (*questions, "asqa/train.jsonl")},
        "PeterJinGo/nq_hotpotqa_train": {"train.parquet": b"PAR1", "test.parquet": b"PAR1."},
        **{one.repo: {name: name.encode() for name in (*one.needed, "test.parquet")} for one in ARTIFACTS["contexts"]},
    }


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    with running(LocalHub(repositories(), plain=("nq/test.jsonl", "bm25/segments_1"))) as made:
        yield made


def start(folder: Path, hub: LocalHub, *arguments: str) -> subprocess.Popen[str]:
    """The script in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "scripts/download.py", "--save_path", str(folder / "saved"), *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)


def download(folder: Path, hub: LocalHub | None, *arguments: str) -> tuple[int, str]:
    """(exit status, output) of the script in this process; without a hub it is offline."""
    said = io.StringIO()
    with asked_from_here(hub), redirect_stdout(said), redirect_stderr(said):
        status = run_script("download.py", "--save_path", folder / "saved", *arguments)
    return status, said.getvalue()


def saved(folder: Path) -> dict[str, bytes]:
    root = folder / "saved"
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_everything_is_fetched_joined_unpacked_and_recorded(tmp_path: Path, hub: LocalHub) -> None:
    status, said = download(tmp_path, hub, "--what", "corpus,e5,hnsw,bm25,qa,contexts")
    assert status == 0, said
    files = saved(tmp_path)
    record = json.loads(files.pop("checksums.json"))
    assert files.pop("e5_Flat.index") == PARTS[0] + PARTS[1]
    assert files.pop("e5_HNSW64.index") == PARTS[1] + PARTS[0]
    assert files.pop("wiki-18.jsonl") == CORPUS
    contents = repositories()
    expected = {f"qa/{name}": content for name, content in contents[SETS].items() if not name.startswith("asqa")}
    expected |= {f"nq_hotpotqa_train/{n}": c for n, c in contents["PeterJinGo/nq_hotpotqa_train"].items()}
    expected |= {"part_aa": PARTS[0], "part_ab": PARTS[1], "wiki-18.jsonl.gz": contents[WIKI]["wiki-18.jsonl.gz"]}
    expected |= {"e5_HNSW64_parts/part_ab": PARTS[0], "e5_HNSW64_parts/part_aa": PARTS[1]}
    expected |= {"bm25/segments_1": b"s", "bm25/_0.cfs": b"index"}
    expected |= {f"{one.folder}/{name}": name.encode() for one in ARTIFACTS["contexts"] for name in one.needed}
    assert files == expected
    assert record["part_ab"] == {
        "bytes": 120_001,
        "checked_against_hub": True,
        "repo": E5,
        "revision": REVISION,
        "sha256": sha256(PARTS[1]),
    }
    assert record["e5_Flat.index"] == {
        "bytes": 420_001,
        "made_from": {"part_aa": sha256(PARTS[0]), "part_ab": sha256(PARTS[1])},
        "sha256": sha256(PARTS[0] + PARTS[1]),
    }
    assert record["qa/nq/test.jsonl"]["sha256"] == sha256(contents[SETS]["nq/test.jsonl"])


def test_the_published_command_goes_on_by_itself(tmp_path: Path, hub: LocalHub) -> None:
    """Without --what it is the corpus and the flat index, and again it fetches nothing."""
    first = start(tmp_path, hub)
    _, said = first.communicate(timeout=240)
    assert first.returncode == 0 and "Traceback" not in said, said
    before = saved(tmp_path)
    assert {"wiki-18.jsonl", "wiki-18.jsonl.gz", "part_aa", "part_ab", "e5_Flat.index"} < set(before)
    hub.asked.clear()
    status, said = download(tmp_path, hub, "--repo_id", E5)
    assert status == 0 and hub.asked == [], said
    assert saved(tmp_path) == before


def test_another_repository_for_the_flat_index(tmp_path: Path, hub: LocalHub) -> None:
    hub.files["me/mine"] = {"part_aa": b"a", "part_ab": b"b", "part_ac": b"c"}
    assert download(tmp_path, hub, "--what", "e5", "--repo_id", "me/mine")[0] == 0
    assert saved(tmp_path)["e5_Flat.index"] == b"abc"
    status, said = download(tmp_path, hub, "--what", "e5", "--repo_id", WIKI)
    assert status == 2 and f"the repository {WIKI} has no part_aa, part_ab" in said
    status, said = download(tmp_path, hub, "--what", "e5", "--repo_id", "me/gone")
    assert status == 2 and "the hub has no dataset repository me/gone" in said


def stalled(tmp_path: Path, hub: LocalHub) -> tuple[subprocess.Popen[str], bytes, Path]:
    """A download that waits in its first file for `hub.released`; this file, and where its beginning is."""
    large = random.Random(3).randbytes(CHUNK + 3_000_000)
    hub.files[E5]["part_aa"] = large
    hub.stalls_after = CHUNK + 1_000_000
    process = start(tmp_path, hub, "--what", "e5")
    partial = tmp_path / "saved" / f".part_aa.{sha256(large)[:12]}.part"
    while not (partial.exists() and partial.stat().st_size >= CHUNK):
        assert process.poll() is None
        time.sleep(0.01)
    return process, large, partial


def test_a_killed_download_goes_on_where_it_was(tmp_path: Path, hub: LocalHub) -> None:
    process, large, partial = stalled(tmp_path, hub)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    arrived = partial.stat().st_size
    assert not (tmp_path / "saved" / "part_aa").exists()
    hub.stalls_after = None
    hub.released.set()
    hub.asked.clear()
    status, said = download(tmp_path, hub, "--what", "e5")
    assert status == 0, said
    assert hub.asked == [("part_aa", f"bytes={arrived}-"), ("part_ab", None)]
    assert saved(tmp_path)["e5_Flat.index"] == large + PARTS[1]
    assert not list((tmp_path / "saved").glob(".*"))


def test_two_downloads_of_one_file_do_not_write_into_each_other(tmp_path: Path, hub: LocalHub) -> None:
    first, large, _ = stalled(tmp_path, hub)
    status, said = download(tmp_path, hub, "--what", "e5")
    assert status == 2 and f"{tmp_path}/saved/part_aa is being fetched by another process" in said
    hub.stalls_after = None
    hub.released.set()
    first.communicate(timeout=120)
    assert download(tmp_path, hub, "--what", "e5")[0] == 0
    assert saved(tmp_path)["e5_Flat.index"] == large + PARTS[1]


def test_an_interrupted_download_and_a_file_in_place_of_the_folder(
    tmp_path: Path, hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(hub_download, "http_get", interrupt)
    assert download(tmp_path, hub, "--what", "e5") == (130, "interrupted: the same command resumes\n")
    shutil.rmtree(tmp_path / "saved")
    (tmp_path / "saved").touch()
    status, said = download(tmp_path, hub, "--what", "e5")
    assert status == 1 and f"error: {tmp_path}/saved could not be written" in said


def test_a_connection_that_breaks_says_how_to_go_on(tmp_path: Path, hub: LocalHub) -> None:
    listing = hub.listing(E5)
    del hub.files[E5]["part_ab"]
    hub.listing = lambda repo: listing  # listed, but not there
    status, said = download(tmp_path, hub, "--what", "e5")
    assert status == 1 and "part_ab stopped at 0 of 120001 bytes" in said and "resumes there" in said
    assert "e5_Flat.index" not in saved(tmp_path)


def test_wrong_bytes_are_never_taken(tmp_path: Path, hub: LocalHub) -> None:
    hub.sends_wrong_bytes = True
    status, said = download(tmp_path, hub, "--what", "e5")
    assert status == 2 and "has not the checksum that the hub gives" in said
    assert saved(tmp_path) == {}
    hub.sends_wrong_bytes = False
    assert download(tmp_path, hub, "--what", "e5")[0] == 0


@pytest.mark.parametrize("damaged", ["part_aa", "bm25/segments_1"])
def test_a_damaged_file_is_fetched_again(tmp_path: Path, hub: LocalHub, damaged: str) -> None:
    what = "e5" if damaged == "part_aa" else "bm25"
    assert download(tmp_path, hub, "--what", what)[0] == 0
    whole = saved(tmp_path)
    path = tmp_path / "saved" / damaged
    path.write_bytes(b"!" + path.read_bytes()[1:])
    (tmp_path / "saved/e5_Flat.index").unlink(missing_ok=True)
    hub.asked.clear()
    status, said = download(tmp_path, hub, "--what", what)
    assert status == 0 and "is not what the hub has, and is fetched again" in said
    assert [name for name, _ in hub.asked] == [damaged]
    assert saved(tmp_path) == whole


@pytest.mark.parametrize("product", ["e5_Flat.index", "wiki-18.jsonl"])
def test_a_damaged_product_is_made_again(tmp_path: Path, hub: LocalHub, product: str) -> None:
    assert download(tmp_path, hub)[0] == 0
    whole = saved(tmp_path)
    path = tmp_path / "saved" / product
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    hub.asked.clear()
    status, said = download(tmp_path, hub)
    assert status == 0 and hub.asked == [] and f"{path}: made from" in said
    assert saved(tmp_path) == whole


def test_an_index_that_was_joined_by_hand_is_recognised(tmp_path: Path, hub: LocalHub) -> None:
    """`cat part_* > e5_Flat.index`, and the parts removed: nothing is fetched."""
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/e5_Flat.index").write_bytes(PARTS[0] + PARTS[1])
    status, said = download(tmp_path, hub, "--what", "e5")
    assert status == 0 and hub.asked == [] and "e5_Flat.index: whole" in said


def test_parts_can_be_removed(tmp_path: Path, hub: LocalHub) -> None:
    assert download(tmp_path, hub, "--remove_parts")[0] == 0
    assert set(saved(tmp_path)) == {"checksums.json", "wiki-18.jsonl", "e5_Flat.index"}
    hub.asked.clear()
    assert download(tmp_path, hub)[0] == 0 and hub.asked == []
    status, said = download(tmp_path, None)
    assert status == 0 and "whole, as recorded" in said
    hub.files[WIKI]["wiki-18.jsonl.gz"] = gzip.compress(CORPUS + CORPUS)
    assert download(tmp_path, hub, "--what", "corpus")[0] == 0
    assert saved(tmp_path)["wiki-18.jsonl"] == CORPUS + CORPUS, "another corpus on the hub"


@pytest.mark.parametrize(
    ("packed", "outcome"),
    [
        (gzip.compress(tar_of(corpus=CORPUS)), None),
        (gzip.compress(tar_of(corpus=CORPUS, other=b"{}")), "an archive with 2 .jsonl files"),
        (gzip.compress(CORPUS)[:-20], "cannot be unpacked"),
        (CORPUS, "cannot be unpacked"),
    ],
    ids=["tar", "two files", "cut off", "not packed"],
)
def test_what_the_corpus_is_packed_in(tmp_path: Path, hub: LocalHub, packed: bytes, outcome: str | None) -> None:
    hub.files[WIKI]["wiki-18.jsonl.gz"] = packed
    status, said = download(tmp_path, hub, "--what", "corpus")
    if outcome is None:
        assert status == 0 and saved(tmp_path)["wiki-18.jsonl"] == CORPUS
    else:
        assert status == 2 and outcome in said
        assert "wiki-18.jsonl" not in saved(tmp_path)


def test_without_a_network_it_says_what_to_place_and_goes_on_with_that(tmp_path: Path) -> None:
    status, said = download(tmp_path, None, "--what", "corpus,e5,bm25")
    assert status == 1
    root = tmp_path / "saved"
    where = "https://huggingface.co/datasets/PeterJinGo"
    for line in (
        f"{root}/wiki-18.jsonl.gz  from  {where}/wiki-18-corpus/resolve/main/wiki-18.jsonl.gz",
        f"{root}/part_ab  from  {where}/wiki-18-e5-index/resolve/main/part_ab",
        f"{root}/bm25/*: all such files of {where}/wiki-18-bm25-index",
    ):
        assert f"  {line}\n" in said, line
    (root / "part_aa").write_bytes(PARTS[0])
    status, said = download(tmp_path, None, "--what", "e5")
    assert status == 1 and "/part_ab  from" in said and "/part_aa  from" not in said
    (root / "part_ab").write_bytes(PARTS[1])
    status, said = download(tmp_path, None, "--what", "e5")
    assert status == 0 and "part_aa: there, not checked against the hub" in said
    assert (root / "e5_Flat.index").read_bytes() == PARTS[0] + PARTS[1]
    (root / "e5_Flat.index").unlink()
    (root / "part_ab").write_bytes(PARTS[0])
    status, said = download(tmp_path, None, "--what", "e5")
    assert status == 2 and "part_ab is not the file of" in said


def test_too_little_disk(tmp_path: Path) -> None:
    require_disk(tmp_path, 1, "a corpus")
    with pytest.raises(DataError, match=r"a corpus needs 1000000\.0 GB more in .*, which has \d+\.\d GB free"):
        require_disk(tmp_path, 10**15, "a corpus")


def test_disk_is_checked_before_anything_is_fetched(tmp_path: Path, hub: LocalHub) -> None:
    listing = hub.listing(E5)
    for sibling in listing["siblings"]:
        sibling["size"] = sibling["lfs"]["size"] = 10**15
    hub.listing = lambda repo: listing
    status, said = download(tmp_path, hub, "--what", "e5")
    assert status == 2 and "e5 (PeterJinGo/wiki-18-e5-index) needs 4000000.0 GB more" in said  # parts and index
    assert hub.asked == []


def test_unknown_names() -> None:
    assert [one.name for one in artifacts("e5, corpus,e5")] == ["e5", "corpus"]
    for what in ("e5,faiss", "", ","):
        with pytest.raises(ConfigError, match="has to name some of corpus,e5,hnsw,bm25,qa"):
            artifacts(what)


def test_a_download_that_goes_on_is_counted_from_where_it_was(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a bar that the hub's own client makes and calls."""
    monkeypatch.setattr(long_task, "SHORT_S", 0.0)
    bar = _get_progress_bar_context(
        desc="wiki-18.jsonl.gz", log_level=20, total=10_000, initial=5000, tqdm_class=cast(Any, HubBar)
    )
    with bar as progress:
        progress.set_postfix_str("ignored")
        for _ in range(5):
            progress.update(1000)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5 and "fetch wiki-18.jsonl.gz: 6.0 kB of 10.0 kB, " in lines[0] and "left" in lines[0]
    assert "10.0 kB of 10.0 kB" in lines[-1]
