"""A search agent on OpenAI's SDK, which this framework trains as it is: `agent.program=example.openai_agent.play`.

It knows nothing of training: it has an address, a key, a question, and tools of its own.
"""

from __future__ import annotations

import ast
import json
import operator
import ssl
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

TLS = ssl.create_default_context()  # takes longer than all calls of an episode: made once
OPERATORS = {ast.Sub: operator.sub, ast.Add: operator.add, ast.Mult: operator.mul, ast.Div: operator.truediv}


def tool(name: str, description: str, *parameters: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {one: {"type": "string"} for one in parameters}}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    tool("search", "Search a collection of texts. Gives the best passage.", "query", "queries"),
    tool("open_page", "Open the page that a passage is taken from.", "id", "part"),
    tool("calculator", "Evaluate an arithmetic expression.", "expression"),
]


async def use(name: str, arguments: dict[str, str], retriever: Any) -> str:
    """What the model reads after a call."""
    if name == "search":
        reply = await retriever.post("/retrieve", json={"queries": [arguments["query"].strip()], "topk": 1})
        [[document]] = reply.raise_for_status().json()["result"]
        title, _, text = document["contents"].partition("\n")
        return f"Doc 1(Title: {title}, id: {document['id']}) {text}"
    if name == "open_page":
        reply = await retriever.post("/page", json={"id": arguments["id"].strip()})
        page = reply.raise_for_status().json()["page"]
        return f"Title: {page['title']}\n{page['text']}" if page else "Error: there is no such passage."
    return f"{calculate(ast.parse(arguments['expression'].strip(), mode='eval').body):g}"


def calculate(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp() if type(node.op) in OPERATORS:
            return float(OPERATORS[type(node.op)](calculate(node.left), calculate(node.right)))
        case ast.Call(func=ast.Name(id="abs"), args=[argument]):
            return abs(calculate(argument))
    raise ValueError(f"{ast.unparse(node)} is no arithmetic")


async def play(task: Any) -> str:
    """Answer the question of a task; returns the model's last message."""
    messages: list[Any] = [*task.messages]
    base = task.retriever_url.removesuffix("/retrieve")
    async with DefaultAsyncHttpxClient(base_url=base, verify=TLS) as retriever:
        client = AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, http_client=retriever)
        while True:
            reply = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)  # type: ignore[arg-type]
            said = reply.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            if not said.tool_calls:
                return said.content or ""
            for call in said.tool_calls:
                try:
                    result = await use(call.function.name, json.loads(call.function.arguments), retriever)
                except (KeyError, ValueError, SyntaxError, ZeroDivisionError) as error:
                    result = f"Error: {error}"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
