"""The schema of a tool: from a function's hints and its docstring."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Optional

import pytest
from pydantic import Field

from tests.helpers.tool_calls import one
from verl.agent.tools import schema, tool_from_function
from verl.errors import ConfigError


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
