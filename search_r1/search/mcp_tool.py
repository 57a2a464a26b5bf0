"""The search tool of the Model Context Protocol on stdin and stdout: see `search_r1.search.mcp_server.tool`."""

import sys

from search_r1.search.mcp_server.tool import main

if __name__ == "__main__":
    sys.exit(main())
