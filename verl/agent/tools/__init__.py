"""Tools that a policy calls: what a tool is, tools made of functions and classes, and running the calls of a turn."""

from verl.agent.tools.definition import Tool, ToolError, ToolProvider, ToolResult, schema
from verl.agent.tools.function import StatefulTools, tool, tool_from_function
from verl.agent.tools.loading import ToolSet, load_tools, need_retriever, uses_retriever
from verl.agent.tools.running import CallLimits, CallResult, ToolCall, run_calls

__all__ = [
    "CallLimits",
    "CallResult",
    "StatefulTools",
    "Tool",
    "ToolCall",
    "ToolError",
    "ToolProvider",
    "ToolResult",
    "ToolSet",
    "load_tools",
    "need_retriever",
    "run_calls",
    "schema",
    "tool",
    "tool_from_function",
    "uses_retriever",
]
