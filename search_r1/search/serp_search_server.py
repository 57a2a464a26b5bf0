"""The retrieval server over SerpAPI, with the published arguments.

    .venv/bin/python -m search_r1.search.serp_search_server --search_url https://serpapi.com/search --serp_engine google

Other arguments are those of `search_r1.search.retrieval_server`. Put the key into SERPAPI_API_KEY.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from search_r1.search import retrieval_server
from search_r1.search.online_arguments import published_parser, use_key


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit status, as `exit_status` says."""
    parser = published_parser("serp_search_server", "Serve the results of SerpAPI.")
    parser.add_argument("--search_url", required=True, help="address of the engine, such as https://serpapi.com/search")
    parser.add_argument("--serp_api_key", help="API key; better set in the environment as SERPAPI_API_KEY")
    parser.add_argument("--serp_engine", default="google", help="engine behind SerpAPI: google, bing, baidu, ...")
    arguments, further = parser.parse_known_args(argv)
    use_key("SERPAPI_API_KEY", arguments.serp_api_key, "--serp_api_key")
    engine = ["--online_endpoint", arguments.search_url, "--online_field", f"engine={arguments.serp_engine}"]
    return retrieval_server.main(["--retriever_name", "serpapi", *engine, *further])


if __name__ == "__main__":
    sys.exit(main())
