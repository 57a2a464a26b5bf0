#!/usr/bin/env bash
# Build an index over a corpus. Settings come from the environment; further arguments are passed through:
#   corpus_file=data/wiki-18.jsonl save_dir=data bash search_r1/search/build_index.sh --faiss_type HNSW64
#   corpus_file=data/wiki-18.jsonl save_dir=data retriever_name=bm25 bash search_r1/search/build_index.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch_common.sh"

corpus_file=$(locate "${corpus_file:-data/wiki-18.jsonl}")
save_dir=${save_dir:-data}
# bm25, or the family of a dense encoder, and its folder or hub id. e5 takes the mean of the tokens.
retriever_name=${retriever_name:-e5}
retriever_model=$(locate "${retriever_model:-intfloat/e5-base-v2}")

require --corpus_path "corpus file" "$corpus_file" "set corpus_file to a .jsonl file of passages" "$@"

exec "$PYTHON" -m search_r1.search.index_builder --retrieval_method "$retriever_name" --model_path "$retriever_model" \
  --corpus_path "$corpus_file" --save_dir "$save_dir" --use_fp16 --max_length 256 --batch_size 512 \
  --faiss_type Flat --save_embedding "$@"
