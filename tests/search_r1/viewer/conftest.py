from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from transformers import PreTrainedTokenizerFast
from viewer_world import Episodes, served, write_run


@pytest.fixture(scope="session")
def episodes(byte_tokenizer: PreTrainedTokenizerFast) -> Episodes:
    return Episodes(byte_tokenizer)


@pytest.fixture(scope="session")
def river_run(tmp_path_factory: pytest.TempPathFactory, episodes: Episodes) -> Path:
    """Read only; a test that adds files makes a run of its own."""
    return write_run(tmp_path_factory.mktemp("runs") / "rivers", episodes)


CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)

expect.set_options(timeout=30_000)  # ms: on a busy machine a page of huge tokens takes a while


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine (Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """At its end there must have been no error in its console, and no request that left this machine."""
    opened, errors, away = browser.new_page(viewport={"width": 1280, "height": 900}), list[str](), list[str]()
    opened.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
    opened.on("pageerror", lambda error: errors.append(str(error)))
    local = ("http://127.0.0.1:", "file:", "blob:", "data:")
    opened.on("request", lambda request: None if request.url.startswith(local) else away.append(request.url))
    yield opened
    opened.close()
    assert not errors and not away


@pytest.fixture(scope="module")
def address(river_run: Path) -> Iterator[str]:
    with served(river_run) as url:
        yield url
