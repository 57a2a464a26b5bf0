"""What a model is called: a folder, or a name on the hub, which is asked once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest

from verl.errors import ConfigError
from verl.model_source import find_model


class Hub(ThreadingHTTPServer):
    """Knows the model `known/model`; `down`: it breaks every connection off."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[str] = []
        self.down = False

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing to print: connections are broken off on purpose."""


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        if "model" in self.path:  # the library has questions of its own, too
            self.server.asked.append(self.path)
        if self.server.down:
            raise ConnectionAbortedError
        known = self.path.endswith("/models/known/model")
        body = b'{"id": "known/model", "siblings": []}' if known else b"{}"
        self.send_response(200 if known else 404)
        for name, value in {"Content-Type": "application/json", "X-Error-Code": "RepoNotFound"}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    hub = Hub()
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    yield hub
    hub.shutdown()
    hub.server_close()


def model_in(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_a_folder_is_taken_as_it_is(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_in(tmp_path / "known" / "model")
    assert find_model("known/model") == "known/model" and find_model(f"{tmp_path}/known/model/")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_model("~/known/model") == str(tmp_path / "known" / "model")
    assert not hub.asked


@pytest.mark.parametrize(
    "name", ["/no/such/folder", "./typo", "~/typo", "a/b/c", "runs/typo", "typo/", "C:\\models", "actor/global step"]
)
def test_what_can_only_be_a_path_is_an_error_that_asks_nobody(hub: Hub, tmp_path: Path, name: str) -> None:
    (tmp_path / "runs").mkdir()
    with pytest.raises(ConfigError, match="there is no such folder") as caught:
        find_model(name)
    assert name in str(caught.value) and not hub.asked


def test_a_mistyped_path_says_how_far_it_is_right(hub: Hub, tmp_path: Path) -> None:
    model_in(tmp_path / "runs" / "mine" / "actor" / "global_step_3")
    with pytest.raises(ConfigError, match=rf"\(there is {tmp_path}/runs/mine/actor\)"):
        find_model(str(tmp_path / "runs/mine/actor/global_step_4"))
    with pytest.raises(ConfigError, match=r"no config.json\); .*actor/global_step_3 does"):
        find_model(str(tmp_path / "runs/mine"))
    with pytest.raises(ConfigError, match="this is a file"):
        find_model(str(tmp_path / "runs/mine/actor/global_step_3/config.json"))


def test_a_name_that_the_hub_knows_and_one_that_it_does_not(hub: Hub) -> None:
    assert find_model("known/model") == "known/model"
    with pytest.raises(ConfigError, match="no such folder, and the hub has no such model"):
        find_model("known/modle")
    assert len(hub.asked) == 2


@pytest.mark.parametrize("offline", [False, True])
def test_a_hub_that_is_down_is_asked_once(hub: Hub, monkeypatch: pytest.MonkeyPatch, offline: bool) -> None:
    hub.down = True
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    with pytest.raises(ConfigError, match=r"the hub cannot be asked \(.") as caught:
        find_model("known/model")
    assert len(hub.asked) == (0 if offline else 1) and "\n" not in str(caught.value)


def test_a_copy_in_the_cache_serves_where_the_hub_is_down(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.down = True
    repository = tmp_path / "cache" / "models--known--model"
    copy = model_in(repository / "snapshots" / "0123abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abc")
    assert find_model("known/model") == str(copy)
    assert "taking the copy of known/model in the cache" in caplog.text and len(hub.asked) == 1
