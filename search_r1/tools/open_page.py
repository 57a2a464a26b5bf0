"""The tool `open_page`: the page to which a passage belongs, part by part, from the retrieval server of the run; and
`get_document`, the same for a corpus of whole documents, as BrowseComp-Plus names it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from search_r1.errors import RetrieverError, RetrieverRejected
from search_r1.http.client import may_blame_query
from search_r1.search.client import PageClient
from search_r1.search.sanitize import whole_characters
from verl.agent.text import fits_in, longest_start
from verl.agent.tools.definition import Tool, ToolError, ToolResult
from verl.errors import ConfigError, EnvironmentUnavailable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.config import Config

_MOST_PARTS = 50


class OpenPage(Tool):
    """Shows a page, in parts of `max_result_tokens` tokens."""

    name = "open_page"
    description = "Open the page that a passage is taken from. A long page has several parts."
    takes, of = "id", "passage"
    max_result_tokens: int
    needs_retriever = True
    timeout_s = None  # the client has a deadline of its own, and missing it is no fault of the policy

    def __init__(
        self, client: PageClient, tokenizer: PreTrainedTokenizerBase, max_result_tokens: int, max_chars: int = 100_000
    ) -> None:
        """`max_chars`: of a page, what is beyond cannot be opened."""
        self.parameters = {
            "type": "object",
            "properties": {
                self.takes: {
                    "type": "string",
                    "minLength": 1,
                    "description": f"the {self.takes} of the {self.of}, from a search",
                },
                "part": {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": _MOST_PARTS,
                    "default": 1,
                    "description": "which part of the page",
                },
            },
            "required": [self.takes],
            "additionalProperties": False,
        }
        self.max_result_tokens = max_result_tokens
        self._client, self._tokenizer, self._max_chars = client, tokenizer, max_chars

    @classmethod
    def from_config(cls, config: Config | None, tokenizer: PreTrainedTokenizerBase | None, **options: Any) -> OpenPage:
        """Pages of the server at `retriever.url`; a part has at most `data.max_obs_length` tokens by default."""
        if config is None or tokenizer is None:
            raise ConfigError(f"the tool {cls.name} needs a config and a tokenizer")
        retriever = config.retriever
        if retriever.engine is not None:
            raise ConfigError(
                f"the tool {cls.name} asks the retrieval server, and retriever.engine={retriever.engine} is none; "
                "leave the tool out, or write one of your own for this engine"
            )
        client = PageClient(retriever.url, retriever.timeout_s, retriever.deadline_s)
        return cls(client, tokenizer, config.data.max_obs_length, **options)

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        """See `Tool.call`."""
        name, number = arguments[self.takes].strip(), int(arguments.get("part", 1))
        try:
            page = await self._page(name)
        except EnvironmentUnavailable as error:
            # An id that the server refuses, as it is empty or too long; `check` found the server to take others.
            cause = error.__cause__
            if not (isinstance(cause, RetrieverRejected) and may_blame_query(cause.status)):
                raise
            page = None
        if page is None:
            raise ToolError(f"there is no {self.of} with the {self.takes} {name[:100]!r}; take one that a search gave")
        title, rest = " ".join(page["title"].split()) or "none", page["text"].strip()
        if not fits_in(self._tokenizer, title, self.max_result_tokens // 2):
            # The first paragraph of a text without a title, which would leave no room for the others.
            title, rest = "none", f"{page['title']}\n{rest}".strip()
        # Read up to the part that is asked for.
        text = ""
        for part in range(1, number + 1):
            if not rest and part > 1:
                raise ToolError(f"part {number} does not exist; the page has {part - 1} part{'s' * (part > 2)}")
            text, rest = self._part(title, part, rest)
        return ToolResult(text, {"page": name, "title": title, "part": number, "more": bool(rest)})

    def _part(self, title: str, number: int, text: str) -> tuple[str, str]:
        """A part with its head, and the text after it."""
        last = f"Title: {title} (part {number}, the last)\n" if number > 1 else f"Title: {title}\n"
        head = f"Title: {title} (part {number}; the page continues in part {number + 1})\n"
        most = self.max_result_tokens
        if fits_in(self._tokenizer, last + text, most):
            return last + text, ""
        shown = longest_start(text, lambda body: fits_in(self._tokenizer, head + body, most))
        if not shown:
            raise ToolError(f"{most} tokens, the limit of this tool, leave no room for the text of a {self.of}")
        return head + shown, text[len(shown) :].lstrip()

    async def _page(self, name: str) -> dict[str, Any] | None:
        try:
            return await self._client.page(name, self._max_chars)
        except RetrieverError as error:
            raise EnvironmentUnavailable(whole_characters(str(error))) from error

    async def check(self) -> None:
        """See `Tool.check`: asks for a page, whether or not there is one."""
        await self._page("0")

    async def close(self) -> None:
        """See `Tool.close`."""
        await self._client.close()


class GetDocument(OpenPage):
    """Shows a document, in parts of `max_result_tokens` tokens."""

    name = "get_document"
    description = "Get the text of a document. A long one has several parts."
    takes, of = "docid", "document"
