#!/usr/bin/env bash
# Start the retrieval server. Settings come from the environment; further arguments are passed through:
#   CORPUS_PATH=data/wiki-18.jsonl bash retrieval_launch.sh --port 8001
set -euo pipefail
CALLED_FROM=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")"

# Passages, .jsonl or .jsonl.gz; the default is the TinyWiki that scripts/quickstart.sh makes.
CORPUS_PATH=${CORPUS_PATH:-runs/tinywiki_default_seed0/data/corpus.jsonl}
# A FAISS file or a BM25 folder; empty: BM25 built in memory.
INDEX_PATH=${INDEX_PATH:-}
# bm25, or the family of a dense encoder (e5, bge, ...) and its folder or hub id.
RETRIEVER_NAME=${RETRIEVER_NAME:-bm25}
RETRIEVER_MODEL=${RETRIEVER_MODEL:-intfloat/e5-base-v2}
TOPK=${TOPK:-3}
HOST=${HOST:-127.0.0.1}
PORT=${PORT:-8000}

PYTHON=python3
if [[ -x .venv/bin/python ]]; then PYTHON=.venv/bin/python; fi

# A relative path means the caller's folder first, then the repository.
if [[ -n $CORPUS_PATH && $CORPUS_PATH != /* && -e $CALLED_FROM/$CORPUS_PATH ]]; then
    CORPUS_PATH=$CALLED_FROM/$CORPUS_PATH
fi
if [[ -n $INDEX_PATH && $INDEX_PATH != /* && -e $CALLED_FROM/$INDEX_PATH ]]; then
    INDEX_PATH=$CALLED_FROM/$INDEX_PATH
fi

if [[ ! -f $CORPUS_PATH && " $* " != *" --corpus_path"* && " $* " != *" --help "* ]]; then
    echo "error: corpus file $CORPUS_PATH does not exist;" \
        "set CORPUS_PATH to a .jsonl file of passages, or run bash scripts/quickstart.sh to make TinyWiki" >&2
    exit 1
fi

ARGUMENTS=(--corpus_path "$CORPUS_PATH" --topk "$TOPK" --retriever_name "$RETRIEVER_NAME"
    --retriever_model "$RETRIEVER_MODEL" --host "$HOST" --port "$PORT")
if [[ -n $INDEX_PATH ]]; then ARGUMENTS+=(--index_path "$INDEX_PATH"); fi

exec "$PYTHON" -m search_r1.search.retrieval_server "${ARGUMENTS[@]}" "$@"
