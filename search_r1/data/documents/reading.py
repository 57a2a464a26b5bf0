"""The texts of one file, each with the page or row that it stands on.

`read_document` chooses the reader by the suffix. PDF is read by pypdfium2 and HTML by lxml and inscriptis, which the
extra `documents` installs.
"""

from __future__ import annotations

import codecs
import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from numbers import Number
from pathlib import Path
from typing import Any

from search_r1.data.documents.finding import reason_of
from search_r1.data.qa.records import kind_of, read_records
from search_r1.errors import CorpusError
from search_r1.search.corpus import is_quoted, title_and_text
from search_r1.search.sanitize import title_of
from verl.errors import DataError

TEXT = (".txt", ".text", ".rst", ".adoc", ".org", "")
MARKDOWN = (".md", ".markdown")
HTML = (".html", ".htm", ".xhtml")
PDF = (".pdf",)
ROWS = (".csv", ".tsv", ".json", ".jsonl", ".parquet")
LIBRARIES = dict.fromkeys(PDF, ("pypdfium2",)) | dict.fromkeys(HTML, ("lxml.html", "inscriptis"))
"""What a kind of file needs beyond the required packages."""
TITLE_LENGTH = 200
"""The characters of a document's own title that its passages have."""

_BLOCK = 1 << 20
_BOMS = ((codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32")) + (
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)  # that of UTF-32 begins with that of UTF-16
_DECLARED = re.compile(rb"""<meta[^>]+charset\s*=\s*["']?\s*([\w.:-]+)""", re.IGNORECASE)
_LETTER = r"[\u3001-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uff01-\uff9f]"  # of a script without spaces


class UnreadableError(Exception):
    """Why a document, or a part of it, has no text: a reason shown behind its name."""


@dataclass(frozen=True)
class Text:
    """A text of a document. `place` says where it stands, `{"page": 3}` or `{"row": 12}`; empty for a whole file.

    `problem`: why there is no text in this place. `kept`: further fields for its passages.
    """

    text: str = ""
    title: str = ""
    place: dict[str, int] = field(default_factory=dict)
    problem: str = ""
    kept: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Settings:
    """How files are read: the columns of rows, and what text that is not UTF-8 is."""

    title_column: str | None = None
    text_column: str = "text"
    keep: tuple[str, ...] = ()
    encoding: str | None = None
    text_suffixes: tuple[str, ...] = ()


def read_document(path: Path, settings: Settings) -> Iterator[Text]:
    """The texts of a file in order. Raises `UnreadableError` where it cannot be read, or not any further."""
    readers: dict[tuple[str, ...], Callable[[Path, Settings], Iterator[Text]]] = {
        (*TEXT, *settings.text_suffixes): _plain,
        MARKDOWN: _markdown,
        HTML: _html,
        PDF: _pdf,
        ROWS: _rows,
    }
    kind = _kind(path)
    read = next((reader for suffixes, reader in readers.items() if kind in suffixes), None)
    if read is None:
        raise UnreadableError(
            f"unknown kind '{kind}' (convert documents to PDF, HTML or text; --text_suffixes adds kinds of text files)"
        )
    try:
        if path.stat().st_size == 0:
            raise UnreadableError("an empty file")
        yield from read(path, settings)
    except UnreadableError:
        raise
    except OSError as error:
        raise UnreadableError(reason_of(error)) from error
    except Exception as error:  # whatever a parser makes of a broken file: the other files are read all the same
        raise UnreadableError(f"cannot be read: {type(error).__name__}: {error}") from error


def check_libraries(paths: list[Path]) -> None:
    """Raise `CorpusError` if a library that reads these files is not installed."""
    for path in paths:
        for name in LIBRARIES.get(_kind(path), ()):
            try:
                importlib.import_module(name)
            except ImportError as error:
                raise CorpusError(
                    f"{path} needs {name.partition('.')[0]} ({error}); .venv/bin/pip install -e '.[documents]'"
                ) from error


def _kind(path: Path) -> str:
    kind = kind_of(path)
    return kind if kind in ROWS else path.suffix.lower()


# Text. Its encoding is known, or the file is refused: a wrong guess would be found by nobody.


def _plain(path: Path, settings: Settings) -> Iterator[Text]:
    yield Text(path.read_text(encoding_of(path, settings.encoding)))


def _markdown(path: Path, settings: Settings) -> Iterator[Text]:
    text = path.read_text(encoding_of(path, settings.encoding))
    heading = re.search(r"^# +(.+?)[ #]*$", re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.M | re.S), re.MULTILINE)
    yield Text(text, title=heading[1] if heading else "")


