"""An environment of one's own: a library that hands out the passage asked for, or else the one on the question."""

import re

from search_r1.llm_agent.search_engine import Searcher
from verl.agent.environment import Environment, Outcome


class Library(Environment):
    stop_strings = ("</look_up>", "</reply>")
    tags = ("<look_up>", "</look_up>", "<reply>", "</reply>")
    example_turn = "<reply> Josse Aldine </reply>"

    def __init__(self, searcher):
        self.searcher = searcher

    @classmethod
    def from_config(cls, config, tokenizer):
        return cls(Searcher.from_config(config.retriever))

    async def step(self, prompt, text, tools_allowed):
        if "</reply>" in text:
            return Outcome("answer", valid=True, done=True)
        if not tools_allowed:
            return Outcome("invalid", valid=False, done=False)
        asked = re.search(r"<look_up>(.*?)</look_up>", text, re.DOTALL)
        query = asked[1].strip() if asked else prompt.row["question"]
        documents = await self.searcher.search(query)
        shelf = documents[0]["contents"] if documents else "nothing"
        reply = f"\n<shelf> {shelf} </shelf>\n"
        return Outcome("search", valid=asked is not None, done=False, reply=reply, event={"query": query})

    async def check(self):
        await self.searcher.check()

    async def close(self):
        await self.searcher.close()
