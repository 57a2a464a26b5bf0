"""Files that come, change, are damaged or of another kind; bad requests and flags; the token; the exported page."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from e2e_world import ROOT
from fastapi.testclient import TestClient
from viewer_world import Episodes, client_of, hostile, river_step, write_run, write_step

from search_r1.http.gate import Metrics
from search_r1.http.process import bind, draining_server
from search_r1.viewer import queries
from search_r1.viewer.__main__ import main, parse_arguments
from search_r1.viewer.app import create_app
from search_r1.viewer.pages import Pages
from verl.errors import DataError


def test_what_a_run_adds_is_seen(tmp_path: Path, episodes: Episodes) -> None:
    client = client_of(write_run(tmp_path / "live", episodes))
    before = client.get("/api/runs").json()[0]
    write_step(tmp_path / "live", episodes, "train", 3, river_step(episodes)[:2])
    after = client.get("/api/runs").json()[0]
    assert len(after["files"]) == len(before["files"]) + 1 and after["version"] != before["version"]
    assert client.get("/api/rows", params={"run": "live", "kind": "train", "step": 3}).json()["total"] == 2
    write_step(tmp_path / "live", episodes, "train", 3, river_step(episodes)[:4])  # a resumed run writes it again
    assert client.get("/api/runs").json()[0]["version"] != after["version"]
    assert client.get("/api/rows", params={"run": "live", "kind": "train", "step": 3}).json()["total"] == 4


@pytest.mark.parametrize(
    ("route", "query", "message"),
    [
        ("rows", {"run": "gone"}, "there is no run 'gone'"),
        ("trajectory", {"run": "rivers", "file": "train_step_9", "row": 0}, "no file of trajectories 'train_step_9'"),
        ("trajectory", {"run": "rivers", "file": "train_step_1", "row": 99}, "has no row 99"),
        ("group", {"run": "rivers", "file": "train_step_1", "group": "x"}, "has no group 'x'"),
    ],
)
def test_what_is_not_there(river_run: Path, route: str, query: dict[str, Any], message: str) -> None:
    reply = client_of(river_run).get(f"/api/{route}", params=query)
    assert reply.status_code == 404 and message in reply.json()["detail"]


@pytest.mark.parametrize(
    "query", [{"sort": "component"}, {"sort": "ids; drop"}, {"limit": 100000}, {"offset": -1}, {"x": 1}]
)
def test_a_query_that_makes_no_sense(river_run: Path, query: dict[str, Any]) -> None:
    assert client_of(river_run).get("/api/rows", params={"run": "rivers", **query}).status_code == 422


def test_data_needs_the_token_and_the_page_does_not(river_run: Path) -> None:
    client = client_of(river_run, token="secret")
    assert client.get("/").status_code == client.get("/static/app.js").status_code == 200
    assert client.get("/api/runs").status_code == client.get("/metrics").status_code == 401
    assert client.get("/api/runs", headers={"Authorization": "Bearer secret"}).status_code == 200


HERE, THERE = "http://localhost:8002", "http://rebound.example.org"


@pytest.mark.parametrize(
    ("host", "token", "asked_as", "headers", "status"),
    [
        ("127.0.0.1", None, HERE, {}, 200),
        ("127.0.0.1", None, "http://127.0.0.1:1", {"Origin": HERE}, 200),
        ("127.0.0.1", None, "http://[::1]", {}, 200),
        ("127.0.0.1", None, THERE, {}, 403),
        ("127.0.0.1", None, "http://localhost.example.org", {}, 403),
        ("127.0.0.1", None, HERE, {"Origin": THERE}, 403),
        ("127.0.0.1", None, HERE, {"Origin": "null"}, 403),
        ("127.0.0.1", "secret", THERE, {"Authorization": "Bearer secret"}, 200),
        ("0.0.0.0", None, THERE, {"Origin": THERE}, 200),
    ],
)
def test_on_loopback_without_a_token_no_page_of_another_site_reads_the_data(
    river_run: Path, host: str, token: str | None, asked_as: str, headers: dict[str, str], status: int
) -> None:
    """A name of that site may lead to this machine."""
    app = create_app(Pages([river_run]), Metrics("viewer"), token)
    with bind(host, 0) as listener:
        draining_server(app, listener)
    client = TestClient(app, base_url=asked_as)
    assert client.get("/healthz").status_code == 200
    for path in ("/api/runs", "/metrics"):
        assert client.get(path, headers=headers).status_code == status


def test_a_browser_runs_only_the_files_of_this_server(river_run: Path) -> None:
    for route in ("/", "/api/runs", "/static/app.js", "/absent"):
        headers = client_of(river_run).get(route).headers
        assert headers["content-security-policy"].startswith("default-src 'self';")
        assert headers["x-content-type-options"] == "nosniff"
    assert "<script>" not in client_of(river_run).get("/").text


def test_a_file_that_is_damaged_is_named(tmp_path: Path, episodes: Episodes) -> None:
    client = client_of(write_run(tmp_path / "run", episodes))
    broken = tmp_path / "run/trajectories/train_step_1.parquet"
    broken.write_bytes(b"PAR1 not really")
    reply = client.get("/api/rows", params={"run": "run", "kind": "train", "step": 1})
    assert reply.status_code == 404 and str(broken) in reply.json()["detail"]


@pytest.mark.parametrize(
    ("name", "other"),
    [("step=7", "a"), ("reward=em", "a"), ("lr[1]", "lr1"), ("a*b", "axb"), ("what?", "what1"), ("x\\y", "xy")],
)
def test_a_folder_is_meant_by_its_name_alone(tmp_path: Path, episodes: Episodes, name: str, other: str) -> None:
    """It is no pattern, which would match the other folder, and no column."""
    for folder, count in ((name, 12), (other, 1)):
        write_step(tmp_path / folder, episodes, "train", 1, river_step(episodes)[:count])
    client = client_of(tmp_path)
    page = client.get("/api/rows", params={"run": name, "kind": "train"}).json()
    assert page["total"] == 12 and [row["step"] for row in page["rows"]] == [1] * 12
    assert [row["reward"] for row in page["rows"][:4]] == [1.1, 0.1, 0.0, None]
    shown = client.get("/api/trajectory", params={"run": name, "file": "train_step_1", "row": 1}).json()
    assert (shown["step"], shown["reward"]) == (1, 0.1)


def test_too_little_memory_says_how_to_write_the_file(
    tmp_path: Path, episodes: Episodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(queries._SETTINGS, "memory_limit", "1MB")
    client = client_of(write_run(tmp_path / "run", episodes))
    reply = client.get("/api/trajectory", params={"run": "run", "file": "train_step_1", "row": 0})
    assert reply.status_code == 404 and "write_trajectory_table(path, read_trajectory_table(path))" in reply.text


def test_what_cannot_be_read_is_passed_over(
    tmp_path: Path, episodes: Episodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as lost+found beside the runs, a trajectories folder of another user, and a link to a file that has gone."""
    write_run(tmp_path / "run", episodes)
    (tmp_path / "run/trajectories/train_step_7.parquet").symlink_to(tmp_path / "gone")
    (tmp_path / "gone too").symlink_to(tmp_path / "gone")
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "others/trajectories").mkdir(parents=True)
    listed, looked_at = Path.iterdir, Path.is_dir

    def iterdir(self: Path) -> Any:
        if self.name == "lost+found":  # which root may read
            raise PermissionError(self)
        return listed(self)

    def is_dir(self: Path) -> bool:
        if self.parent.name == "others":
            raise PermissionError(self)
        return looked_at(self)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    monkeypatch.setattr(Path, "is_dir", is_dir)
    [run] = client_of(tmp_path).get("/api/runs").json()
    assert run["name"] == "run" and run["files"]
    assert not any(file["step"] == 7 for file in run["files"])


