"""An environment with state: the policy reads a long text page by page, and keeps notes instead of the pages.

`<page> 2 </page>` shows a page. `<note> ... </note>` adds a note, and a further sequence begins: the policy then sees
the question and all of its notes, and none of the pages. So a text can be longer than the context. `<answer> ...
</answer>` ends the episode. A row has its `question` and its `pages`, a list of texts.

agent.environment=example.notebook_environment.NotebookEnvironment
"""

from __future__ import annotations

import re

from verl.agent.environment import Episode, EpisodicEnvironment, Outcome
from verl.protocol import Prompt

ACTION = re.compile(r"<(page|note|answer)>(.*?)</\1>\s*$", re.DOTALL)
HELP = "Write <page> number </page>, <note> what to remember </note> or <answer> the answer </answer>."


class NotebookEpisode(Episode):
    """One reader: the pages of the row, and the notes so far."""

    def __init__(self, prompt: Prompt) -> None:
        self.question = str(prompt.row.get("question") or "")
        self.pages = [str(page) for page in prompt.row.get("pages") or ()]
        self.notes: list[str] = []

    async def step(self, text: str, tools_allowed: bool) -> Outcome:
        found = ACTION.search(text)
        action, said = (found[1], found[2].strip()) if found else ("invalid", "")
        if action == "answer":
            return Outcome("answer", valid=True, done=True, event={"answer": said, "notes": list(self.notes)})
        if not tools_allowed:  # the last turn: nobody would read a page
            return Outcome(action, valid=False, done=False)
        if action == "page":
            return self.show(said)
        if action == "note" and said:
            return self.note(said)
        return Outcome("invalid", valid=False, done=False, reply=f"\n{HELP}\n")

    def show(self, number: str) -> Outcome:
        """The page, which the policy reads after its turn. What it did wrong it is told, to learn from it."""
        if not number.isdecimal() or not 1 <= int(number) <= len(self.pages):
            return Outcome("page", False, False, reply=f"\nThere are pages 1 to {len(self.pages)}.\n")
        return Outcome("page", True, False, reply=f"\nPage {number}: {self.pages[int(number) - 1]}\n")

    def note(self, note: str) -> Outcome:
        """A further sequence, which begins with what is left of the context: the question and the notes."""
        self.notes.append(note)
        notes = "\n".join(f"- {one}" for one in self.notes)
        content = f"{self.question}\n{HELP} There are pages 1 to {len(self.pages)}.\nYour notes:\n{notes}\n"
        return Outcome("note", True, False, context=[{"role": "user", "content": content}], event={"note": note})


class NotebookEnvironment(EpisodicEnvironment):
    """Opens a notebook for each episode."""

    stop_strings = ("</page>", "</note>", "</answer>")
    tags = ("<page>", "</page>", "<note>", "</note>", "<answer>", "</answer>")
    example_turn = "<answer> I do not know. </answer>"
    example_turns = ("<page> 1 </page>", "<note> The Lune is a river. </note>")

    async def open(self, prompt: Prompt) -> Episode:
        return NotebookEpisode(prompt)
