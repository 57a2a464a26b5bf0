"""The HTML file of a trajectory, read by a parser: what was stored is text, and nothing else."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest
from viewer_world import client_of, hostile

OURS = {
    "html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "h3", "dl", "div", "dt", "dd", "section",
    "ul", "ol", "li", "table", "thead", "tbody", "tr", "th", "td", "p", "q", "strong", "small", "span", "mark",
    "details",
    "summary",
}  # fmt: skip


class Page(HTMLParser):
    """The text of a page, and the elements and attributes that it has."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text, self.tags, self.attributes = "", set[str](), set[str]()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def exported(run: Path, file: str, row: int) -> Page:
    reply = client_of(run).get("/api/export", params={"run": run.name, "file": file, "row": row})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-disposition"].startswith("attachment")
    return Page(reply.content.decode("utf-8"))


def test_everything_about_a_trajectory_is_in_the_file(river_run: Path) -> None:
    page = exported(river_run, "train_step_1", 1)
    for text in (
        "Which river is the longest of France?", "Reward 0.1", "The Loire is the longest river of France.", "id 17",
        "1 when the answer equals a gold answer after normalisation.", "<answer>Seine</answer>",
    ):  # fmt: skip
        assert text in page.text
    assert page.tags <= OURS


@pytest.mark.parametrize(("number", "payload"), enumerate(hostile()))
def test_what_was_stored_stays_text(hostile_run: Path, number: int, payload: str) -> None:
    page = exported(hostile_run, "train_step_9", 2 * number)
    assert page.tags <= OURS
    assert page.attributes <= {"lang", "charset", "http-equiv", "content", "name", "class", "scope", "title"}
    assert payload in page.text