def test_a_path_without_runs(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="neither a run nor a folder of runs"):
        Pages([tmp_path]).runs()
    with pytest.raises(DataError, match="there is no such file or folder"):
        Pages([tmp_path / "absent"]).runs()


def test_a_file_of_something_else_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    pq.write_table(pa.table({"prompt": ["x"]}), path)
    reply = client_of(path).get("/api/rows", params={"run": "prompts.parquet"})
    assert reply.status_code == 404
    assert reply.json()["detail"].startswith(f"{path}: holds no trajectories: columns step, group_id")


def test_a_single_file_of_a_run_is_shown_with_the_settings_of_the_run(river_run: Path) -> None:
    """Its tokenizer and its template are beside the folder of the file."""
    (river_run / "template.txt").write_text("---\ntags: {answer: reply}\n---\n{question}")
    client = client_of(river_run / "trajectories/train_step_1.parquet")
    asked = {"run": "train_step_1.parquet", "file": "train_step_1", "row": 0}
    shown = client.get("/api/trajectory", params=asked).json()
    assert shown["notes"] == [] and shown["tokens"]["texts"] is not None
    assert shown["answer"] is None  # its answer stands in other tags than the template's


def test_a_single_file_and_one_without_questions(river_run: Path, tmp_path: Path) -> None:
    """As runs of earlier versions left them."""
    table = pq.read_table(river_run / "trajectories/train_step_1.parquet").drop_columns(["question"])
    pq.write_table(table, tmp_path / "old.parquet")
    client = client_of(tmp_path / "old.parquet")
    page = client.get("/api/rows", params={"run": "old.parquet", "kind": "old", "sort": "question"}).json()
    assert page["total"] == 12 and {row["question"] for row in page["rows"]} == {None}
    shown = client.get("/api/trajectory", params={"run": "old.parquet", "file": "old", "row": 1}).json()
    assert shown["tokens"]["texts"] is None and shown["tokens"]["ids"] == table["ids"][1].as_py()
    assert shown["notes"] == ["No tokenizer found: tokens are shown by their ids. Give its folder with --tokenizer."]


