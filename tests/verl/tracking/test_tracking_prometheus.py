"""`/metrics` of a run, asked over HTTP, and the Grafana dashboard that draws it."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from e2e_world import ROOT, free_port, wait_until_up
from prometheus_client.parser import text_string_to_metric_families

from verl.errors import ConfigError
from verl.tracking.backend import RunInfo
from verl.tracking.prometheus_backend import PrometheusBackend
from verl.tracking.tracker import Tracker

DASHBOARD: dict[str, Any] = json.loads((ROOT / "configs/grafana_dashboard.json").read_text())


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[PrometheusBackend]:
    made = PrometheusBackend(RunInfo("project", 'name "1"', tmp_path, {}), "127.0.0.1", 0)
    yield made
    made.finish()


def asked(port: int) -> dict[tuple[str, str], float]:
    """Values by name and label `metric`."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as reply:
        families = list(text_string_to_metric_families(reply.read().decode()))
    samples = [one for family in families for one in family.samples if one.name.startswith("verl_")]
    assert all(one.labels["experiment"] == 'name "1"' and one.labels["project"] == "project" for one in samples)
    return {(one.name, one.labels.get("metric", "")): one.value for one in samples}


def test_the_latest_values_are_served(backend: PrometheusBackend) -> None:
    assert asked(backend.port) == {("verl_step", ""): 0, ("verl_last_logged_seconds", ""): 0}
    backend.log({"critic/score/mean": 0.25, "val/test_score/nq-open": 0.5, "val/test_score/nq.open": 0.75}, 7)
    backend.log({"critic/score/mean": 0.5, "actor/grad_norm": float("nan")}, 8)
    found = asked(backend.port)
    assert found.pop(("verl_last_logged_seconds", "")) > 1.7e9
    assert str(found.pop(("verl_actor_grad_norm", "actor/grad_norm"))) == "nan"
    assert found == {
        ("verl_step", ""): 8,
        ("verl_critic_score_mean", "critic/score/mean"): 0.5,
        ("verl_val_test_score_nq_open", "val/test_score/nq-open"): 0.5,  # of the last validation
        ("verl_val_test_score_nq_open", "val/test_score/nq.open"): 0.75,
    }


def test_the_tracker_serves_while_the_run_goes_on(tmp_path: Path) -> None:
    port = free_port()
    config = {"trainer": {"metrics_port": port, "metrics_host": "127.0.0.1"}}
    with Tracker([], "project", 'name "1"', tmp_path, config) as tracker:
        tracker.log({"critic/score/mean": 0.5}, 3)
        assert asked(port)["verl_critic_score_mean", "critic/score/mean"] == 0.5
    with pytest.raises(OSError):
        asked(port)


def test_nothing_is_served_without_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl.tracking.prometheus_backend.start_http_server", None)
    for trainer in ({}, {"metrics_port": None, "metrics_host": "127.0.0.1"}):
        Tracker([], "project", "experiment", tmp_path, {"trainer": trainer}).finish()


def test_a_port_that_is_taken_is_an_error_with_advice(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"trainer.metrics_port={port} .*choose another port"):
            Tracker([], "p", "e", tmp_path, {"trainer": {"metrics_port": port, "metrics_host": "127.0.0.1"}})


def test_the_dashboard_has_what_grafana_needs_to_load_it() -> None:
    """The fields of https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model/."""
    assert {"uid", "title", "schemaVersion", "panels", "templating", "time"} <= DASHBOARD.keys()
    variables = {one["name"]: one["type"] for one in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource": "datasource", "experiment": "query"}
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels) > 10
    for panel in panels:
        assert panel["type"] in ("stat", "timeseries")
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
        for one in (panel, *panel["targets"]):
            assert one["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        used = set(re.findall(r"\$\{?(\w+)", json.dumps(panel)))
        assert used <= set(variables)
    for one, other in combinations([panel["gridPos"] for panel in panels], 2):
        apart = (one["x"] + one["w"] <= other["x"], other["x"] + other["w"] <= one["x"])
        assert any(apart) or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]


PROMETHEUS = shutil.which("prometheus")
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
LOGGED = {
    **{f"{kind}/test_score/rivers": 0.5 for kind in ("val", "val_ref", "test")},
    **{f"{kind}/test_score/mean": 0.5 for kind in ("val", "val_ref", "test")},
    "health/guard/alarm": 0.0,
}


@pytest.fixture
def prometheus(tmp_path: Path, backend: PrometheusBackend) -> Iterator[str]:
    """The address of a Prometheus that scrapes a run twice a second."""
    if PROMETHEUS is None:
        pytest.skip("there is no Prometheus on this machine (Debian: apt-get install prometheus)")
    (tmp_path / "prometheus.yml").write_text(
        "global: {scrape_interval: 500ms, scrape_timeout: 400ms}\n"
        f"scrape_configs: [{{job_name: run, static_configs: [{{targets: ['127.0.0.1:{backend.port}']}}]}}]\n"
    )
    address = f"127.0.0.1:{free_port()}"
    command = [PROMETHEUS, f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log, env=os.environ)
    try:
        wait_until_up(server, f"http://{address}/-/ready")
        yield f"http://{address}"
    finally:
        server.terminate()
        server.wait(60)


def test_a_real_prometheus_answers_every_query_of_the_dashboard(prometheus: str, backend: PrometheusBackend) -> None:
    """The variables are filled in as Grafana does. That a run logs such names tests/e2e/test_whole_loop.py shows."""
    backend.log(LOGGED | {name: 1.0 for query in QUERIES for name in names_behind(query)}, 3)
    variable = next(one for one in DASHBOARD["templating"]["list"] if one["name"] == "experiment")
    [metric, label] = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()  # type: ignore[union-attr]
    assert until_found(prometheus, f"count by ({label}) ({metric})")[0]["metric"][label] == 'name "1"'
    for query in QUERIES:
        filled = re.sub(r"\$\{?experiment(:\w+)?\}?", ".*", query).replace("$__rate_interval", "1m")
        assert "$" not in filled
        assert until_found(prometheus, filled), query


def names_behind(query: str) -> list[str]:
    """Metrics of a run that a query draws: those that it names, and one of each pattern."""
    plain = re.findall(r"\bverl_(\w+)", re.sub(r'__name__=~"[^"]+"', "", query))
    patterns = [part for found in re.findall(r'__name__=~"verl_([^"]+)"', query) for part in alternatives(found)]
    return [name for name in (*plain, *patterns) if name not in ("step", "last_logged_seconds")]


def alternatives(pattern: str) -> list[str]:
    """A name that a pattern such as `(val|test)_score_.*` fits."""
    one = re.sub(r"\(([^|()]*)\|?[^()]*\)", r"\1", pattern)
    return [one.replace(".*", "x").replace(".+", "x")]


def until_found(address: str, query: str) -> list[dict[str, Any]]:
    """The answer to `query`; Prometheus has asked the run within a second."""
    url = f"{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    deadline = time.monotonic() + 60
    while True:
        with urllib.request.urlopen(url, timeout=60) as reply:
            found: list[dict[str, Any]] = json.load(reply)["data"]["result"]
        if found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)
