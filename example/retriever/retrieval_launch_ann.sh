#!/usr/bin/env bash
# Serve dense search in an approximate index on the CPU. Settings come from the environment; further arguments are passed
# through:
#   file_path=data bash example/retriever/retrieval_launch_ann.sh --search_parameters efSearch=128
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../search_r1/search/launch_common.sh"

# file_path is the folder of corpus_file and index_file.
corpus_and_index e5_HNSW64.index "index file" "bash search_r1/search/build_index.sh --faiss_type HNSW64" "$@"
# The encoder that the index was built with.
retriever_name=${retriever_name:-e5}
retriever_path=$(locate "${retriever_path:-intfloat/e5-base-v2}")

exec "$PYTHON" -m search_r1.search.retrieval_server --index_path "$index_file" --corpus_path "$corpus_file" \
  --topk 3 --retriever_name "$retriever_name" --retriever_model "$retriever_path" "$@"
