"""What each index over a corpus costs: bytes on disk and in memory, bytes read a query, the time that takes at least.

    .venv/bin/python scripts/bench/memory_tiers.py [--rows 21015324] [--dim 768] [--batch 512] [--measure]

Bytes follow from the file formats. The floor is the slower of reading those bytes and of the products, at the given
`--bandwidth` and rates; the defaults are what one core reached in the searches below, `--measure` takes this machine's,
one thread. "Scaled" is a rate that one core reached at 200,000 rows (BM25: 2,000,000) in batches of 512 (BM25: 1),
taken to `--rows` by the rows that a query looks at: no index of `--rows` was run. A table in Markdown, then JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial

GB = 1e9
MEASURED_ROWS, MEASURED_SHARE = 200_000, 64 / 1024  # of the lists
BM25_ROWS = 2_000_000
BM25_POSTINGS_A_ROW = 1_021e6 / 8 / BM25_ROWS  # of the measured index of 1,021 MB, 100 synthetic words a passage
BM25_POSTINGS_A_QUERY = 178e3 / BM25_ROWS  # times the rows, of the measured queries of 8 to 10 words
CORPUS_BYTES_A_ROW = 14.3e9 / 21_015_324  # of wiki-18
FLOAT32_RATE = 2 * MEASURED_ROWS * 768 * 491  # FLOP/s of the measured FAISS Flat


def flat_bytes(rows: int, dim: int, value_bytes: int = 4) -> float:
    """Vectors and nothing else; `value_bytes` 4 float32, 2 float16 or bfloat16."""
    return rows * dim * value_bytes


def sq8_bytes(rows: int, dim: int) -> float:
    """A byte a value, and the smallest value and the range of each dimension in float32."""
    return rows * dim + 8 * dim


def hnsw_link_bytes(rows: int, links: int, upper_levels: float | None = None) -> float:
    """Beside the vectors: `2 links` neighbours of 4 bytes on the ground level and `links` on each upper one.

    12 bytes a row say where they lie. `upper_levels`: of all rows together, expected `rows / (links - 1)`.
    """
    upper_levels = rows / (links - 1) if upper_levels is None else upper_levels
    return rows * (8 * links + 12) + upper_levels * 4 * links


def ivf_bytes(rows: int, dim: int, code_bytes: int, lists: int) -> float:
    """A code and an id of 8 bytes a row; a float32 centroid and a size of 8 bytes a list."""
    return rows * (code_bytes + 8) + lists * (4 * dim + 8)


def pq_codebook_bytes(dim: int, bits: int) -> float:
    """2^bits float32 centroids of each sub-vector."""
    return 2**bits * dim * 4


def fast_scan_padding_bytes(code_bytes: int, lists: int, missing_rows: float | None = None) -> float:
    """4-bit codes lie in blocks of 32. `missing_rows`: that fill up the last blocks, expected 15.5 a list."""
    return code_bytes * (15.5 * lists if missing_rows is None else missing_rows)


def bm25_bytes(postings: float, terms: int) -> float:
    """A float32 weight and an int32 row a (row, term), an int64 start a term. The vocabulary is beside it."""
    return 8 * postings + 8 * (terms + 1)


@dataclass(frozen=True)
class Tier:
    """What one index costs."""

    index: str
    """As `--faiss_type` names it."""
    serve: str
    """Arguments of the server beside the index."""
    disk: float
    """Bytes."""
    memory: float
    """Bytes: of the process, or of the mapped file when all of it is in use."""
    shared: float | None = None
    """Bytes read once a batch; None where the format does not say."""
    own: float = 0.0
    """Bytes read for each query."""
    flop: float = 0.0
    """Of one query's products."""
    bf16: bool = False
    """Products in bfloat16, not float32."""
    scaled: float | None = None
    """Queries/s of one CPU core, from a measurement of fewer rows; None: it does not grow with the rows."""
    recall: str = ""
    """recall@3 at 200,000 rows."""
    device: str = "cpu"

    def floor_s(self, args: argparse.Namespace) -> float | None:
        """Seconds of a batch at least: reading or the products, whichever is slower."""
        if self.shared is None:
            return None
        rate = (args.bf16 if self.bf16 else args.fp32) * 1e12
        read_s = (self.shared + args.batch * self.own) / (args.bandwidth * GB)
        return max(read_s, args.batch * self.flop / rate)


