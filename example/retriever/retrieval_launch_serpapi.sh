#!/usr/bin/env bash
# Serve the results of SerpAPI. Settings come from the environment; further arguments are passed through:
#   SERPAPI_API_KEY=... bash example/retriever/retrieval_launch_serpapi.sh --online_cache runs/serpapi.sqlite
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../search_r1/search/launch_common.sh"

# serp_api_key instead of SERPAPI_API_KEY; on a command line other users could read it.
if [[ -n ${serp_api_key:-} ]]; then export SERPAPI_API_KEY=$serp_api_key; fi
search_url=${search_url:-https://serpapi.com/search}
serp_engine=${serp_engine:-google}

exec "$PYTHON" -m search_r1.search.serp_search_server --search_url "$search_url" --serp_engine "$serp_engine" \
  --topk 3 "$@"
