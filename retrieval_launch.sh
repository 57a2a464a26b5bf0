#!/usr/bin/env bash
# Start the retrieval server. Settings come from the environment; further arguments are passed through:
#   CORPUS_PATH=data/wiki-18.jsonl bash retrieval_launch.sh --port 8001
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/search_r1/search/launch_common.sh"

# Passages, .jsonl or .jsonl.gz; the default is the TinyWiki that scripts/quickstart.sh makes.
CORPUS_PATH=$(locate "${CORPUS_PATH:-runs/tinywiki_default_seed0/data/corpus.jsonl}")
# A FAISS file or a BM25 folder; empty: BM25 built in memory.
INDEX_PATH=$(locate "${INDEX_PATH:-}")
# bm25, or the family of a dense encoder (e5, bge, ...) and its folder or hub id.
RETRIEVER_NAME=${RETRIEVER_NAME:-bm25}
RETRIEVER_MODEL=$(locate "${RETRIEVER_MODEL:-intfloat/e5-base-v2}")
TOPK=${TOPK:-3}
HOST=${HOST:-127.0.0.1}
PORT=${PORT:-8000}

require --corpus_path "corpus file" "$CORPUS_PATH" \
  "set CORPUS_PATH to a .jsonl file of passages, or run bash scripts/quickstart.sh to make TinyWiki" "$@"

ARGUMENTS=(--corpus_path "$CORPUS_PATH" --topk "$TOPK" --retriever_name "$RETRIEVER_NAME"
  --retriever_model "$RETRIEVER_MODEL" --host "$HOST" --port "$PORT")
if [[ -n $INDEX_PATH ]]; then ARGUMENTS+=(--index_path "$INDEX_PATH"); fi

exec "$PYTHON" -m search_r1.search.retrieval_server "${ARGUMENTS[@]}" "$@"
