"""The sampler against a Hugging Face forward pass, also with adapters; its promises about ids, stops and seeds."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from weight_source import stream_of

from verl.agent.environment import INTERRUPTED, Generation, Sampling, join_pieces
from verl.engine.lora import Lora, adapted_layers, add_adapters, begin_adapters
from verl.engine.merging import merged_tensors
from verl.engine.model import CausalModel, ReferencePolicy
from verl.errors import ConfigError, EngineDied, RolloutError, WeightSyncError
from verl.weight_sync.export import adapters_of, with_adapters

MAX_ERROR = 2e-5
MEAN_ERROR = 2e-6


@pytest.fixture(scope="module")
def reference(tiny_model_dir: Path) -> Any:
    """The same weights, run by Hugging Face in float32."""
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def changed(reference: Any) -> Any:
    """A model whose log-probs differ clearly from those of `reference`."""
    model = AutoModelForCausalLM.from_config(reference.config, dtype=torch.float32).eval()
    draw = torch.Generator().manual_seed(1)
    weights = reference.state_dict().items()
    model.load_state_dict({name: value + 0.02 * torch.randn(value.shape, generator=draw) for name, value in weights})
    return model


@pytest.fixture
def prompts(byte_tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    source = random.Random(3)
    return [[source.randrange(2, len(byte_tokenizer)) for _ in range(source.randrange(3, 90))] for _ in range(24)]


def seeded(prompts: list[list[int]], **changes: Any) -> list[Sampling]:
    return [Sampling(max_tokens=24, seed=100 + index, **changes) for index in range(len(prompts))]


@torch.no_grad()
def log_probs_of(model: Any, context: list[int], ids: tuple[int, ...], temperature: float) -> torch.Tensor:
    logits = model(torch.tensor([context + list(ids)])).logits[0, len(context) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


def errors(model: Any, prompts: list[list[int]], generations: list[Generation], temperature: float) -> torch.Tensor:
    """[T] absolute differences between the sampler's log-probs and the model's."""
    return torch.cat(
        [
            (log_probs_of(model, context, generation.ids, temperature) - torch.tensor(generation.log_probs)).abs()
            for context, generation in zip(prompts, generations, strict=True)
        ]
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_the_model_at_the_temperature(
    session: Any, reference: Any, prompts: list[list[int]], temperature: float
) -> None:
    how = seeded(prompts, temperature=temperature)
    generations = session.sample(prompts, how)
    error_T = errors(reference, prompts, generations, temperature)
    assert len(error_T) > 300
    assert error_T.max() < MAX_ERROR
    assert error_T.mean() < MEAN_ERROR


def test_greedy_takes_the_most_likely_and_reports_log_probs_at_temperature_one(
    session: Any, reference: Any, prompts: list[list[int]]
) -> None:
    generations = session.sample(prompts, seeded(prompts, temperature=0.0))
    assert errors(reference, prompts, generations, 1.0).max() < MAX_ERROR
    with torch.no_grad():
        logits_TV = reference(torch.tensor([prompts[0] + list(generations[0].ids)])).logits[0, len(prompts[0]) - 1 : -1]
    assert tuple(logits_TV.argmax(-1).tolist()) == generations[0].ids


@pytest.mark.parametrize("bucket_mib", [512, 0.05])
def test_after_a_sync_the_engine_samples_from_the_new_weights(
    session: Any, reference: Any, changed: Any, prompts: list[list[int]], weight_dir: Path, bucket_mib: float
) -> None:
    """In one bucket, and in many of 51 KiB, which cut apart what the engine fuses."""
    how = seeded(prompts)
    before = session.sample(prompts, how)
    try:
        session.load(stream_of(changed.named_parameters(), 7, weight_dir, bucket_mib=bucket_mib))
        assert session.engine.weight_version == 7
        after = session.sample(prompts, how)
    finally:
        session.load(stream_of(reference.named_parameters(), 8, weight_dir))
    assert errors(changed, prompts, after, 1.0).max() < MAX_ERROR
    assert errors(changed, prompts, after, 1.0).mean() < MEAN_ERROR
    assert errors(reference, prompts, after, 1.0).mean() > 0.01
    assert session.sample(prompts, how) == before


async def interrupted(engine: Any, prompts: list[list[int]], sampling: list[Sampling]) -> list[Generation]:
    """The turns after about ten tokens of each."""
    turns = [asyncio.ensure_future(engine.generate(ids, how)) for ids, how in zip(prompts, sampling, strict=True)]
    await engine.generate(prompts[0], Sampling(max_tokens=10, seed=1, ignore_eos=True))
    left = set(turns)
    while left:
        await engine.interrupt()
        _, left = await asyncio.wait(left, timeout=0.05)
    return [turn.result() for turn in turns]


def test_an_interrupted_turn_goes_on_under_other_weights_and_not_with_the_cache_of_the_old_ones(
    session: Any, reference: Any, changed: Any, prompts: list[list[int]], weight_dir: Path
) -> None:
    """Each piece has the log-probs of its weights, the second after a context that the first weights have sampled."""
    how = [Sampling(max_tokens=300, seed=100 + index, ignore_eos=True) for index in range(len(prompts))]
    first = session.run(interrupted(session.engine, prompts, how))
    version = session.engine.weight_version
    assert all(piece.finish_reason == INTERRUPTED and 0 < len(piece.ids) < 300 for piece in first)
    assert max(len(piece.ids) for piece in first) > 5
    assert errors(reference, prompts, first, 1.0).max() < MAX_ERROR
    contexts = [[*ids, *piece.ids] for ids, piece in zip(prompts, first, strict=True)]
    # The engine has the keys and values of all that in its cache.
    session.sample(contexts, seeded(contexts))
    try:
        session.load(stream_of(changed.named_parameters(), version + 1, weight_dir))
        rest = [replace(one, max_tokens=30, num_begun=len(p.ids)) for one, p in zip(how, first, strict=True)]
        second = session.sample(contexts, rest)
    finally:
        session.load(stream_of(reference.named_parameters(), version + 2, weight_dir))
    assert errors(changed, contexts, second, 1.0).max() < MAX_ERROR
    assert errors(reference, contexts, second, 1.0).mean() > 0.01
    assert {piece.weight_version for piece in first} == {version}
    assert {piece.weight_version for piece in second} == {version + 1}


def test_an_engine_that_was_interrupted_samples_as_before(session: Any, prompts: list[list[int]]) -> None:
    before = session.sample(prompts[:4], seeded(prompts[:4]))
    session.run(session.engine.interrupt())
    assert session.sample(prompts[:4], seeded(prompts[:4])) == before
    assert session.engine.num_running == 0


def test_a_stop_string_may_begin_in_the_piece_before(
    session: Any, byte_tokenizer: PreTrainedTokenizerFast, prompts: list[list[int]]
) -> None:
    tried = 0
    for prompt in prompts:
        context = [*prompt, *byte_tokenizer("<")["input_ids"]]
        greedy = Sampling(temperature=0.0, max_tokens=3, ignore_eos=True)
        [first, *_] = free = session.run(session.engine.generate(context, greedy)).ids
        text = byte_tokenizer.decode([first])
        if len(text) != 1 or not text.isascii() or not text.isprintable():
            continue
        tried += 1
        stopping = replace(greedy, stop=("<" + text,))
        assert session.run(session.engine.generate(context, replace(stopping, num_begun=1))).ids == (first,)
        assert session.run(session.engine.generate(context, stopping)).ids[: len(free)] == free
    assert tried


def test_same_seed_gives_the_same_bits_alone_and_among_others(session: Any, prompts: list[list[int]]) -> None:
    how = seeded(prompts)
    together = session.sample(prompts, how)
    for index in (0, 5, 23):
        assert session.run(session.engine.generate(prompts[index], how[index])) == together[index]
    other = session.generate(prompts[0], max_tokens=24, seed=7)
    assert other.ids != together[0].ids


def test_stop_string_ends_the_turn_and_is_part_of_it(
    session: Any, prompts: list[list[int]], byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    free = session.generate(prompts[0], max_tokens=24, seed=5, ignore_eos=True)
    text = byte_tokenizer.decode(free.ids)
    stop = next(text[i : i + 2] for i in range(8, len(text)) if text[i : i + 2].isascii())
    stopped = session.generate(prompts[0], max_tokens=24, seed=5, stop=(stop,))
    assert stopped.finish_reason == "stop"
    assert len(stopped.ids) < len(free.ids)
    # As sampled: the first ids and bits of the run without a stop, the last one completing the stop string.
    assert stopped.ids == free.ids[: len(stopped.ids)]
    assert stopped.log_probs == free.log_probs[: len(stopped.ids)]
    assert stop in byte_tokenizer.decode(stopped.ids)
    assert stop not in byte_tokenizer.decode(stopped.ids[:-1])


def test_token_that_reaches_past_a_stop_string_is_kept_whole(
    session: Any, prompts: list[list[int]], byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    long_tokens = {i for i in range(len(byte_tokenizer)) if len(byte_tokenizer.decode([i])) > 2 and i > 1}
    for seed in range(400):
        free = session.generate(prompts[1], max_tokens=24, seed=seed, ignore_eos=True)
        found = next((i for i, token in enumerate(free.ids) if token in long_tokens), None)
        if found is not None:
            break
    assert found is not None, "no token of several characters was sampled"
    stop = byte_tokenizer.decode([free.ids[found]])[:-1]
    stopped = session.generate(prompts[1], max_tokens=24, seed=seed, stop=(stop,))
    assert stopped.ids == free.ids[: len(stopped.ids)]
    assert len(stopped.ids) <= found + 1


def test_a_turn_comes_in_one_message(session: Any, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many that are sampled together, also of those that a stop string ends; a stream has a message a token."""
    from vllm.v1.engine.output_processor import OutputProcessor

    received: Counter[str] = Counter()
    process = OutputProcessor.process_outputs

    def counted(self: Any, outputs: Any, *args: Any, **more: Any) -> Any:
        received.update(output.request_id for output in outputs)
        return process(self, outputs, *args, **more)

    monkeypatch.setattr(OutputProcessor, "process_outputs", counted)
    how = [*seeded(prompts[:12]), *seeded(prompts[12:], stop=(" ", "e"))]
    turns = session.sample(prompts, how)
    assert {turn.finish_reason for turn in turns} == {"stop", "length"}
    assert list(received.values()) == [1] * len(prompts)
    received.clear()

    async def stream() -> int:
        return sum([len(piece.ids) async for piece in session.engine.stream(prompts[0], how[0])])

    length = session.run(stream())
    assert length == len(turns[0].ids)
    assert list(received.values()) == [length]


