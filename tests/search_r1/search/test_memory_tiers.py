"""scripts/bench/memory_tiers.py: the byte formulas against real files, the floor by hand, the table of the page."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import faiss
import numpy as np
import pytest
from search_corpora import corpus_of

from search_r1.search.bm25.index import Bm25Retriever
from search_r1.search.dense.build import build_index
from search_r1.search.dense.embeddings import VectorFile

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts" / "bench"))  # as Python does when it runs a file there

import memory_tiers as tiers  # noqa: E402

DIM = 16
HEADER = 400  # bytes at most, whatever the rows


def built(faiss_type: str, rows: int, folder: Path) -> tuple[int, faiss.Index]:
    """Size of the file that our builder writes, and the index in it."""
    vectors = np.random.default_rng(0).normal(size=(rows, DIM)).astype(np.float32)
    vectors.tofile(folder / "vectors")
    build_index(VectorFile(folder / "vectors", rows, DIM), faiss_type, folder / "index")
    return (folder / "index").stat().st_size, faiss.read_index(str(folder / "index"))


def expected(faiss_type: str, rows: int, index: faiss.Index) -> float:
    """By the formulas, with what chance decided read from the index."""
    match faiss_type:
        case "Flat":
            return tiers.flat_bytes(rows, DIM)
        case "SQfp16":
            return tiers.flat_bytes(rows, DIM, 2)
        case "SQ8":
            return tiers.sq8_bytes(rows, DIM)
        case "HNSW8":
            return tiers.flat_bytes(rows, DIM) + tiers.hnsw_link_bytes(rows, 8, upper_levels(index))
        case "HNSW32_SQ8":
            return tiers.sq8_bytes(rows, DIM) + tiers.hnsw_link_bytes(rows, 32, upper_levels(index))
        case "IVF8,SQ8":
            return tiers.ivf_bytes(rows, DIM, DIM, lists=8) + tiers.sq8_bytes(0, DIM)
        case "IVF8,PQ4np":
            return tiers.ivf_bytes(rows, DIM, 4, lists=8) + tiers.pq_codebook_bytes(DIM, 8)
        case "IVF8,PQ8x4fs":
            missing = sum(-index.invlists.list_size(i) % 32 for i in range(8))
            padding = tiers.fast_scan_padding_bytes(4, 8, missing)
            return tiers.ivf_bytes(rows, DIM, 4, lists=8) + padding + tiers.pq_codebook_bytes(DIM, 4)
    raise AssertionError(faiss_type)


def upper_levels(index: faiss.Index) -> float:
    return float((faiss.vector_to_array(index.hnsw.levels) - 1).sum())


@pytest.mark.parametrize(
    "faiss_type", ["Flat", "SQfp16", "SQ8", "HNSW8", "HNSW32_SQ8", "IVF8,SQ8", "IVF8,PQ4np", "IVF8,PQ8x4fs"]
)
def test_a_faiss_file_has_the_bytes_of_its_formula(faiss_type: str, tmp_path: Path) -> None:
    beyond = []
    for rows in (600, 1500):
        size, index = built(faiss_type, rows, tmp_path)
        beyond.append(size - expected(faiss_type, rows, index))
    assert beyond[0] == beyond[1]  # nothing else grows with the rows
    assert 0 < beyond[0] < HEADER


def test_a_list_costs_its_centroid_and_its_size(tmp_path: Path) -> None:
    few, _ = built("IVF8,SQ8", 1500, tmp_path)
    many, _ = built("IVF32,SQ8", 1500, tmp_path)
    assert many - few == tiers.ivf_bytes(0, DIM, DIM, lists=24) == 24 * 72


@pytest.mark.parametrize("links", [8, 32])
def test_the_levels_of_a_graph_and_the_last_blocks_are_as_many_as_expected(links: int, tmp_path: Path) -> None:
    rows = 4000
    size, index = built(f"HNSW{links}", rows, tmp_path)
    assert tiers.hnsw_link_bytes(rows, links) == pytest.approx(size - 4 * rows * DIM, rel=0.01)
    _, index = built("IVF64,PQ8x4fs", rows, tmp_path)
    missing = [-index.invlists.list_size(i) % 32 for i in range(64)]
    assert tiers.fast_scan_padding_bytes(4, 64) == pytest.approx(4 * sum(missing), rel=0.25)


def test_a_bm25_folder_has_the_bytes_of_its_formula(tmp_path: Path) -> None:
    rows = ["the Lune is a river", "Osk is a town by a river", "rivers and towns"]
    Bm25Retriever.build(corpus_of(tmp_path, *rows)).save(tmp_path / "bm25")
    # stems without stop words: lune river | osk town river | river town
    arrays = {path.name.split(".")[0]: np.load(path) for path in (tmp_path / "bm25").glob("*.npy")}
    assert sum(array.nbytes for array in arrays.values()) == tiers.bm25_bytes(postings=7, terms=4) == 96


def arguments(**changes: object) -> argparse.Namespace:
    return argparse.Namespace(
        **{"rows": 1000, "dim": 768, "batch": 4, "bandwidth": 1.0, "bf16": 0.001, "fp32": 0.0001, "gpu": False}
        | changes
    )


def tier(index: str, serve: str = "", **changes: object) -> tuple[tiers.Tier, argparse.Namespace]:
    args = arguments(**changes)
    (found,) = [one for one in tiers.chosen(args) if one.index == index and serve in one.serve]
    return found, args


def test_the_floor_is_the_slower_of_reading_and_products() -> None:
    flat, args = tier("Flat", "faiss")
    assert flat.memory == 3_072_000
    # 4 queries x 2 x 768,000 operations at 1e8 a second; reading once takes 3.072 ms at 1 GB/s
    assert flat.floor_s(args) == pytest.approx(0.06144)
    assert flat.floor_s(arguments(fp32=1.0)) == pytest.approx(0.003072)
    matrix, args = tier("Flat", "matrix")
    assert (matrix.disk, matrix.memory) == (3_072_000, 1_536_000)
    assert matrix.floor_s(args) == pytest.approx(0.006144)  # at the bfloat16 rate
    assert matrix.floor_s(arguments(bf16=1.0)) == pytest.approx(0.001536)
    one_byte, _ = tier("SQ8")
    assert one_byte.floor_s(arguments(fp32=1.0)) == pytest.approx(4 * 774_144e-9)  # read for every query
    graph, args = tier("HNSW32")
    assert graph.floor_s(args) is None and graph.scaled is None


def test_rates_are_scaled_by_the_rows_a_query_looks_at() -> None:
    assert tier("Flat", "faiss", rows=400_000)[0].scaled == pytest.approx(245.5)
    assert tier("bm25", rows=4_000_000)[0].scaled == pytest.approx(442.25)
    lists, _ = tier("IVF65536,SQ8", rows=12_800_000)
    # 12,500 rows, as many as were scanned 390 times a second, and 65,536 centroids at 0.1508 TFLOP/s
    assert lists.scaled == pytest.approx(1 / (1 / 390 + 2 * 65_536 * 768 / (2 * 200_000 * 768 * 491)))
    assert tier("Flat", "faiss", dim=384)[0].scaled is None


@pytest.mark.parametrize("gpu", [[], ["--gpu", "--bandwidth", "3350", "--bf16", "989"]])
def test_the_page_shows_what_the_script_prints(gpu: list[str]) -> None:
    script = str(ROOT / "scripts/bench/memory_tiers.py")
    done = subprocess.run([sys.executable, script, *gpu], capture_output=True, text=True, check=True)
    table, _, rest = done.stdout.partition("\n\n")
    assert table.count("\n") >= 3 and table in (ROOT / "docs/retrieval_speed.md").read_text()
    printed = json.loads(rest.splitlines()[-1])
    assert [one["memory"] for one in printed["tiers"]][-1] == (
        32_279_537_664 if gpu else pytest.approx(10.73e9, rel=1e-3)
    )


def test_measuring_says_what_it_found() -> None:
    measured = tiers.measure(num_bytes=2**24, rows=256)
    assert set(measured) == {"bandwidth", "bf16", "fp32"} and all(value > 0 for value in measured.values())
