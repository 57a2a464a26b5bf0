#!/usr/bin/env bash
# Serve a BM25 index. Settings come from the environment; further arguments are passed through:
#   file_path=data bash example/retriever/retrieval_launch_bm25.sh --port 8001
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../search_r1/search/launch_common.sh"

# file_path is the folder of corpus_file and index_file, an index of search_r1/search/build_index.sh or a published Lucene one.
corpus_and_index bm25 "BM25 folder" "retriever_name=bm25 bash search_r1/search/build_index.sh" "$@"

exec "$PYTHON" -m search_r1.search.retrieval_server --index_path "$index_file" --corpus_path "$corpus_file" \
  --topk 3 --retriever_name bm25 "$@"
