"""Called by mkdocs for each page. Files outside docs/ have no page of their own, so a link to one shows its path."""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]*\.\./[^)#\s]*)(?:#[^)\s]*)?\)")
log = logging.getLogger("mkdocs.hooks.docs")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with `[text](../verl/x.py)` as `text (verl/x.py)`. A file that is not there is a warning."""
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")
    return LINK.sub(lambda link: _shown(link, folder, page.file.src_uri), markdown)


def _shown(link: re.Match[str], folder: str, page: str) -> str:
    text, path = link[1], posixpath.normpath(posixpath.join(folder, link[2]))
    if path.startswith("docs/"):
        return link[0]
    if not (ROOT / path).exists():
        log.warning("%s links to %s, which is not in the repository", page, path)
    return f"`{path}`" if path.endswith(text) else f"{text} (`{path}`)"
