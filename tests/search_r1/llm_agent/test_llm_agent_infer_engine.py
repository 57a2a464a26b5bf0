"""infer.py as a user runs it: a policy that knows one episode by heart, vLLM, and a real retrieval server.

The policy repeats its searches and its answer only after exactly the ids it learned: a prompt, a stop rule or an
observation in another layout than that of training would give another output.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from llm_agent_world import OBSERVATIONS, QUESTION, ROOT, TURNS


@pytest.mark.slow  # the rehearsal of the quickstart asks by infer.py, and the server gives the same transcript
@pytest.mark.timeout(900)
def test_infer_searches_and_answers(policy_folder: Path, search_url: str) -> None:
    """Two questions from the terminal, the second one without its question mark."""
    command = [sys.executable, "infer.py", "--model", str(policy_folder), "--template", "tinywiki", "--topk", "1"]
    done = subprocess.run(
        [*command, "--retriever_url", search_url, "--dtype", "float32"],
        input=f"{QUESTION}\n{QUESTION.rstrip('?')}\n\n",
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    expected = (
        f"{TURNS[0]}{OBSERVATIONS[0]}{TURNS[1]}{OBSERVATIONS[1]}{TURNS[2]}"
        "\nAnswer: Sael\n(answered, 2 searches, 3 turns, "
    )
    assert done.stdout.count(expected) == 2
    assert done.stdout.startswith("Question: ") and "empty to leave" not in done.stdout + done.stderr
    told = re.findall(r"^\[ *\d+ s\] (.*)$", done.stderr, re.MULTILINE)
    assert f"loading the model {policy_folder}" in told and told[-1].startswith("the engine is ready, after ")
