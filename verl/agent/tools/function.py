"""Tools made of Python functions, and of classes whose methods share the state of one episode.

    def add(first: int, second: int = 0) -> int:
        \"\"\"Add two numbers.

        Args:
            first: the first number
        \"\"\"
        return first + second

    tool_from_function(add)

The JSON schema comes from the type hints and the docstring. A plain function runs in a thread of its own, so that it
blocks nothing; a coroutine function is awaited.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import functools
import inspect
import threading
import typing
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticSerializationError, to_json

from verl.agent.tools.definition import Tool, ToolError, ToolResult
from verl.agent.tools.docstrings import read_docstring
from verl.errors import ConfigError, EnvironmentUnavailable
from verl.process.by_name import dotted_name

if TYPE_CHECKING:
    from verl.protocol import Prompt

NO_OUTPUT = "(no output)"
_MOST_STUCK = 256  # threads of calls that were given up and never ended
Function = TypeVar("Function", bound=Callable[..., Any])


def tool_from_function(
    function: Callable[..., Any],
    *,
    name: str | None = None,
    description: str | None = None,
    timeout_s: float | None = 60.0,
    max_result_tokens: int | None = None,
) -> FunctionTool:
    """The function as a tool; by default with its own name, and the description of its docstring.

    Every parameter needs a type hint: str, int, float, bool, Literal, Optional, list, dict, a dataclass or what else
    pydantic knows; `Annotated[int, "how many"]` describes it, as does the docstring. The function returns text, or what
    JSON can hold (the policy reads it as JSON), or a `ToolResult`. It raises `ToolError` for what the policy did wrong.
    Raises `ConfigError` if no schema can be made of it.
    """
    return FunctionTool(function, name, description, timeout_s, max_result_tokens)


def tool(method: Function) -> Function:
    """Mark a method of a class derived from `StatefulTools` as a tool."""
    method.__is_tool__ = True  # type: ignore[attr-defined]
    return method


class StatefulTools:
    """Base of a class whose methods marked with `@tool` are tools that share the state of one episode.

    An object is made for each episode, with its prompt. Calls of one turn run one after the other, in their order.
    """

    def __init__(self, prompt: Prompt) -> None:
        """A subclass may take keyword arguments too: the options of its entry in `agent.tools`. It must not block."""
        self.prompt = prompt

    async def close(self) -> None:
        """Release what the episode holds. It is called once, however the episode ends."""

    @classmethod
    def declared(cls) -> list[FunctionTool]:
        """The tools of the class, in the order of its methods. Raises `ConfigError` if there are none."""
        methods = {name: member for kind in reversed(cls.__mro__) for name, member in vars(kind).items()}
        made = [
            FunctionTool(method, None, None, 60.0, None, is_method=True)
            for method in methods.values()
            if getattr(method, "__is_tool__", False)
        ]
        if not made:
            raise ConfigError(f"{dotted_name(cls)} has no tools; put @tool (of verl.agent.tools) before its methods")
        for one in made:
            one.owner = cls
        return made


class Stuck:
    """How many calls of a function, or of the tools of a state, were given up and have not ended."""

    def __init__(self) -> None:
        self.number = 0


class FunctionTool(Tool):
    """See `tool_from_function`."""

    def __init__(
        self,
        function: Callable[..., Any],
        name: str | None,
        description: str | None,
        timeout_s: float | None,
        max_result_tokens: int | None,
        is_method: bool = False,
    ) -> None:
        """`is_method`: the first parameter is the state, which `bound_to` gives."""
        self._function = function
        self._where = f"tool {dotted_name(function)}"
        self._is_coroutine = inspect.iscoroutinefunction(inspect.unwrap(function))
        # What the policy reads of a tool: its name, its description, and the schema of its arguments.
        text, texts = read_docstring(inspect.getdoc(function))
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        self.description = description or text
        if not self.description:
            raise ConfigError(f"{self._where} has no docstring; write what it does, for the policy to read")
        self._names, self._model = _model_of(function, texts, is_method, self._where)
        self.parameters = _schema_of(self._model, self._where)
        self.timeout_s, self.max_result_tokens = timeout_s, max_result_tokens
        self.owner: type[StatefulTools] | None = None
        self._stuck = Stuck()

    def bound_to(self, state: StatefulTools, stuck: Stuck) -> FunctionTool:
        """This tool for one episode."""
        bound = copy.copy(self)
        bound._function = functools.partial(self._function, state)
        bound.state, bound._stuck = state, stuck
        return bound

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        """See `Tool.call`. What the function returns and no text can be made of raises `ConfigError`."""
        call = functools.partial(self._function, **self._read(arguments))
        try:
            value = await (call() if self._is_coroutine else self._in_thread(call))
            value = await value if inspect.isawaitable(value) else value
        except SystemExit as error:  # which would end the process of all episodes
            raise RuntimeError(repr(error)) from error
        return value if isinstance(value, ToolResult) else ToolResult(as_text(value, self._where))

    def _read(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as the type hints have them. Those that are not given are left to the function's defaults."""
        try:
            read = self._model.model_validate(arguments)
        except ValidationError as error:
            found = error.errors(include_url=False, include_context=False, include_input=False)
            problems = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in found[:3])
            raise ToolError(f"wrong arguments: {problems}") from error
        return {self._names[field]: getattr(read, field) for field in read.model_fields_set}

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        # A call that was given up still runs in its thread: it may use the state, and hang for ever.
        if self.state is not None and self._stuck.number:
            raise ToolError("an earlier call is still running, and this tool does one thing at a time")
        if self._stuck.number >= _MOST_STUCK:
            raise EnvironmentUnavailable(f"{self._where}: {self._stuck.number} calls were given up and never ended")
        running = run_in_thread(call)
        try:
            # The shield keeps the future open when the wait is cancelled, so that the end of the thread is noticed.
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if not running.done():
                self._stuck.number += 1
                running.add_done_callback(self._came_back)
            raise

    def _came_back(self, running: asyncio.Future[Any]) -> None:
        self._stuck.number -= 1
        if not running.cancelled():
            running.exception()


