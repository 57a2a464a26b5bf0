#!/usr/bin/env bash
# Serve dense search whose best passages a cross-encoder puts in order. Settings come from the environment; further
# arguments are passed through:
#   file_path=data bash example/retriever/retrieval_launch_hierarchical.sh --faiss_gpu
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../search_r1/search/launch_common.sh"

# file_path is the folder of corpus_file and index_file.
corpus_and_index e5_Flat.index "index file" "bash search_r1/search/build_index.sh" "$@"
# The encoder that the index was built with, and the cross-encoder.
retriever_name=${retriever_name:-e5}
retriever_path=$(locate "${retriever_path:-intfloat/e5-base-v2}")
reranker_path=$(locate "${reranker_path:-cross-encoder/ms-marco-MiniLM-L12-v2}")

exec "$PYTHON" -m search_r1.search.retrieval_rerank_server --index_path "$index_file" --corpus_path "$corpus_file" \
  --retrieval_topk 10 --retriever_name "$retriever_name" --retriever_model "$retriever_path" \
  --reranking_topk 3 --reranker_model "$reranker_path" --reranker_batch_size 32 "$@"
