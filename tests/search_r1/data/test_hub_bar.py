"""The hub's own client draws its progress as we do: asked with its own functions, which make and call a bar."""

from __future__ import annotations

from typing import Any, cast

import pytest
from huggingface_hub.file_download import _get_progress_bar_context

import long_task
from search_r1.data.qa.hub_bar import HubBar


def test_a_download_that_goes_on_is_counted_from_where_it_was(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_task, "SHORT_S", 0.0)
    bar = _get_progress_bar_context(
        desc="wiki-18.jsonl.gz", log_level=20, total=10_000, initial=5000, tqdm_class=cast(Any, HubBar)
    )
    with bar as progress:
        progress.set_postfix_str("ignored")
        for _ in range(5):
            progress.update(1000)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5 and "fetch wiki-18.jsonl.gz: 6.0 kB of 10.0 kB, " in lines[0] and "left" in lines[0]
    assert "10.0 kB of 10.0 kB" in lines[-1]
