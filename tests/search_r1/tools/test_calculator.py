"""The calculator: exact values, limits, and errors that the policy can read."""

from __future__ import annotations

import asyncio
from fractions import Fraction

import pytest
from chat_tokenizer import chat_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from search_r1.tools.calculator import calculate
from verl.agent.tools import ToolCall, ToolError, load_tools, run_calls
from verl.protocol import Prompt


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        ("(3 + 4.5) * 2 ** 3", "60"),
        ("0.1 + 0.2", "0.3"),
        ("-1.50", "-1.5"),
        ("-0.25 * 0.5", "-0.125"),
        ("1 / 3", "0.333333333333333"),
        ("2 / 3 * 3", "2"),
        ("1 / 8", "0.125"),
        ("7 // 2", "3"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("7.5 % 2", "1.5"),
        ("2 ** -2", "0.25"),
        ("2 ** 0.5", "1.4142135623731"),
        ("4 ** 0.5", "2"),
        ("1_000 * 1e3", "1000000"),
        ("1.5e-3", "0.0015"),
        ("0x10", "16"),
        ("abs(-3) + round(2.567, 2)", "5.57"),
        ("round(2.5)", "2"),
        ("round(1234, -2)", "1200"),
        ("min(1, 2 / 3) + max(4, 5, 6)", "6.66666666666667"),
        ("  +5 ", "5"),
        ("2 ** 1000", str(2**1000)),
        ("1 ** 999999999999", "1"),
        ("(-1) ** 999999999999", "-1"),
        ("1e300 * 1e300", "1" + "0" * 600),
        ("123456789012345678901234567890 + 1", "123456789012345678901234567891"),
    ],
)
def test_values(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "this is no arithmetic expression"),
        ("1 +", "this is no arithmetic expression"),
        ("1 / 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("0 ** -0.5", "division by zero"),
        ("5 % 0", "division by zero"),
        ("9 ** 9 ** 9", "a number is too large"),
        ("10.0 ** 100000", "a number is too large"),
        ("1e999999999", "a number is too large"),
        ("1e-999999999", "a number is too large"),
        ("2.0 ** 0.5 * 10 ** 400", "a number is too large"),
        ("9" * 900 + "*" + "9" * 90 + "**8", "a number is too large"),
        ("(-8) ** (1 / 3)", "a negative number has no real power"),
        ("2 ^ 3", r"\^ is not a power here; write \*\*"),
        ("1,000 + 2", "write numbers without commas: 1000, not 1,000"),
        ("x + 1", "'x' is not allowed; an expression may have numbers"),
        ("__import__('os').system('true')", "is not allowed"),
        ("print(1)", "there is no function 'print'"),
        ("abs(1, 2)", "abs cannot take these arguments"),
        ("round(1, 1.5)", "round cannot take these arguments"),
        ("round(1, ndigits=2)", "is not allowed"),
        ("min()", "min cannot take these arguments"),
        ("'a' * 3", r"\"'a'\" is no number"),
        ("1j", "'1j' is no number"),
        ("True + 1", "'True' is no number"),
        ("1 if 2 else 3", "is not allowed"),
        ("1 < 2", "is not allowed"),
        ("[1, 2]", "is not allowed"),
        ("(lambda: 1)()", "is not allowed"),
        ("-" * 990 + "1" + "-" * 20, "characters, and at most 1000 are allowed"),
        ("(" * 300 + "1" + ")" * 300, "this is no arithmetic expression|nested too deeply"),
        ("1\x00", "not plain text|no arithmetic expression"),
    ],
)
def test_errors(expression: str, message: str) -> None:
    with pytest.raises(ToolError, match=message):
        calculate(expression)


@given(st.text(alphabet="0123456789.+-*/%() eabsminround,_", max_size=40))
def test_any_text_has_a_value_or_an_error_at_once(expression: str) -> None:
    try:
        value = calculate(expression)
    except ToolError as error:
        assert str(error)
    else:
        assert calculate(value) == value, "a value is its own"
        Fraction(value)


@given(st.decimals(-1000, 1000, places=4))
def test_decimals_are_exact(number: object) -> None:
    assert Fraction(calculate(f"{number:f} + 0.0001 - 0.0001")) == Fraction(str(number))


def test_it_is_a_tool() -> None:
    async def turn() -> list[str]:
        tools = await load_tools(["calculator"]).open(Prompt((1,), "test", {}))
        calls = [ToolCall("calculator", {"expression": text}) for text in ("6 * 7", "6 * ")]
        return [result.text for result in await run_calls(tools, calls, chat_tokenizer())]

    right, wrong = asyncio.run(turn())
    assert right == "42"
    assert wrong.startswith("Error: this is no arithmetic expression (invalid syntax); it may have numbers, + - *")
