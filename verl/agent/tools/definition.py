"""A tool is data: a name, a description, a JSON schema of its arguments, and a coroutine that answers a call."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from jsonschema.exceptions import SchemaError, ValidationError
from jsonschema.validators import Draft202012Validator, validator_for
from jsonschema_specifications import REGISTRY
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from verl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.config import Config

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # what the chat formats of models allow
_SHOWN_CHARS, _SHOWN_ERRORS = 200, 3


class ToolError(Exception):
    """The policy used a tool wrongly: a tool raises this, and the policy reads its message as the result."""


@dataclass(frozen=True)
class ToolResult:
    """What a call gave: `text` is what the policy reads, `event` what is stored with the trajectory (as JSON)."""

    text: str
    event: Mapping[str, Any] = field(default_factory=dict)


class Tool(ABC):
    """Something the policy can call. One object serves all episodes of a process, and several calls at once."""

    name: str
    """What the policy calls it: at most 64 letters, digits, _ and -."""

    description: str
    """What the policy reads about it."""

    parameters: Mapping[str, Any]
    """JSON schema of the arguments, which are an object."""

    timeout_s: float | None = 60.0
    """Maximum time of a call, in seconds; after it, the policy reads that the call took too long. None: no limit."""

    max_result_tokens: int | None = None
    """Maximum length of what the policy reads, in tokens; None: that of the run."""

    example: Mapping[str, Any] | None = None
    """Arguments of a call that changes nothing: preflight and the start of training try the tool with them."""

    needs_retriever: bool = False
    """Whether the retriever of the run answers its calls. If no tool of a chat model does, nothing asks for one."""

    state: object | None = None
    """What calls share that must not run at once: those of one turn run one after the other. None: nothing."""

    @classmethod
    def from_config(cls, config: Config | None, tokenizer: PreTrainedTokenizerBase | None, **options: Any) -> Self:
        """The tool of a run, by its entry in `agent.tools`; by default the class is called with the options."""
        return cls(**options)

    @abstractmethod
    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        """Answer a call whose arguments agree with `parameters`.

        Raises `ToolError` for what the policy did wrong, and `EnvironmentUnavailable` when infrastructure fails.
        """

    async def check(self) -> None:  # noqa: B027  nothing behind it, nothing to check
        """Raise `EnvironmentUnavailable` if the service behind the tool cannot be reached."""

    async def close(self) -> None:  # noqa: B027
        """Release resources."""


class ToolProvider(ABC):
    """Several tools that come from one place, such as a server."""

    tools: Sequence[Tool]

    @classmethod
    def from_config(cls, config: Config | None, tokenizer: PreTrainedTokenizerBase | None, **options: Any) -> Self:
        """The tools of a run, by their entry in `agent.tools`; by default the class is called with the options."""
        return cls(**options)

    async def check(self) -> None:  # noqa: B027
        """Raise `EnvironmentUnavailable` if what is behind the tools cannot be reached."""

    async def close(self) -> None:  # noqa: B027
        """Release resources. The tools themselves are not closed."""


def schema(tool: Tool) -> dict[str, Any]:
    """The tool in OpenAI's form, which chat templates read."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


class ArgumentChecker:
    """Checks arguments against a JSON schema. No part of the schema is ever fetched from elsewhere."""

    def __init__(self, parameters: object, where: str) -> None:
        """Raises `ConfigError`, which begins with `where`, if the schema is none, is not that of an object, or refers
        to something outside."""
        if not isinstance(parameters, Mapping):
            raise ConfigError(f"{where}: its parameters are a {type(parameters).__name__}; give a JSON schema")
        # A schema may name its dialect; one that does not is read as the draft of 2020-12.
        kind = validator_for(parameters, default=Draft202012Validator)
        try:
            kind.check_schema(parameters)
        except SchemaError as error:
            raise ConfigError(f"{where}: its parameters are no JSON schema: {_problem(error)}; correct them") from error
        if parameters.get("type", "object") != "object":
            raise ConfigError(
                f"{where}: its parameters describe {parameters['type']!r}, and arguments are an object; write "
                '{"type": "object", "properties": {...}}'
            )
        # Nothing is fetched, so that a reference to elsewhere would only fail at a call.
        _check_references(parameters, where)
        self._validator = kind(parameters, registry=REGISTRY)

    def problems(self, arguments: Mapping[str, Any]) -> str:
        """What is wrong with the arguments, in words; "" if nothing is."""
        found: list[ValidationError] = []
        try:
            for error in self._validator.iter_errors(arguments):
                found.append(error)
                if len(found) == _SHOWN_ERRORS:
                    break
        except RecursionError:
            return "they are nested too deeply"
        return "; ".join(map(_problem, found))


def _check_references(parameters: Mapping[str, Any], where: str) -> None:
    resolver = REGISTRY.with_resource("", DRAFT202012.create_resource(parameters)).resolver()
    for reference in _references(parameters):
        try:
            if not reference.startswith("#"):
                raise Unresolvable(ref=reference)
            resolver.lookup(reference)
        except (Unresolvable, ValueError) as error:
            raise ConfigError(
                f"{where}: its parameters refer to {reference!r}, which is not in them; put it under $defs and refer "
                "to '#/$defs/NAME'"
            ) from error


def _references(part: object) -> list[str]:
    if isinstance(part, Mapping):
        own = [part["$ref"]] if isinstance(part.get("$ref"), str) else []
        return own + [reference for value in part.values() for reference in _references(value)]
    return [reference for value in part for reference in _references(value)] if isinstance(part, list) else []


def _problem(error: ValidationError | SchemaError) -> str:
    place = ".".join(map(str, error.absolute_path))
    message = error.message if len(error.message) <= _SHOWN_CHARS else f"{error.message[:_SHOWN_CHARS]}..."
    return f"{place}: {message}" if place else message
