"""The gold answers of a row: a list, one answer, or a list that a table keeps as text.

A text is a list if all of it is one in JSON (`["a", "b"]`), as Python or pandas (`['a', 'b']`, a tuple, a set) or as
NumPy prints it (`['a' 'b']`). Any other text is one answer, brackets included: `[Fe/H]`. A text that begins like a list
of quoted texts and is none is refused. The answers in a list are never lists themselves, so an answer that looks like
one is written in a list: `["['a', 'b']"]`.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

_WORDS = {True: "yes", False: "no"}
_QUOTED = r"""[bBuU]?(?:'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+")"""
_NUMBER = r"[-+]?(?:0|[1-9]\d*)(?:\.\d*)?(?:[eE][-+]?\d+)?"
_PLAIN = rf"{_QUOTED}|{_NUMBER}|True|False|None|nan|NaN|<NA>"
_ITEM = re.compile(rf"(?:np\.\w+\(({_PLAIN})\)|np\.(True|False)_|({_PLAIN}))", re.DOTALL)  # np.str_('a') is one
_GAP = re.compile(r"\s*(,)\s*|\s+")
_ARRAY = re.compile(r"(?:np\.)?array\((\[.*\])(?:,\s*dtype=[^\[\]()]+)?\)", re.DOTALL)
_BRACKETS = {"[": "]", "(": ")", "{": "}"}
# also `Index(['a'], dtype='object')`, and what pandas prints of its own arrays and of a Series
_LIKE_A_LIST = re.compile(r"(?:[\w.]+\([{\[]|\[)[\[\s]*(?:np\.\w+\(|[bBuU]?['\"])|<\w*Array>\s|(?s:.*)\sdtype: ?\w+\Z")


def answer_texts(value: Any) -> Any:
    """A list of answers, from a list, one answer, or a list as text.

    Booleans become yes and no, and an integer its digits. Anything else is left for `checked` to reject, such as a
    fraction, which could be written in more than one way. Raises `ValueError` for a text that is half a list.
    """
    if isinstance(value, str):
        value = list_in_text(value)
    values = value if isinstance(value, list) else [value]
    return [_text_of(answer) for answer in values]


def list_in_text(text: str) -> Any:
    """The list that the whole of `text` is, else `text`. Raises `ValueError` if it only begins like one."""
    stripped = text.strip()
    array = _ARRAY.fullmatch(stripped)
    inner = array[1] if array else stripped
    # Only what stands in a pair of brackets can be a list: as JSON or, failing that, as Python or NumPy prints it.
    if _BRACKETS.get(inner[:1]) != inner[-1:]:
        found = None
    else:
        found = (_json_list(inner) if inner[0] == "[" else None) or _printed_list(inner)
    if found is not None:
        return found
    # Taken as a text, it would be one long gold answer that no model can give.
    if _LIKE_A_LIST.match(stripped):
        raise ValueError(
            f"the gold answers begin like a list, but are none that can be read: {text[:80]!r}; write a list as JSON, "
            'and one answer that looks like this as a list of one: ["..."]'
        )
    return text


def _text_of(answer: Any) -> Any:
    if isinstance(answer, bool):
        return _WORDS[answer]
    return str(answer) if isinstance(answer, int) else answer


def _json_list(text: str) -> list[Any] | None:
    try:
        return list(json.loads(text))
    except (ValueError, RecursionError):
        return None


def _printed_list(text: str) -> list[Any] | None:
    """The items of a list as Python (commas) or NumPy (spaces) prints it; None if `text` is none.

    Python itself would read two texts without a comma between them as one text.
    """
    at, end, items, gaps = 1, len(text) - 1, [], set()
    at += len(text[at:end]) - len(text[at:end].lstrip())
    while at < end:
        # one item, then what separates it from the next one
        item = _ITEM.match(text, at, end)
        if item is None:
            return None
        try:
            written = item[1] or item[2] or item[3]
            items.append(None if written in ("nan", "NaN", "<NA>") else ast.literal_eval(written))
        except (SyntaxError, ValueError):  # such as an escape that Python does not have
            return None
        gap = _GAP.match(text, item.end(), end)
        at = gap.end() if gap else item.end()
        if gap is None and at < end:
            return None
        if gap and (at < end or gap[1]):
            gaps.add(gap[1])
    if len(gaps) > 1 or (text[0] != "[" and not _is_tuple_or_set(text[0], items, gaps)):
        return None
    return items


def _is_tuple_or_set(bracket: str, items: list[Any], gaps: set[str | None]) -> bool:
    """A text in parentheses is a tuple only with a comma: `("Heroes")` is one answer, and so are () and {}."""
    texts = all(isinstance(item, str) for item in items)
    return bool(items) and texts and (gaps == {","} or (bracket == "{" and not gaps))
