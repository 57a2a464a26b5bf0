"""A server of the Model Context Protocol for tests, written with the official SDK: `mcp_program.py [PORT]`.

With a port it serves streamable HTTP, else stdin and stdout.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated

import anyio
from mcp import MCPError
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field

server = MCPServer("tests")


@server.tool()
def add(first: Annotated[int, Field(description="the first number")], second: int = 0) -> int:
    """Add two numbers."""
    return first + second


@server.tool()
async def slow(seconds: float) -> str:
    """Wait. In the folder $MCP_TESTS_SLOW each call adds a letter to the file `begun`; none ends beside a `hold`."""
    folder = Path(os.environ.get("MCP_TESTS_SLOW", "/nowhere"))
    if folder.is_dir():
        with (folder / "begun").open("a") as begun:
            begun.write("x")
    await anyio.sleep(seconds)
    while (folder / "hold").exists():
        await anyio.sleep(0.05)
    return "waited"


@server.tool()
def fail(why: str) -> str:
    """Raise an error."""
    raise ToolError(why)


@server.tool()
def crash() -> str:
    """Have a bug."""
    raise KeyError("x")


@server.tool()
def refuse(code: int) -> str:
    """Answer with an error of the protocol."""
    raise MCPError(code=code, message="there is no such city")


@server.tool()
async def die(seconds: float = 0.0) -> str:
    """End the server."""
    await anyio.sleep(seconds)
    os._exit(3)


@server.tool()
def fragile(number: int) -> int:
    """Double a number, but end the server if the file $MCP_TESTS_DIE is there, which is then no more."""
    if (marker := Path(os.environ["MCP_TESTS_DIE"])).exists():
        marker.unlink()
        os._exit(3)
    return 2 * number


@server.tool()
async def hang(seconds: float) -> str:
    """Block the whole server."""
    time.sleep(seconds)  # noqa: ASYNC251
    return "back"


@server.tool()
def complain(megabytes: int) -> str:
    """Write that much to stderr."""
    print("x" * megabytes * 2**20 + " the disk is full", file=sys.stderr, flush=True)
    return "told"


@server.tool(name="process.id")
def process_id() -> int:
    """The number of this process."""
    return os.getpid()


if __name__ == "__main__":
    if sys.argv[1:] == ["broken"]:
        sys.exit("no licence was found")
    if sys.argv[1:]:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
