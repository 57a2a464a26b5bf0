"""The settings that an evaluation writes beside its numbers."""

from __future__ import annotations

from search_r1.evaluation.command_line import method_config, parse_arguments, settings_of

SECRET = "hunter2"


def test_settings_hold_no_password() -> None:
    args = parse_arguments(
        None,
        [
            *("--server", f"http://user:{SECRET}@model:1/v1", "--served_model", "m", "--tokenizer", "t"),
            *("--retriever_url", f"http://user:{SECRET}@search:1/retrieve"),
            *("--output_dir", "out"),
        ],
    )
    settings = settings_of(args, method_config(args), {"retriever": "bm25"})
    assert SECRET not in str(settings)
    assert settings["model"]["server"] == "http://***@model:1/v1"
    assert settings["retriever"]["source"] == "http://***@search:1/retrieve"
    assert settings["max_turns"] > 0 and settings["retriever"]["topk"] == 3
