"""What the program refuses before it loads a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from search_r1.serve.__main__ import main, parse_arguments


def test_it_listens_on_this_machine_only_unless_told_otherwise() -> None:
    args = parse_arguments([])
    assert (args.host, args.port, args.auth_token) == ("127.0.0.1", 8001, None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max_concurrent", "0"], "--max_concurrent is 0"),
        (["--timeout_s", "0"], "--timeout_s is 0"),
        (["--template", "rag"], "template rag"),
        (["--template", "gone"], "no template 'gone'"),
        (["--topk", "0"], "topk"),
        (["--auth_token", "two words"], "SEARCH_R1_AUTH_TOKEN"),
        (["--host", "no.such.host.invalid"], "cannot listen"),
    ],
)
def test_a_flag_that_cannot_be_used(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--port", "0", *flags]) == 1
    assert message in capsys.readouterr().err


def test_a_model_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--port", "0", "--model", str(tmp_path / "absent")]) == 1
    assert "absent" in capsys.readouterr().err