def encoding_of(path: Path, otherwise: str | None) -> str:
    """UTF-8 with or without a mark, UTF-16 or 32 with one, or else `otherwise`. Raises `UnreadableError`."""
    decoder, position = codecs.getincrementaldecoder("utf-8")(), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            if not position:
                marked = next((name for mark, name in _BOMS if block.startswith(mark)), None)
                if marked:
                    return _checked(path, marked)
            if b"\0" in block:
                raise UnreadableError("binary data, not text (or UTF-16 without a mark: convert it by iconv)")
            # A character may be cut where a block ends. The decoder holds its first bytes (`held`), and counts the
            # position of an error from them.
            try:
                held = len(decoder.getstate()[0])
                decoder.decode(block)
            except UnicodeDecodeError as error:
                return _checked(path, otherwise, position - held + error.start, error.object[error.start])
            position += len(block)
    # The file ends within a character, which no file in UTF-8 does.
    if rest := decoder.getstate()[0]:
        return _checked(path, otherwise, position - len(rest), rest[0])
    return "utf-8-sig"


def _checked(path: Path, encoding: str | None, position: int = 0, byte: int = 0) -> str:
    """`encoding`, if it decodes the whole file."""
    if encoding is None:
        raise UnreadableError(
            f"not UTF-8 (byte 0x{byte:02x} at position {position}): convert it by iconv, or name its encoding, such as "
            "--encoding cp1252 (Western), gb18030 (Chinese), shift_jis (Japanese)"
        )
    # Read to the end, as the first byte that does not fit may stand anywhere. Otherwise only reading would find it.
    try:
        with path.open(encoding=encoding, newline="") as file:
            while file.read(_BLOCK):
                pass
    except UnicodeError as error:
        raise UnreadableError(f"not {encoding}: {error}; convert it to UTF-8 by iconv") from error
    return encoding


# HTML


def _html(path: Path, settings: Settings) -> Iterator[Text]:
    """The text without navigation, scripts and styles, with the title of the page."""
    data = path.read_bytes()
    declared = _DECLARED.search(data[:2048])
    said = _as_browsers_do(declared[1].decode("ascii")) if declared else settings.encoding
    # ISO-2022 is written in ASCII, and so is valid UTF-8.
    encoding = _checked(path, said) if (said or "").startswith("iso2022") else encoding_of(path, said)
    yield _text_of_html(data.decode(encoding))


def _as_browsers_do(encoding: str) -> str | None:
    """The encoding that a browser takes for the declared one: Windows-1252 for latin-1; None for an unknown one."""
    try:
        name = codecs.lookup(encoding).name
    except LookupError:
        return None
    return {"iso8859-1": "cp1252", "ascii": "cp1252", "gb2312": "gb18030", "gbk": "gb18030"}.get(name, name)


def _text_of_html(page: str) -> Text:
    from inscriptis.css_profiles import STRICT_CSS_PROFILE
    from inscriptis.html_engine import Inscriptis
    from inscriptis.html_properties import Display
    from inscriptis.model.config import ParserConfig
    from inscriptis.model.html_element import HtmlElement
    from lxml.html import HTMLParser, document_fromstring

    # As UTF-8 bytes, so that a declaration inside is not asked; `huge_tree`, or deep elements are dropped in silence.
    tree = document_fromstring(page.encode("utf-8", "replace"), HTMLParser(encoding="utf-8", huge_tree=True))
    unseen = dict.fromkeys(("nav", "template", "noscript"), HtmlElement(display=Display.none))
    text = Inscriptis(tree, ParserConfig(css=STRICT_CSS_PROFILE | unseen)).get_text()
    # Columns of a table are told apart by two spaces; the indentation of lines stays.
    return Text(re.sub(r"(?<=\S)[ \t]{2,}", "  ", text), title=tree.findtext(".//title") or "")


# PDF, page by page