def tiers(rows: int, dim: int) -> Iterator[Tier]:
    """On a CPU, then on a GPU."""
    full, half, one_byte = flat_bytes(rows, dim), flat_bytes(rows, dim, 2), sq8_bytes(rows, dim)
    product, smaller = 2.0 * rows * dim, MEASURED_ROWS / rows
    flat = Tier("Flat", "--dense_engine faiss", full, full, full, flop=product, scaled=491 * smaller, recall="1.000")
    matrix = Tier("Flat", "--dense_engine matrix", full, half, half, flop=product, bf16=True, recall="1.000")
    yield flat
    yield replace(matrix, scaled=1270 * smaller)
    # FAISS decodes these for every query by itself
    yield Tier("SQfp16", "", half, half, 0, half, product, scaled=32 * smaller, recall="1.000")
    yield Tier("SQ8", "", one_byte, one_byte, 0, one_byte, product, scaled=36.5 * smaller, recall=".989")
    yield from graphs(rows, full, one_byte)
    yield from inverted_lists(rows, dim)
    postings = bm25_bytes(rows * BM25_POSTINGS_A_ROW, terms=0)
    own = 8 * rows * BM25_POSTINGS_A_QUERY
    yield Tier("bm25", "", postings, postings, 0, own, scaled=884.5 * BM25_ROWS / rows, recall="another ranking")
    yield replace(matrix, device="gpu", serve="--dense_engine matrix --faiss_gpu")
    yield replace(flat, device="gpu", serve="--dense_engine faiss --faiss_gpu", memory=half, shared=half, bf16=True)


def graphs(rows: int, full: float, one_byte: float) -> Iterator[Tier]:
    links = hnsw_link_bytes(rows, 32)
    for name, codes, recall in (("HNSW32", full, ".980"), ("HNSW32_SQ8", one_byte, "not measured")):
        yield Tier(name, "--search_parameters efSearch=128", codes + links, codes + links, recall=recall)


def inverted_lists(rows: int, dim: int, lists: int = 65_536, probes: int = 64) -> Iterator[Tier]:
    share, coarse = probes / lists, 2.0 * lists * dim
    code = dim // 8  # of 4 bits for every 4 values
    sq8 = ivf_bytes(rows, dim, dim, lists) + sq8_bytes(0, dim)
    pq = ivf_bytes(rows, dim, code, lists) + fast_scan_padding_bytes(code, lists) + pq_codebook_bytes(dim, 4)
    pq_name, nprobe = f"IVF{lists},PQ{dim // 4}x4fs", f"--search_parameters nprobe={probes}"

    def tier(index: str, size: float, row_bytes: int, measured: float, recall: str) -> Tier:
        seconds = rows * share / (measured * MEASURED_ROWS * MEASURED_SHARE) + coarse / FLOAT32_RATE
        own = rows * share * row_bytes
        return Tier(index, nprobe, size, size, 4.0 * lists * dim, own, coarse, scaled=1 / seconds, recall=recall)

    yield tier(f"IVF{lists},SQ8", sq8, dim, 390, ".959 (64 of 1,024 lists)")
    yield tier(pq_name, pq, code, 9931, ".446 (same)")
    refined = tier(f"{pq_name},RFlat", pq, code, 6389, ".891 (same)")  # 30 float32 rows for 3 passages, from the file
    disk, own = pq + flat_bytes(rows, dim), refined.own + 30 * 4 * dim
    yield replace(refined, serve=f"{nprobe},k_factor_rf=10", disk=disk, own=own)


