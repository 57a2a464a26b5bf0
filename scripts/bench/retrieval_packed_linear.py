"""What packed linear layers bring to an encoder in bfloat16 on a CPU: CPU time of one thread per query.

    .venv/bin/python scripts/bench/retrieval_packed_linear.py --model MINILM --questions questions.jsonl

The same weights packed, plain and in float32 take turns in random order; the times are CPU times of the thread that
encodes, so that other work on the machine shifts them little.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path
from unittest.mock import patch

from retrieval_load import markdown, read_questions

from search_r1.search.dense.encoding.encoder import Encoder, EncoderOptions

_SIZES = (1, 16, 64)
_QUERIES = 64  # of a round, at least


def encoders(model: str) -> dict[str, Encoder]:
    """One for each side."""
    bfloat16 = EncoderOptions("e5", model, precision="bfloat16", device="cpu")
    with patch("search_r1.search.dense.encoding.encoder.pack_linear_layers", lambda _: False):
        plain = Encoder(bfloat16)
    float32 = Encoder(EncoderOptions("e5", model, precision="float32", device="cpu"))
    return {"packed": Encoder(bfloat16), "plain": plain, "float32": float32}


def measure(sides: dict[str, Encoder], questions: list[str], rounds: int) -> list[dict[str, object]]:
    """A row for each batch size: the median milliseconds per query of each side."""
    rows = []
    for size in _SIZES:
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        batches = [questions[start : start + size] for start in range(0, _QUERIES, size)]
        for _ in range(rounds + 1):
            for name in random.sample(list(sides), len(sides)):
                start = time.thread_time()
                for batch in batches:
                    sides[name].encode_queries(batch)
                seconds[name].append((time.thread_time() - start) / sum(map(len, batches)))
        medians = {name: f"{1000 * statistics.median(each[1:]):.2f} ms" for name, each in seconds.items()}
        rows.append({"queries at once": size} | medians)
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Packed linear layers against plain ones.")
    parser.add_argument("--model", required=True, help="folder or hub id of a BERT encoder")
    parser.add_argument("--questions", type=Path, nargs="+", required=True, help="JSON lines with a field `question`")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    print(markdown(measure(encoders(arguments.model), read_questions(arguments.questions), arguments.rounds)))


if __name__ == "__main__":
    main()