def test_a_column_with_a_number_a_token_is_an_overlay(river_run: Path, tmp_path: Path) -> None:
    """As `search_r1.replay log_probs` adds one; numbers that JSON has not are texts."""
    table = pq.read_table(river_run / "trajectories/train_step_2.parquet").slice(0, 1)
    values = [-0.5] * len(table["ids"][0])
    values[3] = float("nan")
    pq.write_table(table.append_column("log_probs_under", pa.array([values])), tmp_path / "under.parquet")
    shown = client_of(tmp_path).get("/api/trajectory", params={"run": "under.parquet", "file": "under", "row": 0})
    assert shown.status_code == 404  # a folder of files is no run
    client = client_of(tmp_path / "under.parquet")
    shown = client.get("/api/trajectory", params={"run": "under.parquet", "file": "under", "row": 0})
    assert list(shown.json()["tokens"]["values"]) == ["log_probs", "weight_version", "log_probs_under"]
    assert shown.json()["tokens"]["values"]["log_probs_under"] == [
        "nan" if n == 3 else -0.5 for n in range(len(values))
    ]


def test_nothing_heavy_is_imported(river_run: Path) -> None:
    code = (
        "import sys\nfrom fastapi.testclient import TestClient\nfrom pathlib import Path\n"
        "from search_r1.http.gate import Metrics\nfrom search_r1.viewer.app import create_app\n"
        "from search_r1.viewer.pages import Pages\n"
        f"client = TestClient(create_app(Pages([Path({str(river_run)!r})]), Metrics('viewer')))\n"
        "query = {'run': 'rivers', 'file': 'train_step_1', 'row': 0}\n"
        "assert client.get('/api/trajectory', params=query).json()['tokens']['texts']\n"
        "print(*sorted({'torch', 'transformers', 'ray', 'vllm'} & set(sys.modules)))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == ""


def test_a_request_that_takes_too_long(river_run: Path) -> None:
    client = TestClient(create_app(Pages([river_run]), Metrics("viewer"), timeout_s=1e-9))
    reply = client.get("/api/rows", params={"run": "rivers"})
    assert reply.status_code == 504 and "not answered within the deadline" in reply.json()["detail"]


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


@pytest.mark.parametrize(("number", "payload"), [*enumerate(hostile())])
def test_what_was_stored_stays_text(hostile_run: Path, number: int, payload: str) -> None:
    page = exported(hostile_run, "train_step_9", 2 * number)
    assert page.tags <= OURS
    assert page.attributes <= {"lang", "charset", "http-equiv", "content", "name", "class", "scope", "title"}
    assert payload in page.text


def test_it_listens_on_this_machine_only_unless_told_otherwise() -> None:
    args = parse_arguments(["run"])
    assert (args.host, args.port, args.auth_token) == ("127.0.0.1", 8002, None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--timeout_s", "0"], "--timeout_s is 0"),
        (["--auth_token", "two words"], "SEARCH_R1_AUTH_TOKEN"),
        (["--host", "no.such.host.invalid"], "cannot listen"),
        (["--tokenizer", "/no/such/folder"], "there is no tokenizer.json"),
    ],
)
def test_a_flag_that_cannot_be_used(
    river_run: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(river_run), "--port", "0", *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--port", "0"]) == 2
    assert "neither a run nor a folder of runs" in capsys.readouterr().err
