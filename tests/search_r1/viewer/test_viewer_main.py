"""What the program refuses before it serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from search_r1.viewer.__main__ import main, parse_arguments


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
    assert main([str(river_run), "--port", "0", *flags]) == 1
    assert message in capsys.readouterr().err


def test_a_folder_without_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--port", "0"]) == 1
    assert "neither a run nor a folder of runs" in capsys.readouterr().err
