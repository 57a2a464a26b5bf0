"""The retrieval server over Google Programmable Search, with the published arguments.

    .venv/bin/python -m search_r1.search.google_search_server --cse_id ENGINE --snippet_only

Other arguments are those of `search_r1.search.retrieval_server`. Put the key into GOOGLE_API_KEY. Only the snippets
that Google sends are served: a server that fetched the pages could be tricked into requests to its own network.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from search_r1.search import retrieval_server
from search_r1.search.online_arguments import published_parser, use_key


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit status, as `exit_status` says."""
    parser = published_parser("google_search_server", "Serve the snippets of Google Programmable Search.")
    parser.add_argument("--api_key", help="API key; better set in the environment as GOOGLE_API_KEY")
    parser.add_argument("--cse_id", required=True, help="id of the programmable search engine")
    parser.add_argument(
        "--snippet_only", action="store_true", help="no effect except to silence a notice: only snippets are served"
    )
    arguments, further = parser.parse_known_args(argv)
    use_key("GOOGLE_API_KEY", arguments.api_key, "--api_key")
    if not arguments.snippet_only:
        print("warning: pages are not fetched; the snippets are served, as with --snippet_only", file=sys.stderr)
    return retrieval_server.main(["--retriever_name", "google", "--online_field", f"cx={arguments.cse_id}", *further])


if __name__ == "__main__":
    sys.exit(main())
