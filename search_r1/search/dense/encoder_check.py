"""The query encoder, and the check that it fits the index."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from search_r1.errors import ServerError
from search_r1.search.corpus import Corpus
from search_r1.search.dense.encoding.encoder import Encoder, EncoderOptions
from search_r1.search.manifest import check_manifest
from search_r1.search.retriever import RetrieverOptions

_LOG = logging.getLogger(__name__)


def encoder_fields(encoder: Encoder) -> dict[str, Any]:
    """The encoder's fields in an index manifest; the digest of a question encoder has its own key."""
    weights = "query_weights" if encoder.side == "query" else "weights"
    return {"format": 1, weights: encoder.fingerprint, "dim": encoder.dim} | encoder.spec.index_fields()


def query_encoder(options: RetrieverOptions, pooling: str | None) -> Encoder:
    """The query encoder that `options` select. Raises `ServerError` or `EncoderError`."""
    if not options.model:
        raise ServerError(f"dense retriever {options.name!r} needs --retriever_model")
    return Encoder(
        EncoderOptions(
            options.encoder_family,
            options.model,
            pooling=pooling,
            precision=options.query_precision,
            num_threads=options.num_threads,
        )
    )


def check_fit(path: Path, found: dict[str, Any], encoder: Encoder, corpus: Corpus, sizes: dict[str, int]) -> None:
    """Raise `IndexMismatchError` if the manifest `found` at `path` is for another corpus, encoder or size."""
    expected = encoder_fields(encoder) | {"corpus": corpus.digest}
    if "query_weights" in expected and "query_weights" not in found:
        _LOG.warning("%s does not name its question encoder, so it cannot be checked", path)
        del expected["query_weights"]
    expected |= {key: value for key, value in sizes.items() if key in found}
    check_manifest(path, {"end_token": "", "title_pair": False} | found, expected)
