#!/usr/bin/env bash
# Serve the snippets of Google Programmable Search. Settings come from the environment; further arguments are passed
# through:
#   GOOGLE_API_KEY=... cse_id=... bash example/retriever/retrieval_launch_google.sh --online_cache runs/google.sqlite
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../search_r1/search/launch_common.sh"

# api_key instead of GOOGLE_API_KEY; on a command line other users could read it.
if [[ -n ${api_key:-} ]]; then export GOOGLE_API_KEY=$api_key; fi

# cse_id is the id of a programmable search engine.
exec "$PYTHON" -m search_r1.search.google_search_server ${cse_id:+--cse_id "$cse_id"} --topk 5 --snippet_only "$@"
