"""The search as a tool of the Model Context Protocol (MCP)."""