def test_end_of_sequence_is_part_of_the_turn(
    session: Any, prompts: list[list[int]], byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    eos = byte_tokenizer.eos_token_id
    for seed in range(300):
        how = Sampling(max_tokens=24, seed=seed, temperature=2.0)
        generation = session.run(session.engine.generate(prompts[2], how))
        if generation.finish_reason == "stop":
            break
    assert generation.ids[-1] == eos
    assert eos not in generation.ids[:-1]
    assert len(generation.log_probs) == len(generation.ids)


def test_max_tokens_ends_the_turn_by_length(session: Any, prompts: list[list[int]]) -> None:
    generation = session.generate(prompts[0], max_tokens=5, seed=0, ignore_eos=True)
    assert (generation.finish_reason, len(generation.ids)) == ("length", 5)


def test_context_longer_than_the_model_is_an_error_that_says_so(session: Any) -> None:
    with pytest.raises(RolloutError, match="context of 600 tokens failed"):
        session.generate([5] * 600, max_tokens=5)


def test_device_that_the_installed_engine_was_not_built_for(tiny_model_dir: Path) -> None:
    from vllm.platforms import current_platform

    from verl.rollout.engine import VLLMEngine
    from verl.rollout.engine_settings import EngineSettings

    other = "cuda" if current_platform.is_cpu() else "cpu"
    with pytest.raises(ConfigError, match=r"trainer.device=auto"):
        VLLMEngine(EngineSettings(str(tiny_model_dir), max_model_len=64, device=other))


def test_pieces_of_a_stream_are_the_turn(session: Any, prompts: list[list[int]]) -> None:
    how = seeded(prompts)[:6]

    async def pieces_of(ids: list[int], sampling: Sampling) -> list[Generation]:
        return [piece async for piece in session.engine.stream(ids, sampling)]

    async def stream_all() -> list[list[Generation]]:
        return await asyncio.gather(*(pieces_of(ids, sampling) for ids, sampling in zip(prompts, how, strict=False)))

    whole = session.sample(prompts[:6], how)
    for _ in range(30):
        streamed = session.run(stream_all())
        assert [join_pieces(pieces) for pieces in streamed] == whole
        for pieces in streamed:
            assert [piece.finish_reason for piece in pieces[:-1]] == [""] * (len(pieces) - 1)
        if all(len(pieces) > 5 for pieces in streamed):
            return
    raise AssertionError("too few pieces, again and again")  # a reader that is slow gets some of them joined


@pytest.mark.parametrize("leave", ["close", "cancel"])
def test_a_stream_that_is_left_is_aborted(session: Any, prompts: list[list[int]], leave: str) -> None:
    endless = Sampling(max_tokens=400, ignore_eos=True)

    async def start_and_leave() -> tuple[int, int]:
        finished = "not begun"
        while finished:  # for a reader that is slow the first piece is the whole turn
            stream = session.engine.stream(prompts[0], endless)
            finished = (await anext(stream)).finish_reason
        running = session.engine.num_running
        if leave == "close":
            await stream.aclose()
        else:
            waiting = asyncio.create_task(_drain(stream))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        return running, session.engine.num_running

    assert session.run(start_and_leave()) == (1, 0)


async def _drain(stream: Any) -> None:
    async for _ in stream:
        pass


def test_an_engine_that_lives_passes_the_check(session: Any) -> None:
    session.run(session.engine.check())
    assert session.engine.num_running == 0


def test_the_attention_backend_is_named(session: Any) -> None:
    assert session.run(session.engine.on_ranks("attention_backends")) == [["CPU_ATTN"]]


def test_what_the_engine_puts_into_the_temporary_folder_is_in_a_folder_of_its_own(session: Any) -> None:
    """It goes with the engine, as the session's end asserts."""
    (own,) = session.temporary.iterdir()
    assert any(path.is_socket() for path in own.iterdir())


def test_an_engine_holds_as_many_episodes_as_its_cache(session: Any) -> None:
    """0.125 GiB of float32 keys and values, 3 layers of one head of 32, for sequences of 512 tokens."""
    tokens = 0.125 * 2**30 / (2 * 3 * 32 * 4)
    assert session.engine.whole_sequences == pytest.approx(tokens / 512, rel=0.02)


@pytest.fixture(scope="module")
def adapted(tiny_model_dir: Path) -> CausalModel:
    """With adapters, not sharded."""
    hf = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    add_adapters(hf, Lora(4, 6.0, "all-linear"), torch.float32)
    begin_adapters(hf, seed=0)
    return CausalModel(hf, None)


@torch.no_grad()
def train(model: CausalModel, seed: int) -> None:
    """Give B values that change the model clearly."""
    draw = torch.Generator().manual_seed(seed)
    for _, layer in adapted_layers(model):
        layer.lora_B.copy_(0.1 * torch.randn(layer.lora_B.shape, generator=draw))


def test_an_engine_samples_from_weights_with_adapters_whatever_was_merged_before(
    session: Any, adapted: CausalModel, prompts: list[list[int]], tiny_model_dir: Path, weight_dir: Path
) -> None:
    def sampled() -> list[Generation]:
        return session.sample(prompts, seeded(prompts))

    def give(named: Any, version: int, bucket_mib: float = 512) -> None:
        session.load(stream_of(named, version, weight_dir, bucket_mib=bucket_mib))

    before = sampled()
    for version in (1, 2, 3):  # each from the base: the last is no sum of the three
        train(adapted, seed=version)
        give(adapters_of(adapted).items(), version, 0.02 if version == 2 else 512)
    found = sampled()
    assert [one.ids for one in found] != [one.ids for one in before]
    assert errors(adapted.model.eval(), prompts, found, 1.0).max() < MAX_ERROR
    give(merged_tensors(adapted), 4)
    assert sampled() == found, "to the bit what the merged weights themselves give"
    give(adapters_of(ReferencePolicy(adapted)).items(), 5)
    assert sampled() == before, "to the bit the base, which was never changed"


def test_adapters_alone_travel(adapted: CausalModel, weight_dir: Path) -> None:
    [bucket] = stream_of(adapters_of(adapted).items(), 1, weight_dir).buckets
    layers = [layer for _, layer in adapted_layers(adapted)]
    assert len(bucket.sums) == 2 * len(layers) and all(".lora_" in name for name in bucket.sums)
    sent = sum(4 * tensor.numel() for tensor in adapters_of(adapted).values())
    assert sent == sum(4 * 4 * (layer.in_features + layer.out_features) for layer in layers)


def test_merging_by_hand_and_a_weight_that_is_not_there() -> None:
    """[1 2] + [10] [3 4], where 10 is alpha / r times B."""
    adapters = {"a.weight.lora_A": torch.tensor([[3.0, 4.0]]), "a.weight.lora_B": torch.tensor([[10.0]])}
    base = [("a.weight", torch.tensor([[1.0, 2.0]]).bfloat16()), ("b.weight", torch.ones(1))]
    merged = dict(with_adapters(base, adapters))
    assert merged["a.weight"].tolist() == [[31.0, 42.0]] and torch.equal(merged["b.weight"], base[1][1])
    with pytest.raises(WeightSyncError, match="1 weights with adapters are not in the files .* is a.weight"):
        list(with_adapters(base[1:], adapters))


def test_an_engine_that_dies_before_its_first_answer_is_noticed(session: Any, tiny_model_dir: Path) -> None:
    """Its process is stopped when it is asked, so that no answer can come before it is killed."""
    before = set(psutil.Process().children(recursive=True))
    with tempfile.TemporaryDirectory() as temporary:
        other = type(session)(tiny_model_dir, Path(temporary))
        started = set(psutil.Process().children(recursive=True)) - before
        [process] = [child for child in started if "EngineCore" in " ".join(child.cmdline())]

        async def killed_while_asked() -> None:
            process.suspend()
            asked = asyncio.ensure_future(other.engine.generate([1, 2, 3], Sampling(max_tokens=1)))
            await asyncio.sleep(0.5)
            process.kill()
            await asyncio.wait_for(asked, 60)

        with pytest.raises(EngineDied, match="has died"):
            other.run(killed_while_asked())
        other.close()
