"""A real retrieval server over a few passages, and a policy that knows one episode by heart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from llm_agent_world import PASSAGES, QUESTION, TURNS
from served_app import served_corpus, write_passages
from tiny_models import qwen2_config
from transformers import AutoTokenizer, Qwen2ForCausalLM

from search_r1.llm_agent.observations import ObservationWriter
from search_r1.llm_agent.templates import load_template
from verl.agent.messages import encode_prompt
from verl.agent.text import encode_text


@pytest.fixture(scope="session")
def search_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a BM25 server over `PASSAGES`."""
    with served_corpus(write_passages(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", PASSAGES)) as url:
        yield url


@pytest.fixture(scope="session")
def policy_folder(byte_tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 model of 0.1 million parameters that has memorised the episode."""
    config = qwen2_config(len(byte_tokenizer), 64, 128, 2, (2, 2), 1024, eos_token_id=byte_tokenizer.eos_token_id)
    folder = tmp_path_factory.mktemp("policy")
    byte_tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)
    ids = torch.tensor([_episode(AutoTokenizer.from_pretrained(folder))])  # it splits words by the rules of Qwen2
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(600):
        losses_T = torch.nn.functional.cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="none")
        optimizer.zero_grad()
        losses_T.mean().backward()
        optimizer.step()
        if losses_T.max().item() < 0.1:  # each token of the episode is by far the most likely one
            break
    assert losses_T.max().item() < 0.1
    model.save_pretrained(folder)
    return folder


def _episode(tokenizer) -> list[int]:
    writer = ObservationWriter(tokenizer, 500)
    ids = encode_prompt(tokenizer, load_template("tinywiki").messages(QUESTION))
    for turn, document in zip(TURNS, ("river", "city", None), strict=True):
        ids += encode_text(tokenizer, turn)
        ids += writer.write([{"contents": PASSAGES[document]}]).ids if document else [tokenizer.eos_token_id]
    return ids
