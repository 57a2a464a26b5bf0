"""The list of tools of a config: what it may name, and what is told of a list that cannot be used."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from tests.helpers.tool_calls import add, run
from verl.agent.tools import StatefulTools, Tool, ToolProvider, ToolResult, load_tools, tool, tool_from_function
from verl.errors import ConfigError, EnvironmentUnavailable
from verl.protocol import Prompt


class Upper(Tool):
    """A tool with options."""

    name, description = "upper", "Write in capitals."
    parameters = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}

    def __init__(self, mark: str = "") -> None:
        self.mark = mark

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        return ToolResult(arguments["text"].upper() + self.mark)


class Pair(ToolProvider):
    """Two tools of one place."""

    num_closed = 0

    def __init__(self) -> None:
        self.tools: Sequence[Tool] = [tool_from_function(add), Upper()]

    async def check(self) -> None:
        raise EnvironmentUnavailable("the place is closed")

    async def close(self) -> None:
        Pair.num_closed += 1


class Stuck(Upper):
    """Cannot be closed."""

    name = "stuck"

    async def close(self) -> None:
        raise OSError("still busy")


UPPER = Upper("!!")
NUMBER = 3


class Notes(StatefulTools):
    """A notebook."""

    def __init__(self, prompt: Prompt, start: str = "") -> None:
        super().__init__(prompt)
        self.text = start

    @tool
    def read(self) -> str:
        """Read the notes."""
        return self.text


def no_docstring(a: int) -> int:
    return a


class Abstract(Tool):
    """Lacks `call`."""


class Plain(Upper):
    def call(self, arguments: dict[str, Any]) -> ToolResult:  # type: ignore[override]
        return ToolResult("")


class Silent(Upper):
    description = " "


class Nothing(Upper):
    @classmethod
    def from_config(cls, *_: Any, **options: Any) -> Any:
        return None


class BadSchema(Upper):
    parameters = {"type": "object", "properties": {"text": {"type": "strin"}}}


class ListSchema(Upper):
    parameters = {"type": "array"}


class RemoteSchema(Upper):
    parameters = {"type": "object", "properties": {"text": {"$ref": "http://127.0.0.1:9/schema.json"}}}


class DanglingSchema(Upper):
    parameters = {"type": "object", "properties": {"text": {"$ref": "#/$defs/Text"}}}


def test_the_list_of_a_config() -> None:
    specs = [
        f"{__name__}.add",
        {
            "function": "tests.helpers.tool_calls.slow",
            "options": {"name": "wait", "description": "Waits.", "timeout_s": 2},
        },
        {"name": f"{__name__}.Upper", "options": {"mark": "!", "max_result_tokens": 9}},
    ]
    tools = load_tools(specs)
    assert [made["function"]["name"] for made in tools.schemas()] == ["add", "wait", "upper"]
    assert [made["function"]["description"] for made in tools.schemas()][1] == "Waits."
    assert [(made.timeout_s, made.max_result_tokens) for made in tools.tools] == [(60, None), (2, None), (60, 9)]
    assert [result.text for result in run(tools, ("upper", {"text": "a"}), ("add", {"first": 1}))] == ["A!", "1"]
    assert not tools.has_state
    assert run(load_tools([f"{__name__}.UPPER"]), ("upper", {"text": "a"}))[0].text == "A!!"
    assert load_tools([]).schemas() == []


def test_a_provider_gives_several_tools() -> None:
    tools = load_tools([f"{__name__}.Pair"])
    assert [made.name for made in tools.tools] == ["add", "upper"]
    with pytest.raises(EnvironmentUnavailable, match="the place is closed"):
        asyncio.run(tools.check())
    asyncio.run(tools.close())
    assert Pair.num_closed == 1
    with pytest.raises(ConfigError, match="two tools have the name 'add'"):
        load_tools([f"{__name__}.Pair", f"{__name__}.add"])
    assert Pair.num_closed == 2  # what the list started has ended


@pytest.mark.parametrize("order", [1, -1])
def test_all_are_closed_also_when_one_cannot_be(order: int) -> None:
    """A server that stays would keep its program running."""
    tools, before = load_tools([f"{__name__}.Pair", f"{__name__}.Stuck"][::order]), Pair.num_closed
    with pytest.raises(OSError, match="still busy"):
        asyncio.run(tools.close())
    assert Pair.num_closed == before + 1


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ("calculator", r"agent.tools is a str; make it a list"),
        ([3], r"agent.tools\[0\] is 3; write a name"),
        ([{}], r"agent.tools\[0\] has the keys \[\]; write one of name, function, mcp"),
        ([{"name": "a.b", "mcp": "x"}], r"has the keys \['name', 'mcp'\]"),
        ([{"name": "a.b", "option": {}}], r"has the unknown key 'option'"),
        ([{"name": "a.b", "options": 3}], r"agent.tools\[0\].options is 3"),
        ([{"function": 3}], r"agent.tools\[0\].function is 3"),
        (
            ["calculater"],
            r"there is no tool 'calculater' \(did you mean calculator\?\); the shipped ones are calculator",
        ),
        ([f"{__name__}.add", f"{__name__}.nothing"], r"agent.tools\[1\]=.*nothing.*give module.Name"),
        (["no_such_module_of_mine.add"], r"agent.tools\[0\]=no_such_module_of_mine.add: No module named"),
        (["breaks_at_import.add"], r"importing breaks_at_import raised ZeroDivisionError.*breaks_at_import.py:1"),
        ([f"{__name__}.NUMBER"], r"NUMBER is a int and no tool"),
        ([f"{__name__}.Abstract"], r"Abstract lacks call; write it"),
        ([f"{__name__}.no_docstring"], r"agent.tools\[0\]: tool .*no_docstring has no docstring"),
        ([f"{__name__}.add", f"{__name__}.add"], r"two tools have the name 'add'; leave one out, or rename it"),
        ([f"{__name__}.Notes", f"{__name__}.Notes"], r"agent.tools\[1\]: .*Notes is there twice"),
        ([{"function": f"{__name__}.add", "options": {"timeout": 1}}], r"no option 'timeout' \(did you mean timeout_s"),
        ([{"function": f"{__name__}.add", "options": {"timeout_s": 0}}], r"timeout_s is 0; make it more than 0"),
        ([{"function": f"{__name__}.add", "options": {"name": "a b"}}], r"has the name 'a b'; chat formats take"),
        ([{"name": f"{__name__}.Upper", "options": {"marks": 1}}], r"cannot be made with the options .*'marks'"),
        ([{"name": f"{__name__}.Notes", "options": {"begin": 1}}], r"Notes cannot be made with the options .*'begin'"),
        ([f"{__name__}.Plain"], r"tool upper: call is a plain function; write `async def call"),
        ([f"{__name__}.Silent"], r"tool upper has no description"),
        ([f"{__name__}.Nothing"], r"from_config of .*Nothing gave a NoneType; return a Tool"),
        ([f"{__name__}.BadSchema"], r"tool upper: its parameters are no JSON schema: .*'strin'"),
        ([f"{__name__}.ListSchema"], r"its parameters describe 'array', and arguments are an object"),
        ([f"{__name__}.RemoteSchema"], r"refer to 'http://127.0.0.1:9/schema.json', which is not in them"),
        ([f"{__name__}.DanglingSchema"], r"refer to '#/\$defs/Text', which is not in them"),
    ],
)
def test_a_list_that_cannot_be_used(specs: Any, message: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "breaks_at_import.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("breaks_at_import", None)
    with pytest.raises(ConfigError, match=message):
        load_tools(specs)
