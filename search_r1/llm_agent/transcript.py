"""A trajectory as text: the policy's turns, and the reply to each.

Who wrote a text follows from its segment: an answer, a thought or a query is the policy's only if it is in a policy
segment, whatever tags the prompt or a retrieved page contains.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

from search_r1.llm_agent.grammar import SEARCH_R1, Grammar
from search_r1.llm_agent.observations import special_tokens
from verl.agent.text import decode_turn, unwrapped
from verl.protocol import IS_SUMMARY, WAITING, Source, Trajectory, queries_of, was_search

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Reply(Enum):
    """What followed a policy turn; the value completes a sentence that begins "turn 0: "."""

    NONE = "the end of the turn"
    OBSERVATION = "an observation"
    FEEDBACK = "feedback of the environment"


@dataclass(frozen=True)
class Turn:
    """What the policy wrote in one turn, without the control tokens that end it, and the reply it got.

    `queries` are those of executed searches; `observation` is the reply's text, without the tags around passages. Of a
    turn of a chat, `said` is the final answer, "" if it does not answer, and `reasoning` what is neither a call nor the
    answer; both are None for a turn with tags.
    """

    text: str
    reply: Reply = Reply.NONE
    queries: tuple[str, ...] = ()
    observation: str = ""
    said: str | None = None
    reasoning: str | None = None


def final_answer(turns: Sequence[Turn], grammar: Grammar = SEARCH_R1) -> str | None:
    """The last answer in any turn; a tag pair never spans turns. The final turn of a chat is the answer as a whole, if
    it has no answer in tags."""
    for turn in reversed(turns):
        answer = grammar.extract_answer(turn.text if turn.said is None else turn.said)
        if answer is not None or turn.said:
            return turn.said if answer is None else answer
    return None


def read_turns(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase, grammar: Grammar = SEARCH_R1) -> list[Turn]:
    """The policy's turns in all sequences. A reply is an observation if the turn's event is an executed search.

    Where a context or the request for a summary came in place of a turn's reply, the reply to a search is what its
    event has as `observation`. A summary is no turn here: it acts on nothing.
    """
    turns: list[Turn] = []
    text: str | None
    is_open = False  # whether the latest turn may still be answered
    sampled: tuple[int, ...] = ()  # of the turn before a reply
    control = set(special_tokens(tokenizer)) - set(grammar.tags)  # tags may be special tokens, and stay
    for segment in trajectory.segments:
        # What the policy wrote opens a turn.
        if segment.source is Source.POLICY:
            sampled, is_open = segment.ids, True
            text = decode_turn(tokenizer, _without_end(sampled, control, tokenizer))
            event = trajectory.events[len(turns)] if len(turns) < len(trajectory.events) else {}
            turns.append(Turn(text, said=said_in(event), reasoning=_reasoning_in(event, grammar)))
        # What the environment wrote is the reply to it, whose event says whether it was a search.
        elif segment.source is Source.ENVIRONMENT:
            if not is_open:
                turns.append(Turn(""))  # a turn in which no token was sampled has an event, but no segment
            is_open = False
            event = trajectory.events[len(turns) - 1]
            text = chat_reply(event) or event.get(WAITING)
            if text is None:
                text = decode_turn(tokenizer, unwrapped(tokenizer, sampled, segment.ids))
            if was_search(event):
                text = grammar.unwrap_information(text)
                turns[-1] = _searched(turns[-1], event, text)
            else:
                turns[-1] = replace(turns[-1], reply=Reply.FEEDBACK, observation=text)
        # What a further sequence begins with is nobody's turn; the passages of the latest search may stand in it alone.
        elif segment.source is Source.CONTEXT:
            if not is_open and WAITING in trajectory.events[len(turns) - 1]:
                turns.append(Turn(""))  # a summary in which no token was sampled
            event = trajectory.events[len(turns) - 1] if is_open and len(turns) <= len(trajectory.events) else {}
            if was_search(event):
                text = grammar.unwrap_information(str(event.get("observation") or ""))
                turns[-1] = _searched(turns[-1], event, text)
            elif told := chat_reply(event):
                turns[-1] = replace(turns[-1], reply=Reply.FEEDBACK, observation=told)
            is_open = False
    events = [*trajectory.events, *({} for _ in turns)]
    return [turn for turn, event in zip(turns, events, strict=False) if not event.get(IS_SUMMARY)]


def chat_reply(event: Mapping[str, Any]) -> str:
    """What the policy reads after a turn of a chat: the results of its calls, or why there are none; "" if `event` is
    of another turn, or nothing follows it."""
    calls = event.get("calls") or ()
    told = [str(call["result"] if "result" in call else f"Error: {call.get('detail')}.") for call in calls]
    return "\n\n".join(told) or str(event.get("feedback") or "")


ChatKind = Literal["think", "text", "call", "answer"]


def chat_pieces(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], event: Mapping[str, Any]
) -> list[tuple[ChatKind, str]]:
    """(kind, text) pieces of the turn `ids` of a chat model, in order; together they are its text, without the tokens
    that end it. `event` is what is stored about the turn: without it, all is text."""
    spans = [call["span"] for call in event.get("calls") or ()]
    whole = len(_without_end(ids, set(special_tokens(tokenizer)), tokenizer))
    shown = ids[: max([whole, *(end for _, end in spans)])]
    places = [tuple(len(decode_turn(tokenizer, shown[:count])) for count in span) for span in spans]
    return cut_chat_turn(decode_turn(tokenizer, shown), places, event)


def cut_chat_turn(text: str, calls: Sequence[Sequence[int]], event: Mapping[str, Any]) -> list[tuple[ChatKind, str]]:
    """(kind, text) pieces of a chat model's turn, in order; together they are `text`. `calls`: where in it each call
    begins and ends."""
    # Thinking is what comes first: to the tag that closes it, or where there is nothing else, to the end.
    reasoning, at = str(event.get("reasoning") or ""), 0
    for closing in re.finditer("</think>", text):
        if text[: closing.start()].strip().removeprefix("<think>").strip() == reasoning:
            at = closing.end()
            break
    if reasoning and not at and not calls and not event.get("content"):
        at = len(text)
    pieces: list[tuple[ChatKind, str]] = [("think", text[:at])]
    # What is said between the calls, which is the answer if there are none.
    said: ChatKind = "answer" if event.get("action") == "answer" else "text"
    for start, end in calls:
        first, last = (min(max(at, place), len(text)) for place in (start, end))
        pieces += [(said, text[at:first]), ("call", text[first:last])]
        at = last
    return [(kind, piece) for kind, piece in [*pieces, (said, text[at:])] if piece]


def said_in(event: Mapping[str, Any]) -> str | None:
    """`Turn.said` of the turn with this event."""
    if "calls" not in event:
        return None
    if "program" in event and "answer" in event:  # that of the program that played the episode
        return str(event["answer"])
    return str(event["content"]) if event["action"] == "answer" else ""


def _reasoning_in(event: Mapping[str, Any], grammar: Grammar) -> str | None:
    """`Turn.reasoning` of the turn with this event. An answer in tags is taken out of what is said around it."""
    if "calls" not in event:
        return None
    said = str(event.get("content") or "")
    if event.get("action") == "answer":
        said = "" if grammar.extract_answer(said) is None else grammar.reasoning(said)
    return f"{event.get('reasoning') or ''}\n{said}".strip()


def _searched(turn: Turn, event: Mapping[str, Any], observation: str) -> Turn:
    return replace(turn, reply=Reply.OBSERVATION, queries=tuple(queries_of(event)), observation=observation)


def _without_end(ids: Sequence[int], control: set[str], tokenizer: PreTrainedTokenizerBase) -> Sequence[int]:
    """`ids` without the control tokens at their end, which only say that a turn is over."""
    end = len(ids)
    while end and tokenizer.convert_ids_to_tokens(ids[end - 1]) in control:
        end -= 1
    return ids[:end]
