"""Tools as data: schemas from functions, the list of a config, state of episodes, and the calls of a turn."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Optional

import pytest
from chat_tokenizer import chat_tokenizer
from pydantic import Field

from verl.agent.text import encode_outside
from verl.agent.tools import (
    CallLimits,
    CallResult,
    StatefulTools,
    Tool,
    ToolCall,
    ToolError,
    ToolProvider,
    ToolResult,
    ToolSet,
    load_tools,
    run_calls,
    schema,
    tool,
    tool_from_function,
)
from verl.errors import ConfigError, EnvironmentUnavailable
from verl.protocol import Prompt

TOKENIZER = chat_tokenizer()
PROMPT = Prompt((1,), "test", {"question": "?"})


def run(tools: ToolSet, *calls: tuple[str, Any], **limits: Any) -> list[CallResult]:
    """The results of one turn of an episode of its own."""

    async def turn() -> list[CallResult]:
        opened = await tools.open(PROMPT)
        try:
            return await run_calls(opened, [ToolCall(*call) for call in calls], TOKENIZER, CallLimits(**limits))
        finally:
            await opened.close()

    return asyncio.run(turn())


def one(function: Callable[..., Any], arguments: Any = None, **options: Any) -> CallResult:
    """The result of a single call of the function."""
    (result,) = run(ToolSet([tool_from_function(function, **options)]), (function.__name__, arguments or {}))
    return result


# Schemas.


@dataclass
class Place:
    """A point."""

    x: int
    y: float = 0.5


def everything(
    query: str,
    place: Place,
    kind: Literal["near", "far"] = "near",
    limit: Optional[int] = None,  # noqa: UP045  users write it so
    names: list[str] = [],  # noqa: B006  its default is in the schema
    weights: dict[str, float] | None = None,
    count: Annotated[int, "how many", Field(ge=1)] = 3,
    schema: bool = False,
) -> str:
    """Find things.

    In two paragraphs.

    Args:
        query (str): what to find: a word
            or several
        place: where
        names: of whom

    Returns:
        kind: not a parameter
    """
    return f"{query} {place!r} {kind} {limit} {names} {weights} {count} {schema}"


def test_a_function_is_a_tool_with_the_schema_of_its_hints_and_docstring() -> None:
    made = schema(tool_from_function(everything))
    assert made["type"] == "function" and made["function"]["name"] == "everything"
    assert made["function"]["description"] == "Find things.\n\nIn two paragraphs."
    assert made["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "what to find: a word or several"},
            "place": {"$ref": "#/$defs/Place", "description": "where"},
            "kind": {"type": "string", "enum": ["near", "far"], "default": "near"},
            "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
            "names": {"type": "array", "items": {"type": "string"}, "default": [], "description": "of whom"},
            "weights": {
                "anyOf": [{"type": "object", "additionalProperties": {"type": "number"}}, {"type": "null"}],
                "default": None,
            },
            "count": {"type": "integer", "minimum": 1, "default": 3, "description": "how many"},
            "schema": {"type": "boolean", "default": False},
        },
        "required": ["query", "place"],
        "additionalProperties": False,
        "$defs": {
            "Place": {
                "type": "object",
                "description": "A point.",
                "properties": {"x": {"type": "integer"}, "y": {"type": "number", "default": 0.5}},
                "required": ["x"],
                "additionalProperties": False,
            }
        },
    }


def test_arguments_arrive_as_the_hints_have_them() -> None:
    result = one(everything, '{"query": "sea", "place": {"x": 2.0}, "weights": {"a": 1}, "schema": true}')
    assert result.status == "ok"
    assert result.text == "sea Place(x=2, y=0.5) near None [] {'a': 1.0} 3 True"


GOOGLE = """Adds.

    Arguments:
        a (int, optional): the first: of two
            numbers
        b: the second

    Example:
        a: 1
"""
NUMPY = """Adds.

    Parameters
    ----------
    a : int
        the first: of two
        numbers
    b
        the second

    Returns
    -------
    a : int
        no parameter
"""
SPHINX = """Adds.

    :param int a: the first: of two
        numbers
    :param b: the second
    :returns: a
