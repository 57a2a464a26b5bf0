"""The tools that this project ships: search, open_page, calculator, and those of MCP servers."""
