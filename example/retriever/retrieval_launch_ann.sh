#!/usr/bin/env bash
# Serve dense search in an approximate index on the CPU. Settings come from the environment; further arguments are passed
# through:
#   file_path=data bash example/retriever/retrieval_launch_ann.sh --search_parameters efSearch=128
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../search_r1/search/launch_common.sh"

# The folder of the two below, and the encoder that the index was built with.
file_path=$(locate "${file_path:-data}")
index_file=$(locate "${index_file:-$file_path/e5_HNSW64.index}")
corpus_file=$(locate "${corpus_file:-$file_path/wiki-18.jsonl}")
retriever_name=${retriever_name:-e5}
retriever_path=$(locate "${retriever_path:-intfloat/e5-base-v2}")

require --corpus_path "corpus file" "$corpus_file" "set file_path to its folder, or corpus_file" "$@"
require --index_path "index file" "$index_file" \
  "set index_file, or build it: bash search_r1/search/build_index.sh --faiss_type HNSW64" "$@"

exec "$PYTHON" -m search_r1.search.retrieval_server --index_path "$index_file" --corpus_path "$corpus_file" \
  --topk 3 --retriever_name "$retriever_name" --retriever_model "$retriever_path" "$@"