def chosen(args: argparse.Namespace) -> list[Tier]:
    """What was measured is of 768 values: another `--dim` has no scaled rates."""
    here = [tier for tier in tiers(args.rows, args.dim) if tier.device == ("gpu" if args.gpu else "cpu")]
    return here if args.dim == 768 else [replace(tier, scaled=None, recall="not measured") for tier in here]


def table(args: argparse.Namespace) -> str:
    """Markdown; (c): computed, (s): scaled from a measurement, (m): measured."""
    head = ["index", "served with", "disk GB (c)", "memory GB (c)", f"GB read by {args.batch} queries (c)"]
    head += ["ms per query, at least (c)", "q/s, at most (c)"]
    head += [] if args.gpu else ["q/s per core (s)", "recall@3 of 200,000 rows (m)"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for tier in chosen(args):
        cells = [f"`{tier.index}`", f"`{tier.serve}`" if tier.serve else ""]
        cells += [f"{tier.disk / GB:.1f}", f"{tier.memory / GB:.1f}", *floor_cells(tier, args)]
        if not args.gpu:
            cells += ["not scaled" if tier.scaled is None else digits(tier.scaled), tier.recall]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def floor_cells(tier: Tier, args: argparse.Namespace) -> list[str]:
    floor_s = tier.floor_s(args)
    if tier.shared is None or floor_s is None:
        return ["not known"] * 3
    read = (tier.shared + args.batch * tier.own) / GB
    return [digits(read), digits(1000 * floor_s / args.batch), digits(args.batch / floor_s)]


def digits(value: float) -> str:
    """Two digits that count."""
    rounded = float(f"{value:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"


def measure(num_bytes: int = 2**30, rows: int = 65_536) -> dict[str, float]:
    """GB/s of reading memory and TFLOP/s of the products of the matrix engine, one thread; the best of five.

    `num_bytes` should be more than any cache holds; products are of `rows` x 768 values and 256 queries.
    """
    import torch

    torch.set_num_threads(1)
    values = torch.ones(num_bytes // 4)
    found = {"bandwidth": num_bytes / GB / fastest(values.sum)}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        matrix_RD, queries_DB = torch.ones(rows, 768, dtype=dtype), torch.ones(768, 256, dtype=dtype)
        out_RB = torch.empty(rows, 256, dtype=dtype)
        found[name] = 2 * rows * 768 * 256 / 1e12 / fastest(partial(torch.mm, matrix_RD, queries_DB, out=out_RB))
    return found


def fastest(work: Callable[[], object]) -> float:
    """Seconds."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=21_015_324, help="of wiki-18")
    parser.add_argument("--dim", type=int, default=768, help="of E5-base")
    parser.add_argument("--batch", type=int, default=512, help="queries that are searched together")
    parser.add_argument("--bandwidth", type=float, default=14, help="GB/s of memory")
    parser.add_argument("--bf16", type=float, default=0.39, help="TFLOP/s of bfloat16 products")
    parser.add_argument("--fp32", type=float, default=0.151, help="TFLOP/s of float32 products")
    parser.add_argument("--gpu", action="store_true", help="the indexes of a GPU")
    parser.add_argument("--measure", action="store_true", help="bandwidth and rates of this machine, one thread")
    args = parser.parse_args()
    if args.measure:
        vars(args).update(measure())
        print(f"measured: {args.bandwidth:.1f} GB/s, bf16 {args.bf16:.2f} TFLOP/s, fp32 {args.fp32:.3f} TFLOP/s\n")
    print(table(args))
    text = args.rows * CORPUS_BYTES_A_ROW
    print(f"\ncorpus: {text / GB:.1f} GB mapped, {8 * (args.rows + 1) / GB:.2f} GB in memory")
    print(json.dumps({"arguments": vars(args), "tiers": [asdict(tier) for tier in chosen(args)]}))


if __name__ == "__main__":
    main()
