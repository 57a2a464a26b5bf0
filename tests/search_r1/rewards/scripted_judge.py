"""A judge on a real port: an OpenAI-compatible chat endpoint that grades by a table, after a script of troubles."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from served_app import served_app

Step = Response | str | float | None  # an answer, the judge's words, seconds to hang before it grades, or just grade


def verdict(score: object, reason: str = "because") -> str:
    return json.dumps({"reason": reason, "score": score})


def completion(content: object, finish: str = "stop") -> Response:
    message = {"role": "assistant", "content": content}
    return _json({"object": "chat.completion", "choices": [{"index": 0, "message": message, "finish_reason": finish}]})


def refusal(status: int, message: str = "no", **headers: str) -> Response:
    renamed = {name.replace("_", "-"): value for name, value in headers.items()}
    return _json({"error": {"message": message}}, status, renamed)


def breaks_off() -> Response:
    """The connection ends in the middle of the body."""

    async def half() -> AsyncIterator[bytes]:
        yield b'{"choices": [{"mess'
        raise ConnectionResetError

    return StreamingResponse(half(), headers={"Content-Length": "500"}, media_type="application/json")


def graded_line(message: str, name: str) -> Any:
    """What the judge reads on the line `name: JSON` of a rubric."""
    (line,) = re.findall(rf"^{name}: (.*)$", message, re.MULTILINE)
    return json.loads(line)


class ScriptedJudge:
    """Takes the next step of `script` for each request, then grades by `grades[answer]` (0 for others).

    `by_answer[answer]` is a step that it takes each time it is asked about this answer. Nothing is answered until
    `company` requests have run at a time.
    """

    def __init__(
        self, *script: Step, grades: Mapping[str, float] | None = None, delay_s: float = 0.0, company: int = 0
    ) -> None:
        self.script = list(script)
        self.company = company
        self.grades = dict(grades or {})
        self.by_answer: dict[str, Step] = {}
        self.delay_s = delay_s
        self.no_format: int | None = None  # the status it gives to a request with response_format
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.times: list[float] = []
        self.running = self.most_running = 0
        self.app = FastAPI()
        self.app.post("/v1/chat/completions")(self._answer)

    @property
    def asked(self) -> list[str]:
        """The answers it was asked about, in order."""
        return [graded_line(body["messages"][-1]["content"], "answer to grade") for body in self.bodies]

    async def _answer(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        self.headers.append(request.headers)
        self.times.append(time.monotonic())
        answer = self.asked[-1]
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            while self.most_running < self.company:
                await asyncio.sleep(0.005)
            if "response_format" in self.bodies[-1] and self.no_format is not None:
                return refusal(self.no_format, "response_format is not known here")
            step = self.script.pop(0) if self.script else self.by_answer.get(answer, self.delay_s)
            if isinstance(step, Response):
                return step
            if isinstance(step, str):
                return completion(step)
            await asyncio.sleep(step or 0.0)
            return completion(verdict(self.grades.get(answer, 0)))
        finally:
            self.running -= 1


@contextmanager
def judges_on_a_port() -> Iterator[Callable[[ScriptedJudge], str]]:
    """One server for many judges: gives the base URL of a judge's API, with its number in the path."""
    judges: list[ScriptedJudge] = []

    async def passed_on(scope: dict[str, Any], receive: Any, send: Any) -> None:
        number, _, path = scope["path"].removeprefix("/").partition("/")
        await judges[int(number)].app({**scope, "path": f"/{path}"}, receive, send)

    with served_app(passed_on, finishes=False) as url:

        def url_of(judge: ScriptedJudge) -> str:
            judges.append(judge)
            return f"{url}/{len(judges) - 1}/v1"

        yield url_of


def _json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(value), status, headers, "application/json")
