"""The tool `calculator`: arithmetic by an evaluator of its own over Python's syntax tree; nothing else can run in it.

Whole numbers, decimals and their quotients are exact fractions, so that 0.1 + 0.2 is 0.3. Powers with other exponents
than whole numbers are floating-point numbers.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any

from verl.agent.tools.definition import Tool, ToolError, ToolResult

Number = Fraction | float

_MAX_CHARS = 1000
_MAX_BITS = 4096  # of numerators and denominators: some 1,200 digits
_MAX_EXPONENT = 400  # of a number such as 1e400
_EXACT_DIGITS, _ROUNDED_DIGITS = 40, 15
_NUMBER = re.compile(r"(?P<mantissa>[0-9_]*\.?[0-9_]*)(?:[eE](?P<exponent>[+-]?[0-9_]+))?")
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "abs": lambda values: abs(values[0]),
    "round": lambda values: Fraction(round(values[0])),
    "min": min,
    "max": max,
}
_ALLOWED = "numbers, + - * / // % **, parentheses, abs, round, min and max"


class Calculator(Tool):
    """Evaluates an arithmetic expression."""

    name = "calculator"
    example = {"expression": "2 + 3"}
    description = f"Evaluate an arithmetic expression: {_ALLOWED}."
    parameters = {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "for example: (3 + 4.5) * 2 ** 3"}},
        "required": ["expression"],
        "additionalProperties": False,
    }

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        """See `Tool.call`."""
        value = calculate(arguments["expression"])
        return ToolResult(value, {"value": value})


def calculate(expression: str) -> str:
    """The value of an expression, in decimal notation: exact with up to 40 decimals, otherwise rounded to 15 digits.

    Raises `ToolError`, which says what is wrong with the expression.
    """
    text = expression.strip()
    if len(text) > _MAX_CHARS:
        raise ToolError(f"the expression has {len(text)} characters, and at most {_MAX_CHARS} are allowed")
    try:
        tree = ast.parse(text, mode="eval")
        return _written(_value(tree.body, text))
    except SyntaxError as error:
        raise ToolError(f"this is no arithmetic expression ({error.msg}); it may have {_ALLOWED}") from error
    except ZeroDivisionError as error:
        raise ToolError("division by zero") from error
    except OverflowError as error:
        raise ToolError("a number is too large") from error
    # The walk over a deep tree ends in a RecursionError, and the parser has no SyntaxError for half a character.
    except (RecursionError, MemoryError, ValueError) as error:
        raise ToolError("the expression is nested too deeply, or not plain text") from error


def _value(node: ast.expr, text: str) -> Number:
    match node:
        case ast.Constant():
            return _literal(node, text)
        case ast.UnaryOp() if type(node.op) in _UNARY:
            return _checked(_UNARY[type(node.op)](_value(node.operand, text)))
        case ast.BinOp(op=ast.Pow()):
            return _power(_value(node.left, text), _value(node.right, text))
        case ast.BinOp() if type(node.op) in _BINARY:
            return _checked(_BINARY[type(node.op)](_value(node.left, text), _value(node.right, text)))
        case ast.Call(func=ast.Name(id=name)) if not node.keywords:
            return _checked(_call(name, [_value(argument, text) for argument in node.args]))
        # These are not allowed either, but it is plain what was meant, so the message says how to write it.
        case ast.BinOp(op=ast.BitXor()):
            raise ToolError("^ is not a power here; write **")
        case ast.Tuple():
            raise ToolError("there is a comma; write numbers without commas: 1000, not 1,000")
    raise ToolError(f"{ast.unparse(node)[:60]!r} is not allowed; an expression may have {_ALLOWED}")


def _literal(node: ast.Constant, text: str) -> Number:
    if isinstance(node.value, int) and not isinstance(node.value, bool):
        return _checked(Fraction(node.value))
    written = ast.get_source_segment(text, node) or ""
    number = _NUMBER.fullmatch(written) if isinstance(node.value, float) else None
    if number is None:
        raise ToolError(f"{written[:60]!r} is no number")
    if abs(int(number["exponent"] or 0)) > _MAX_EXPONENT:
        raise OverflowError
    return _checked(Fraction(written))


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        # the powers of 0 and 1 and -1 stay as small as they are
        if bits > 1 and (bits - 1) * abs(exponent.numerator) > _MAX_BITS:
            raise OverflowError
        return _checked(base**exponent.numerator)
    result = float(base) ** float(exponent)
    if isinstance(result, complex):
        raise ToolError("a negative number has no real power with that exponent")
    return _checked(result)


def _call(name: str, values: list[Any]) -> Any:
    if name not in _FUNCTIONS:
        raise ToolError(f"there is no function {name[:60]!r}; there are {', '.join(_FUNCTIONS)}")
    if name == "round" and len(values) == 2:
        digits = values.pop()
        if digits != int(digits) or abs(digits) > _MAX_EXPONENT:
            raise ToolError("round cannot take these arguments")
        return round(values[0], int(digits))
    if not values or (len(values) > 1 and name in ("abs", "round")):
        raise ToolError(f"{name} cannot take these arguments")
    return _FUNCTIONS[name](values)


def _checked(value: Any) -> Number:
    """Raise `OverflowError` if the number is too large to be computed with."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise OverflowError
        return value
    fraction = Fraction(value)
    if max(fraction.numerator.bit_length(), fraction.denominator.bit_length()) > _MAX_BITS:
        raise OverflowError
    return fraction


def _written(value: Number) -> str:
    if isinstance(value, float):
        return f"{value:.{_ROUNDED_DIGITS}g}"
    if value.denominator == 1:
        return str(value.numerator)
    # A fraction has finitely many decimals if its denominator has no other factors than 2 and 5.
    decimals = 0
    while decimals <= _EXACT_DIGITS and 10**decimals % value.denominator:
        decimals += 1
    if decimals <= _EXACT_DIGITS:
        digits = str(abs(value.numerator) * 10**decimals // value.denominator).rjust(decimals + 1, "0")
        return f"{'-' * (value < 0)}{digits[:-decimals]}.{digits[-decimals:]}"
    return str(Context(prec=_ROUNDED_DIGITS).divide(Decimal(value.numerator), Decimal(value.denominator)))
