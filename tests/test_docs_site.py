"""The documentation as a site: it is built without a warning, its links lead somewhere, and it fetches nothing."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from documented_commands import ROOT, blocks

LEAST_LETTERS = 10  # of a part of a message between two `...`, to be looked for


class Page(HTMLParser):
    """What a page refers to, what it loads, and the names of its places."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.ids: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attributes}
        self.ids.add(found.get("id", ""))
        if tag == "a":
            self.links.append(found.get("href", ""))
        elif tag != "link" or found.get("rel") != "canonical":
            self.loaded += [found[name] for name in ("src", "href") if name in found]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    program = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}


def test_every_page_is_built(site: Path, pages: dict[Path, Page]) -> None:
    written = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert written == {path.relative_to(site) for path in pages}


def test_links_within_the_site_lead_to_a_file_and_a_place(site: Path, pages: dict[Path, Page]) -> None:
    followed = 0
    for path, page in pages.items():
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            assert target.is_file(), f"{path.relative_to(site)} refers to {link}"
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].ids, f"{path.relative_to(site)} refers to {link}"
            followed += 1
    assert followed > 1000


def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        outside = [link for link in page.loaded if urlsplit(link).netloc]
        assert not outside, f"{path.relative_to(site)} loads {outside}"


def test_the_published_commands_are_one_click_from_the_start(site: Path, pages: dict[Path, Page]) -> None:
    assert "coming_from.html#the-published-commands" in pages[site / "index.html"].links
    table = (site / "coming_from.html").read_text(encoding="utf-8")
    for command in ("train_ppo.sh", "train_grpo_ema_pg.sh", "main_ppo_format", "retrieval_launch.sh", "evaluate.sh"):
        assert command in table


MESSAGES = [
    pytest.param(block.strip(), id=f"line {line}")
    for line, language, block in blocks((ROOT / "docs" / "troubleshooting.md").read_text())
    if language == "text"
]


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_troubleshooting_is_one_of_the_code(message: str) -> None:
    parts = [part.strip() for part in message.split("...")]
    long = [part for part in parts if len(part) >= LEAST_LETTERS]
    assert long, f"{message} says too little to be looked for"
    assert any(all(part in said for part in long) for said in all_texts()), message


@cache
def all_texts() -> tuple[str, ...]:
    """Texts in the code, with `...` for what is filled in; whole shell scripts."""
    sources = [*ROOT.glob("verl/**/*.py"), *ROOT.glob("search_r1/**/*.py")]
    found = {text for path in sources for text in texts_of(ast.parse(path.read_text()))}
    return (*found, *(path.read_text() for path in ROOT.glob("scripts/*.sh")))


def texts_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_links_out_of_docs_show_the_path_of_a_file_that_is_there(site: Path) -> None:
    shown = (site / "environments.html").read_text(encoding="utf-8")
    assert re.search(r"<code>search_r1/llm_agent/environment\.py</code>", shown)
