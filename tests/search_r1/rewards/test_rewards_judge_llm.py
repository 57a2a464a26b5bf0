"""The judge against vLLM's own OpenAI server with a tiny untrained model, which has no opinion on anything."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from e2e_world import free_port

from search_r1.rewards.judge import Judge
from search_r1.rewards.reading import Reading
from verl.errors import ConfigError, RewardUnavailable

# What vLLM's server imports beside vLLM itself.
_SERVER_NEEDS = ("watchfiles", "prometheus_fastapi_instrumentator", "model_hosting_container_standards")
_MISSING = [name for name in _SERVER_NEEDS if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(_MISSING), reason=f"vLLM's OpenAI server needs {', '.join(_MISSING)}"),
]


@pytest.fixture(scope="module")
def url(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("llm")
    (folder / "chat.jinja").write_text("{% for message in messages %}{{ message.content }}\n{% endfor %}")
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny_model_dir)]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    command += ["--max-model-len", "1024", "--max-num-seqs", "8", "--chat-template", str(folder / "chat.jinja")]
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | variables)
        try:
            _wait(f"http://127.0.0.1:{port}/health", process, folder / "log")
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            process.wait(timeout=60)


def _wait(address: str, process: subprocess.Popen[bytes], log: Path, seconds: float = 600.0) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process.poll() is not None:
            pytest.fail(f"the server ended with {process.returncode}: {log.read_text()[-2000:]}")
        try:
            if httpx.get(address, timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    pytest.fail(f"{address} was not ready in {seconds} s")


def measure(judge: Judge, *answers: str) -> list[float | RewardUnavailable]:
    readings = [Reading((), answer, ("gold",), "which?") for answer in answers]
    return asyncio.run(judge.measure(readings))


def test_rubbish_is_never_a_score(url):
    judge = Judge(url, "tiny", max_tokens=40, retries=1, extra_body={"response_format": None})
    found = measure(judge, "gold", "x<|endoftext|>y", "gold", "")
    assert found[3] == 0.0 and found[0] is found[2]
    for value in found[:3]:
        assert isinstance(value, RewardUnavailable) and "2 requests" in str(value)
        assert "cut at max_tokens" in str(value) or "JSON" in str(value)


def test_with_a_reply_format_too(url):
    """Where the server has a grammar engine it forces JSON, of any score; where it has none it is asked without."""
    for value in measure(Judge(url, "tiny", max_tokens=40, retries=1), "gold", "silver"):
        assert isinstance(value, RewardUnavailable | float)
        assert isinstance(value, RewardUnavailable) or 0.0 <= value <= 1.0
        assert "HTTP" not in str(value)


def test_what_the_server_refuses_stops_the_run(url):
    with pytest.raises(ConfigError, match="HTTP 404.*`nobody` does not exist"):
        measure(Judge(url, "nobody"), "gold")
    with pytest.raises(ConfigError, match="HTTP 400.*max_tokens.*check model, max_tokens and extra_body"):
        measure(Judge(url, "tiny", max_tokens=100_000), "gold")
