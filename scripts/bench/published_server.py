"""The baseline: a dense server that behaves as the published one of 2025 does.

Every request encodes and searches by itself on the thread pool of the web framework: float32 weights, one padded batch
of at most 512 queries, FAISS Flat as it is, no batching across requests, no cache, no limits. The route, the request
and the reply are those of the real server, so that the same load runs on both.

    .venv/bin/python scripts/bench/published_server.py --corpus_path corpus.jsonl --index_path e5_Flat.index \\
      --retriever_model intfloat/e5-base-v2 --query_prefix "query: "
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

if TYPE_CHECKING:
    import numpy as np

_CHUNK, _MAX_TOKENS = 512, 256


class Request(BaseModel):
    """The published request."""

    queries: list[str]
    topk: int | None = None
    return_scores: bool = False


class Encoder:
    """Mean pooling and unit length, in float32."""

    def __init__(self, model: str, prefix: str) -> None:
        from transformers import AutoModel, AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self._model: Any = AutoModel.from_pretrained(model).float().eval()
        self._prefix = prefix

    def encode(self, queries: list[str]) -> np.ndarray:
        """float32 [queries, dim]."""
        import torch
        from torch.nn.functional import normalize

        texts = [self._prefix + query for query in queries]
        inputs = self._tokenizer(texts, max_length=_MAX_TOKENS, truncation=True, padding=True, return_tensors="pt")
        with torch.inference_mode():
            hidden_BLD = self._model(**inputs).last_hidden_state
        weight_BL1 = inputs["attention_mask"].unsqueeze(-1).float()
        vectors_BD = normalize((hidden_BLD * weight_BL1).sum(1) / weight_BL1.sum(1), dim=-1)
        return vectors_BD.numpy()


def create_app(arguments: argparse.Namespace) -> FastAPI:
    """Load everything."""
    import faiss
    import torch

    from search_r1.search.corpus import Corpus

    torch.set_num_threads(arguments.num_threads)
    faiss.omp_set_num_threads(arguments.num_threads)
    corpus = Corpus(arguments.corpus_path)
    index = faiss.read_index(arguments.index_path)
    encoder = Encoder(arguments.retriever_model, arguments.query_prefix)
    app = FastAPI()

    @app.post("/retrieve")
    def retrieve(request: Request) -> dict[str, Any]:
        k = request.topk or arguments.topk
        result: list[Any] = []
        for start in range(0, len(request.queries), _CHUNK):
            scores, rows = index.search(encoder.encode(request.queries[start : start + _CHUNK]), k)
            for query_scores, query_rows in zip(scores.tolist(), rows.tolist(), strict=True):
                hits = zip(query_rows, query_scores, strict=True)
                result.append([{"document": corpus[row], "score": score} for row, score in hits])
        if not request.return_scores:
            result = [[hit["document"] for hit in hits] for hits in result]
        return {"result": result}

    @app.get("/readyz")
    def readyz() -> dict[str, str]:
        return {"status": "ok"}

    return app


def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(description="The published server's behaviour, as a baseline.")
    parser.add_argument("--corpus_path", required=True)
    parser.add_argument("--index_path", required=True, help="FAISS Flat, inner product")
    parser.add_argument("--retriever_model", required=True)
    parser.add_argument("--query_prefix", default="", help='"query: " for e5')
    parser.add_argument("--topk", type=int, default=3)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--num_threads", type=int, default=1)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(arguments.num_threads)
    uvicorn.run(create_app(arguments), host=arguments.host, port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