"""


@pytest.mark.parametrize("docstring", [GOOGLE, NUMPY, SPHINX], ids=["google", "numpy", "sphinx"])
def test_docstrings_of_every_style(docstring: str) -> None:
    def add(a: int, b: int) -> int:
        return a + b

    add.__doc__ = docstring
    made = tool_from_function(add)
    assert made.description == "Adds."
    texts = {name: part.get("description") for name, part in made.parameters["properties"].items()}
    assert texts == {"a": "the first: of two numbers", "b": "the second"}


def test_a_plain_docstring_is_the_description() -> None:
    def add(a: int) -> int:
        """Adds: one and one.

        Notes are kept, such as this:
            a: here
        """
        return a

    made = tool_from_function(add)
    assert made.description == "Adds: one and one.\n\nNotes are kept, such as this:\n    a: here"
    assert made.parameters["properties"] == {"a": {"type": "integer"}}


def no_docstring(a: int) -> int:
    return a


def no_hint(a):  # noqa: ANN001
    """Adds."""


def any_number(*a: int) -> None:
    """Adds."""


def unknown_hint(a: Nowhere) -> None:  # noqa: F821
    """Adds."""


def no_schema(a: threading.Lock) -> None:
    """Adds."""


def callable_hint(a: Callable[[int], int]) -> None:
    """Adds."""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_docstring, "no_docstring has no docstring; write what it does"),
        (no_hint, "its parameter a has no type hint; write a: str"),
        (any_number, r"its parameter \*a: .* cannot be given by name"),
        (unknown_hint, "its type hints cannot be read: name 'Nowhere' is not defined"),
        (no_schema, "no schema can be made of its type hints"),
        (callable_hint, "no JSON schema can be made of its type hints"),
    ],
)
def test_a_function_that_is_no_tool(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tool_from_function(function)


# The calls of a turn.


def add(first: int, second: int = 0) -> int:
    """Add two numbers."""
    return first + second


async def slow(seconds: float, text: str) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return text


def refuse(why: str) -> str:
    """Refuse."""
    raise ToolError(why)


def tools_of(*functions: Callable[..., Any], **options: Any) -> ToolSet:
    return ToolSet([tool_from_function(function, **options) for function in functions])


def test_calls_run_at_once_and_each_fails_alone() -> None:
    """The last two wait for each other: they would never end one after the other."""
    meeting = threading.Barrier(2)

    def meet(number: int) -> int:
        """Meet the other one."""
        meeting.wait(60)
        return number

    results = run(
        tools_of(add, slow, refuse, meet),
        ("slow", {"seconds": 0.2, "text": "late"}),
        ("add", {"first": 1, "second": 2}),
        ("subtract", {}),
        ("add", {"first": "one"}),
        ("add", '{"first": 1'),
        ("add", "[1]"),
        ("add", '{"first": NaN}'),
        ("add", {"first": 1, "third": 3}),
        ("refuse", {"why": "not today"}),
        ("meet", {"number": 1}),
        ("meet", {"number": 2}),
    )
    assert [(result.status, result.text) for result in results] == [
        ("ok", "late"),
        ("ok", "3"),
        ("unknown_tool", "Error: there is no tool 'subtract'. The tools are: add, slow, refuse, meet."),
        ("invalid_arguments", "Error: wrong arguments for add: first: 'one' is not of type 'integer'."),
        ("invalid_arguments", "Error: the arguments are no JSON: Expecting ',' delimiter: line 1 column 12 (char 11)."),
        ("invalid_arguments", "Error: the arguments are no JSON object."),
        ("invalid_arguments", "Error: the arguments are no JSON: NaN is no JSON number."),
        (
            "invalid_arguments",
            "Error: wrong arguments for add: Additional properties are not allowed ('third' was unexpected).",
        ),
        ("error", "Error: not today"),
        ("ok", "1"),
        ("ok", "2"),
    ]
    assert results[1].event.pop("milliseconds") >= 0
    assert results[1].event == {"tool": "add", "arguments": {"first": 1, "second": 2}, "status": "ok"}


def test_half_characters_and_deep_nesting_of_the_policy_harm_nobody() -> None:
    def say(text: str) -> str:
        """Say it."""
        return text

    deep = "[" * 100_000
    results = run(
        tools_of(say), ("say", '{"text": "\\ud83d!"}'), ("say", {"text": "\ud83d"}), ("say", deep), ("\udc00", {})
    )
    assert [result.text for result in results[:2]] == ["\ufffd!", "\ufffd"]
    assert [result.status for result in results] == ["ok", "ok", "invalid_arguments", "unknown_tool"]
    assert results[0].event["arguments"] == {"text": "\ufffd!"}


def test_a_call_that_never_ends_is_stopped() -> None:
    ended: list[str] = []
    release = threading.Event()

    async def patient() -> str:
        """Wait, and clear away at the end."""
        try:
            await asyncio.sleep(600)
        finally:
            ended.append("cleared")
        return ""

    def stubborn() -> str:
        """Ignore everything."""
        release.wait(600)
        return ""

    async def deaf() -> str:
        """Ignore that it is cancelled, the first time."""
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            await asyncio.sleep(600)
        return ""

    start = time.monotonic()
    results = run(
        tools_of(patient, stubborn, add, timeout_s=0.1), ("patient", {}), ("stubborn", {}), ("add", {"first": 4})
    )
    assert [result.status for result in results] == ["timeout", "timeout", "ok"]
    assert results[0].text == "Error: patient took longer than 0.1 s and was stopped."
    assert ended == ["cleared"]
    assert time.monotonic() - start < 60
    release.set()
    assert one(deaf, timeout_s=0.1).status == "timeout"


def test_a_function_that_gives_a_coroutine_is_awaited() -> None:
    class Later:
        """Answers later."""

        async def __call__(self, text: str) -> str:
            return text

    tools = ToolSet([tool_from_function(Later(), name="later")])
    assert run(tools, ("later", {"text": "now"}))[0].text == "now"


def returns(value: Any) -> Callable[[], Any]:
    def give() -> Any:
        """Give it."""
        return value

    return give


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("text", "text"),
        (None, "(no output)"),
        (float("nan"), "NaN"),
        (0.1, "0.1"),
        (True, "true"),
        ({"a": [1, None]}, '{"a":[1,null]}'),
        (Place(1), '{"x":1,"y":0.5}'),
        ("half \ud83d", "half \ufffd"),
        (ToolResult("own", {"score": float("inf"), "raw": b"\xff"}), "own"),
    ],
)
def test_what_a_function_returns_is_text(value: Any, text: str) -> None:
    result = one(returns(value))
    assert (result.status, result.text) == ("ok", text)
    if isinstance(value, ToolResult):
        assert result.event["score"] == "Infinity" and isinstance(result.event["raw"], str)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"\xff", "returned a bytes; decode it to text"),
        (object(), "returned a object; return text, or what JSON can hold"),
        ((x for x in "ab"), "returned a generator; return text"),
        ([object()], "returned what JSON cannot hold"),
        (ToolResult(text=3), "gave a text that is a int"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_text_is_an_error_of_the_tool(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        one(returns(value))


def test_ten_megabytes_are_cut_and_short_results_leave_their_room_to_long_ones() -> None:
    def long(words: int) -> str:
        """Write much."""
        return "word " * words

    (cut,) = run(tools_of(long), ("long", {"words": 2_000_000}), max_result_tokens=64)
    assert len(encode_outside(TOKENIZER, cut.text)) <= 64
    assert cut.text.startswith("word word") and cut.text.endswith("\n[cut: 10000000 characters in all]")
    assert cut.event["cut"] is True

    results = run(
        tools_of(long, add),
        ("add", {"first": 7}),
        ("long", {"words": 500}),
        ("long", {"words": 500}),
        max_turn_tokens=201,
    )
    sizes = [len(encode_outside(TOKENIZER, result.text)) for result in results]
    assert results[0].text == "7" and sizes[0] == 1
    assert min(sizes[1:]) > 80 and sum(sizes) <= 201

    (own,) = run(tools_of(long, max_result_tokens=10), ("long", {"words": 500}), max_result_tokens=1000)
    assert 0 < len(encode_outside(TOKENIZER, own.text)) <= 10


def test_calls_beyond_the_limits_are_answered_but_not_run() -> None:
    seen: list[int] = []

    def note(number: int) -> None:
        """Note it."""
        seen.append(number)

    async def turns() -> list[list[CallResult]]:
        opened = await tools_of(note).open(PROMPT)
        limits = CallLimits(max_calls_per_turn=2, max_calls=3)
        return [
            await run_calls(opened, [ToolCall("note", {"number": number}) for number in turn], TOKENIZER, limits)
            for turn in ([1, 2, 3], [4, 5], [6])
        ]

    first, second, third = asyncio.run(turns())
    assert [result.status for result in first + second + third] == ["ok", "ok", "not_run", "ok", "not_run", "not_run"]
    assert first[2].text == "Error: this call was not run: at most 2 calls are allowed in one turn."
    assert second[1].text == third[0].text == "Error: this call was not run: the limit of 3 calls is reached."
    assert sorted(seen) == [1, 2, 4]


def down() -> str:
    """Ask a service that is down."""
    raise EnvironmentUnavailable("the service is down; start it")


def refused() -> str:
    """Ask a port where nobody listens."""
    raise ConnectionRefusedError("port 1")


def broken() -> str:
    """Have a bug."""
    return {}["x"]  # type: ignore[index]


def quits() -> str:
    """End the process."""
    sys.exit(3)


async def quits_too() -> str:
    """End the process."""
    sys.exit(3)


def stops() -> str:
    """End an iteration that is none."""
    return next(iter(()))


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (quits, ConfigError, r"tool quits raised RuntimeError: SystemExit\(3\)"),
        (quits_too, ConfigError, r"tool quits_too raised RuntimeError: SystemExit\(3\)"),
        (stops, ConfigError, r"tool stops raised RuntimeError: StopIteration\(\)"),
        (down, EnvironmentUnavailable, "the service is down"),
        (refused, EnvironmentUnavailable, "tool refused: ConnectionRefusedError: port 1"),
        (
            broken,
            ConfigError,
            r"tool broken raised KeyError: 'x' \(test_tools.py:\d+\); correct it, or raise ToolError",
        ),
    ],
)
def test_failing_infrastructure_and_code_are_not_the_policys_doing(
    function: Callable[..., Any], kind: type[Exception], message: str
) -> None:
    cancelled: list[bool] = []

    async def other() -> str:
        """Wait until cancelled."""
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        return ""

    with pytest.raises(kind, match=message):
        run(tools_of(function, other), ("other", {}), (function.__name__, {}))
    assert cancelled == [True]


# The state of an episode.


class Notes(StatefulTools):
    """A notebook."""

    closed = 0

    def __init__(self, prompt: Prompt, start: str = "") -> None:
        super().__init__(prompt)
        self.text = start

    @tool
    def write(self, text: str) -> None:
        """Write a note.

        Args:
            text: the note
        """
        before = self.text
        time.sleep(0.02)
        self.text = before + text

    @tool
    async def read(self) -> str:
        """Read the notes."""
        return self.text

    @tool
    def wait(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    async def close(self) -> None:
        type(self).closed += 1


def test_each_episode_has_its_own_state_whose_calls_run_in_order() -> None:
    tools = load_tools([{"name": f"{__name__}.Notes", "options": {"start": "-", "timeout_s": 50}}])
    assert tools.has_state and [made.name for made in tools.tools] == ["write", "read", "wait"]
    assert tools.tools[0].parameters["properties"] == {"text": {"type": "string", "description": "the note"}}
    assert tools.tools[0].timeout_s == 50

    async def episodes() -> list[list[str]]:
        opened = [await tools.open(PROMPT), await tools.open(PROMPT)]
        calls = [
            [*(ToolCall("write", {"text": letter}) for letter in word), ToolCall("read", {})] for word in ("abcd", "x")
        ]
        results = await asyncio.gather(
            *(run_calls(one, turn, TOKENIZER) for one, turn in zip(opened, calls, strict=True))
        )
        for one in opened:
            await one.close()
            await one.close()
        return [[result.text for result in turn] for turn in results]

    results = run(tools, ("write", {"text": "a"}), ("write", {}), ("read", {}))
    assert [result.text for result in results[::2]] == ["(no output)", "-a"]  # a wrong call does not break the order

    before = Notes.closed
    first, second = asyncio.run(episodes())
    assert first[-1] == "-abcd" and second[-1] == "-x"
    assert Notes.closed == before + 2


class Broken(StatefulTools):
    """Cannot be made."""

    def __init__(self, prompt: Prompt) -> None:
        raise KeyError("question")

    @tool
    def nothing(self) -> None:
        """Do nothing."""


def test_a_state_that_cannot_be_made_is_an_error_and_the_others_are_closed() -> None:
    tools, before = load_tools([f"{__name__}.Notes", f"{__name__}.Broken"]), Notes.closed
    with pytest.raises(ConfigError, match=r"agent.tools: .*Broken cannot be made: KeyError: 'question' \(test_tools"):
        asyncio.run(tools.open(PROMPT))
    assert Notes.closed == before + 1


def test_a_state_that_is_busy_says_so() -> None:
    tools = load_tools([{"name": f"{__name__}.Notes", "options": {"timeout_s": 0.2}}])
    results = run(tools, ("wait", {"seconds": 20}), ("write", {"text": "a"}), ("read", {}))
    assert [result.status for result in results] == ["timeout", "error", "ok"]
    assert "an earlier call is still running" in results[1].text


# The list of a config.


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


UPPER = Upper("!!")
NUMBER = 3


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
        {"function": f"{__name__}.slow", "options": {"name": "wait", "description": "Waits.", "timeout_s": 2}},
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
