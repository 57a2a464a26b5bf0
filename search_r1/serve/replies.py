"""Replies in OpenAI's format, with a report on the episode under `search_r1`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from search_r1.serve.parts import Part, merged
from search_r1.serve.streaming import Finished
from verl.protocol import Status


def completion(head: dict[str, Any], parts: Sequence[Part], finished: Finished) -> dict[str, Any]:
    """The whole reply. `head` has `id`, `created` and `model`."""
    parts = merged(parts)
    message = {
        "role": "assistant",
        "content": finished.answer or "",
        "reasoning_content": "".join(part.text for part in parts if part.kind != "answer"),
    }
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish_reason(finished)}
    extension = {**_report(finished), "parts": [asdict(part) for part in parts]}
    return {
        **head, "object": "chat.completion", "choices": [choice], "usage": _usage(finished), "search_r1": extension,
    }  # fmt: skip


def first_chunk(head: dict[str, Any]) -> dict[str, Any]:
    return _chunk(head, {"role": "assistant", "content": ""})


def part_chunk(head: dict[str, Any], part: Part) -> dict[str, Any]:
    """A chunk with a part that is not the answer."""
    return _chunk(head, {"reasoning_content": part.text}) | {"search_r1": asdict(part)}


def answer_chunk(head: dict[str, Any], part: Part, answer: str | None) -> dict[str, Any]:
    """A chunk with the answer, and the part of the transcript that contains it."""
    return _chunk(head, {"content": answer or ""}) | {"search_r1": asdict(part)}


def last_chunk(head: dict[str, Any], finished: Finished) -> dict[str, Any]:
    return _chunk(head, {}, _finish_reason(finished)) | {"search_r1": _report(finished)}


def usage_chunk(head: dict[str, Any], finished: Finished) -> dict[str, Any]:
    return {**head, "object": "chat.completion.chunk", "choices": [], "usage": _usage(finished)}


def _chunk(head: dict[str, Any], delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return {**head, "object": "chat.completion.chunk", "choices": [choice]}


def _finish_reason(finished: Finished) -> str:
    """ "length" when the policy ran out of turns or tokens before it answered."""
    return "stop" if finished.status is Status.ANSWERED else "length"


def _usage(finished: Finished) -> dict[str, int]:
    prompt, sampled = finished.prompt_length, finished.sampled_length
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _report(finished: Finished) -> dict[str, Any]:
    searches = [
        {"query": search.query, "document_ids": list(search.document_ids), "ms": round(search.milliseconds, 3)}
        for search in finished.searches
    ]
    return {
        "answer": finished.answer,
        "status": finished.status.value,
        "turns": finished.num_turns,
        "searches": searches,
        "information_tokens": finished.observed_length,
    }
