#!/usr/bin/env bash
# Serve a BM25 index. Settings come from the environment; further arguments are passed through:
#   file_path=data bash example/retriever/retrieval_launch_bm25.sh --port 8001
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../search_r1/search/launch_common.sh"

# The folder of the two below; an index of search_r1/search/build_index.sh, or a published Lucene index.
file_path=$(locate "${file_path:-data}")
index_file=$(locate "${index_file:-$file_path/bm25}")
corpus_file=$(locate "${corpus_file:-$file_path/wiki-18.jsonl}")
retriever_name=bm25

require --corpus_path "corpus file" "$corpus_file" "set file_path to its folder, or corpus_file" "$@"
require --index_path "BM25 folder" "$index_file" \
  "set index_file, or build it: retriever_name=bm25 bash search_r1/search/build_index.sh" "$@"

exec "$PYTHON" -m search_r1.search.retrieval_server --index_path "$index_file" --corpus_path "$corpus_file" \
  --topk 3 --retriever_name "$retriever_name" "$@"
