"""vLLM's scheduler, changed to detect the end of a turn itself and then send the whole turn.

vLLM's engine sends every token of every sequence to the calling process, which detokenizes it, looks for stop strings
and tells the engine to stop: at hundreds of sequences this costs more than a small model, and a sequence continues
until the stop arrives. Here `StopStrings` checks ids in the engine's process, between two steps, once per token of
every sequence; one message brings a turn's ids and log-probs.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from verl.rollout.vllm_private import sampled_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm.config import VllmConfig


class StopStrings:
    """The texts at which a turn ends, by the ids of one tokenizer.

    A stop string is complete when its last character is there. So ids are decoded only if the latest one can contain
    that character, which a set lookup tells: for `</search>`, the few tokens with a `>` in them and before it nothing
    that is not in the stop string.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str]) -> None:
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)  # of a fast tokenizer: decodes faster
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._endings = self._tokens_that_end_one() if stops else frozenset()

    def may_end_with(self, token: int) -> bool:
        """Whether this token may complete a stop string."""
        return self._endings is None or token in self._endings

    def found(self, ids: Sequence[int]) -> str | None:
        """The stop string that the last of `ids` (the turn so far) completes; of several, the one that ends first.

        Call it for every id as it is sampled: a stop string that an earlier id completed is not found.
        """
        if not self.may_end_with(ids[-1]):
            return None
        text = self._decode(ids)
        ends = {stop: text.find(stop) + len(stop) for stop in self._stops if stop in text}
        return min(ends, key=ends.__getitem__, default=None)

    def _tokens_that_end_one(self) -> frozenset[int] | None:
        """The ids whose text can end a stop string.

        None if any id may: several tokens may share the bytes of a non-ASCII character, and a decoder may drop the
        space of a single token.
        """
        if not all("!" <= stop[-1] <= "~" for stop in self._stops):
            return None
        size = len(self._tokenizer)
        texts = (self._decode([token]) for token in range(size))
        return frozenset(token for token, text in enumerate(texts) if any(_can_end(text, one) for one in self._stops))

    def _decode(self, ids: Sequence[int]) -> str:
        if self._backend is not None:
            return str(self._backend.decode(ids, skip_special_tokens=False))
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _can_end(text: str, stop: str) -> bool:
    """Whether `stop` may end within a token's `text`, whose beginning and spaces depend on the tokens around it."""
    text, stop = ("".join(one.split()) for one in (text, stop))
    for end, character in enumerate(text, 1):
        if character == stop[-1]:
            known = text[:end].rpartition("\ufffd")[2]  # what follows the last byte that is not a character on its own
            if stop.endswith(known) or known.endswith(stop):
                return True
    return False


STOP = "stop_strings"  # the request's key for them: vLLM's own `stop` is checked in the calling process
BEGUN = "num_begun"  # how many ids at the end of the prompt belong to the turn
INTERRUPT = "interrupt_others"  # in a request that ends all others, and their stop reason


@dataclass(slots=True)
class Turn:
    """The state of a request while it is sampled; used once per token."""

    stops: StopStrings | None
    begun: list[int]  # ids at the end of the prompt in which a stop string may have begun
    is_whole: bool  # it is sent as a whole when it ends, with all log-probs
    log_probs: array[float]  # float32, as they come
    is_interrupted: bool = False

    def stop_in(self, ids: Sequence[int]) -> str | None:
        """The stop string that the last of `ids`, those sampled by the request, completes."""
        if self.stops is None or not self.stops.may_end_with(ids[-1]):
            return None
        return self.stops.found([*self.begun, *ids] if self.begun else ids)


class TurnScheduler(Scheduler):
    """A scheduler whose requests may carry stop strings in `extra_args`, under `STOP`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tokenizer = cached_tokenizer_from_config(self.vllm_config.model_config)
        self._stops: dict[tuple[str, ...], StopStrings] = {}
        self._turns: WeakKeyDictionary[Request, Turn] = WeakKeyDictionary()  # removed with an aborted request

    def add_request(self, request: Request) -> None:
        """Add a request; one that carries `INTERRUPT` ends all others after their next token.

        Aborting the others instead would lose what was sampled of their turns, which is only here so far.
        """
        self._turns[request] = self._turn_of(request)
        if request.sampling_params and (request.sampling_params.extra_args or {}).get(INTERRUPT):
            for other in self.requests.values():
                self._turns[other].is_interrupted = True
        super().add_request(request)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """The messages to send: whole turns that have ended, for requests that want that, else each token."""
        before = dict(self.requests)
        sent = super().update_from_output(scheduler_output, model_runner_output)
        for outputs in sent.values():
            outputs.outputs = [output for output in outputs.outputs if self._is_due(output, before[output.request_id])]
        # Empty messages would wake the calling process after every step.
        return {
            client: outputs
            for client, outputs in sent.items()
            if outputs.outputs or outputs.finished_requests or outputs.scheduler_stats
        }

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        new_token_ids, stopped = super()._update_request_with_output(request, new_token_ids, is_stale)
        if new_token_ids:
            turn = self._turns[request]
            if stop := turn.stop_in(sampled_ids(request)):
                request.status, request.stop_reason, stopped = RequestStatus.FINISHED_STOPPED, stop, True
            elif turn.is_interrupted and not stopped:
                request.status, request.stop_reason, stopped = RequestStatus.FINISHED_STOPPED, INTERRUPT, True
        return new_token_ids, stopped

    def _turn_of(self, request: Request) -> Turn:
        how = request.sampling_params
        extra = (how and how.extra_args) or {}
        begun = (request.prompt_token_ids or [])[-extra[BEGUN] :] if extra.get(BEGUN) else []
        is_whole = how is not None and how.output_kind is RequestOutputKind.FINAL_ONLY
        stops: tuple[str, ...] = tuple(extra.get(STOP, ()))
        if stops and stops not in self._stops:
            self._stops[stops] = StopStrings(self._tokenizer, stops)
        return Turn(self._stops.get(stops), begun, is_whole, array("f"))

    def _is_due(self, output: EngineCoreOutput, request: Request) -> bool:
        """Whether the output is sent now. Keeps the log-probs of an unfinished turn; gives a finished one all of its
        tokens, with log-probs in vLLM's format but without valid ranks, which nobody reads.
        """
        turn = self._turns[request]
        if not turn.is_whole:
            return True
        # An output has the log-probs of this step's tokens alone; the first column is that of the token sampled.
        if output.new_logprobs is not None:
            turn.log_probs.extend(output.new_logprobs.logprobs[:, 0].tolist())
        # The last output then carries the whole turn, in arrays with this one column.
        if output.finished:
            ids = output.new_token_ids = list(sampled_ids(request))
            output.new_logprobs = None
            if turn.log_probs:
                id_N1 = np.asarray(ids, np.int32)[:, None]
                log_prob_N1 = np.asarray(turn.log_probs, np.float32)[:, None]
                output.new_logprobs = LogprobsLists(id_N1, log_prob_N1, np.zeros(len(ids), np.int32))
        return bool(output.finished)


class AsyncTurnScheduler(TurnScheduler, AsyncScheduler):
    """A `TurnScheduler` for where vLLM schedules a step before it has the tokens of the one before, as on GPUs."""


def turn_scheduler(vllm_config: VllmConfig, **kwargs: Any) -> Scheduler:
    """A scheduler for the engine, in place of the scheduler class in vLLM's settings."""
    is_async = vllm_config.scheduler_config.async_scheduling
    return (AsyncTurnScheduler if is_async else TurnScheduler)(vllm_config=vllm_config, **kwargs)