def run_in_thread(call: Callable[[], Any]) -> asyncio.Future[Any]:
    """The result of `call()`, in a thread of its own that never delays the end of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(value: Any, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is None:
            future.set_result(value)
        else:
            # of others, a future takes none, or they would end the event loop
            passes = isinstance(error, Exception) and not isinstance(error, StopIteration)
            future.set_exception(error if passes else RuntimeError(repr(error)))

    def work() -> None:
        value, error = None, None
        try:
            value = context.run(call)
        except BaseException as raised:  # it belongs to the one who waits
            error = raised
        with suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=work, name="tool", daemon=True).start()
    return future


def as_text(value: Any, where: str) -> str:
    """What the policy reads of a value that a tool returned. Raises `ConfigError`, which begins with `where`."""
    if value is None:
        return NO_OUTPUT
    if isinstance(value, str):
        return str(value)
    plain = isinstance(value, bool | int | float | list | tuple | dict | BaseModel)
    if plain or (is_dataclass(value) and not isinstance(value, type)):
        try:
            return to_json(value, inf_nan_mode="constants").decode()
        except (PydanticSerializationError, ValueError, RecursionError) as error:
            raise ConfigError(f"{where} returned what JSON cannot hold ({error}); return text") from error
    hint = "; decode it to text, or describe it in words" if isinstance(value, bytes | bytearray | memoryview) else ""
    raise ConfigError(f"{where} returned a {type(value).__name__}{hint or '; return text, or what JSON can hold'}")


# The schema of a function's arguments.


class _PlainSchema(GenerateJsonSchema):
    """A JSON schema without titles, which repeat the names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def emit_warning(self, kind: Any, detail: str) -> None:
        """A default that JSON cannot hold is left out."""


def _model_of(
    function: Callable[..., Any], texts: Mapping[str, str], is_method: bool, where: str
) -> tuple[dict[str, str], type[BaseModel]]:
    """The names of the parameters by the fields of the model, and the model that reads the arguments."""
    try:
        parameters = list(inspect.signature(function).parameters.values())[is_method:]
        target = inspect.unwrap(function)
        hints = typing.get_type_hints(target if hasattr(target, "__code__") else target.__call__, include_extras=True)
    except (NameError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{where}: its type hints cannot be read: {error}") from error
    names: dict[str, str] = {}
    fields: dict[str, Any] = {}
    for number, parameter in enumerate(parameters):
        name = parameter.name
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(f"{where}: its parameter {parameter} cannot be given by name; write named parameters")
        if name not in hints:
            raise ConfigError(f"{where}: its parameter {name} has no type hint; write {name}: str, say")
        hint, described = _without_text(hints[name])
        about = described or texts.get(name)
        default = ... if parameter.default is parameter.empty else parameter.default
        # a field of another name, as the model has attributes of its own: "schema", "copy"
        names[f"field_{number}"] = name
        fields[f"field_{number}"] = (hint, Field(default, alias=name, description=about))
    settings = ConfigDict(extra="forbid", defer_build=False, protected_namespaces=())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return names, create_model("arguments", __config__=settings, **fields)
    except (PydanticUserError, TypeError, NameError) as error:
        message = str(error).splitlines()[0]
        raise ConfigError(f"{where}: no schema can be made of its type hints: {message}") from error


def _without_text(hint: Any) -> tuple[Any, str | None]:
    """A hint without the texts of `Annotated[...]`, and the first of them."""
    if typing.get_origin(hint) is not typing.Annotated:
        return hint, None
    kind, *metadata = typing.get_args(hint)
    text = next((one for one in metadata if isinstance(one, str)), None)
    rest = tuple(one for one in metadata if not isinstance(one, str))
    return (typing.Annotated[(kind, *rest)] if rest else kind), text


def _schema_of(model: type[BaseModel], where: str) -> dict[str, Any]:
    try:
        made = model.model_json_schema(schema_generator=_PlainSchema)
    except PydanticUserError as error:
        message = str(error).splitlines()[0]
        raise ConfigError(f"{where}: no JSON schema can be made of its type hints: {message}") from error
    made.pop("title", None)
    for part in made.get("$defs", {}).values():
        part.pop("title", None)
    return {"type": "object", "properties": {}} | made