def _pdf(path: Path, settings: Settings) -> Iterator[Text]:
    import pypdfium2

    try:
        pdf = pypdfium2.PdfDocument(path.read_bytes())
    except pypdfium2.PdfiumError as error:
        if "password" in str(error).lower():
            raise UnreadableError("encrypted: save it without its password, such as by qpdf --decrypt") from error
        raise UnreadableError(f"no PDF that can be read: {error}") from error
    with pdf:
        for number in range(1, len(pdf) + 1):
            # One bad page does not cost the others: it is reported, and they are read.
            try:
                text, is_picture = _page_of_pdf(pdf, number - 1)
            except pypdfium2.PdfiumError as error:
                yield Text(place={"page": number}, problem=f"cannot be read: {error}")
                continue
            problem = "" if text.strip() or not is_picture else "a picture without text, such as a scan: run OCR on it"
            yield Text(text, place={"page": number}, problem=problem)


def _page_of_pdf(pdf: Any, index: int) -> tuple[str, bool]:
    """The text of a page with its words whole again, and whether there is a picture on it."""
    from pypdfium2.raw import FPDF_PAGEOBJ_IMAGE

    page = pdf[index]
    try:
        layer = page.get_textpage()
        text = layer.get_text_bounded().replace("\r\n", "\n")
        layer.close()
        has_picture = not text.strip() and next(iter(page.get_objects(filter=[FPDF_PAGEOBJ_IMAGE])), None) is not None
    finally:
        page.close()
    # PDFium marks the hyphen at the end of a line. Lines of a script without spaces are joined without one.
    text = re.sub("[\x02\ufffe]\n?", "", text)
    text = re.sub(r"(?:[ \t]?\.){4,}", " ...", text)  # the dots of a table of contents
    return re.sub(rf"(?<={_LETTER})\n(?={_LETTER})", "", text), has_picture


# Rows of tables and JSON, each a document


def _rows(path: Path, settings: Settings) -> Iterator[Text]:
    is_text = kind_of(path) not in (".parquet", ".jsonl") and path.suffix.lower() != ".gz"
    encoding = encoding_of(path, settings.encoding) if is_text else "utf-8-sig"
    try:
        for number, row in enumerate(read_records(path, encoding), start=1):
            if number == 1 and not row.fault:
                _check_columns(row.value, settings)
            place, fault = {"row": number}, row.fault or _fault_of(row.value, settings)
            yield Text(place=place, problem=fault) if fault else _text_of_row(row.value, place, settings)
    except DataError as error:
        reason = re.sub(r"^:(?=\d)", "line ", str(error).removeprefix(str(path)))
        raise UnreadableError(reason.lstrip(":, ")) from error


def _check_columns(row: dict[str, Any], settings: Settings) -> None:
    """Raise `UnreadableError` if a named column, or that of the text, is not there."""
    wanted = [("--title_column", settings.title_column), *(("--keep", column) for column in settings.keep)]
    if not _is_passage(row, settings):
        wanted.append(("--text_column", settings.text_column))
    for option, column in wanted:
        if column is not None and column not in row:
            raise UnreadableError(
                f"no column '{column}': its columns are {', '.join(map(str, row))}; name the right one by {option}"
            )


def _fault_of(row: dict[str, Any], settings: Settings) -> str:
    text = row.get("contents" if _is_passage(row, settings) else settings.text_column)
    if not isinstance(text, str):
        return f"its '{settings.text_column}' is {'missing' if text is None else type(text).__name__}, not a text"
    return "" if text.strip() else f"its '{settings.text_column}' is empty"


def _text_of_row(row: dict[str, Any], place: dict[str, int], settings: Settings) -> Text:
    kept = {column: row[column] for column in settings.keep if column in row}
    title = row.get(settings.title_column or "title")
    shown = title_of(title) if title is None or isinstance(title, Number) else str(title)
    text = row["contents" if _is_passage(row, settings) else settings.text_column]
    if _is_passage(row, settings) and _begins_with_title(text):
        shown, text = title_and_text(text)
    return Text(text, shown or "", place, kept=kept)


def _begins_with_title(contents: str) -> bool:
    """Whether it is `"Title"\\ntext`: any other first line is text, and so is one too long to be kept as a title."""
    line, _, text = contents.partition("\n")
    return is_quoted(line) and len(line) <= TITLE_LENGTH and bool(text.strip())


def _is_passage(row: dict[str, Any], settings: Settings) -> bool:
    """Whether it is a row of a corpus, whose `contents` are the text, perhaps behind its title."""
    return settings.text_column == "text" and "text" not in row and isinstance(row.get("contents"), str)
