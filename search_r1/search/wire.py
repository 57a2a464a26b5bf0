"""The request of `POST /retrieve`: what is accepted, and within which limits."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field, ValidationError, model_validator

MAX_QUERIES = 4096  # the published trainer sends all trajectories of a step in one request (512 prompts x 5)
MAX_QUERY_CHARS = 32_768
MAX_TOPK = 100
MAX_BODY_BYTES = 32 << 20

Query = Annotated[str, Field(max_length=MAX_QUERY_CHARS)]


class RetrieveRequest(BaseModel):
    """`queries` is the published field; SkyRL sends `query`, a string or a list. Unknown fields are ignored."""

    queries: list[Query] | None = Field(default=None, max_length=MAX_QUERIES)
    query: Query | Annotated[list[Query], Field(max_length=MAX_QUERIES)] | None = None
    topk: int | None = Field(default=None, ge=0, le=MAX_TOPK, description="null or 0: the server's default")
    return_scores: bool = False

    @model_validator(mode="after")
    def _has_queries(self) -> RetrieveRequest:
        if self.queries is None and self.query is None:
            raise ValueError('send "queries": a list of strings')
        return self

    def texts(self) -> list[str]:
        """The queries as one list."""
        if self.queries is not None:
            return self.queries
        return [self.query] if isinstance(self.query, str) else self.query or []


def explain(error: ValidationError) -> str:
    """One line a problem, without echoing the request."""
    problems = error.errors(include_input=False, include_url=False, include_context=False)
    lines = [f"{'.'.join(map(str, item['loc'])) or 'request'}: {item['msg']}" for item in problems[:5]]
    return "; ".join(lines)
