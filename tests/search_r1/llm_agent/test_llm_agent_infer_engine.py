"""infer.py as a user runs it: a policy that knows one episode by heart, vLLM, and a real retrieval server.

The policy repeats its searches and its answer only after exactly the ids it learned: a prompt, a stop rule or an
observation in another layout than that of training would give another output.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from llm_agent_world import PASSAGES, ROOT
from transformers import Qwen2Config, Qwen2ForCausalLM

from search_r1.llm_agent.observations import ObservationWriter
from search_r1.llm_agent.templates import load_template
from verl.agent.text import encode_text
from verl.data.prompts import encode_prompt

QUESTION = "Through which country does the Ildra flow?"
TURNS = [
    "<think> the river first </think><search> river Ildra </search>",
    "<search> city Vonmark </search>",
    "<answer> Sael </answer>",
]


@pytest.fixture(scope="module")
def policy_folder(byte_tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 model of 0.1 million parameters that has memorised the episode."""
    torch.manual_seed(0)
    ids = torch.tensor([_episode(byte_tokenizer)])
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(byte_tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            eos_token_id=byte_tokenizer.eos_token_id,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(300):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < 0.01:
            break
    assert loss.item() < 0.05
    folder = tmp_path_factory.mktemp("policy")
    model.save_pretrained(folder)
    byte_tokenizer.save_pretrained(folder)
    return folder


def _episode(tokenizer) -> list[int]:
    writer = ObservationWriter(tokenizer, 500)
    ids = encode_prompt(tokenizer, load_template("tinywiki").messages(QUESTION))
    for turn, document in zip(TURNS, ("river", "city", None), strict=True):
        ids += encode_text(tokenizer, turn)
        ids += writer.write([{"contents": PASSAGES[document]}]).ids if document else [tokenizer.eos_token_id]
    return ids


def test_infer_searches_and_answers(policy_folder: Path, search_url: str) -> None:
    """Two questions from the terminal, the second one without its question mark."""
    command = [sys.executable, "infer.py", "--model", str(policy_folder), "--template", "tinywiki", "--topk", "1"]
    done = subprocess.run(
        [*command, "--retriever_url", search_url, "--dtype", "float32"],
        input=f"{QUESTION}\n{QUESTION.rstrip('?')}\n\n",
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    expected = (
        f'{TURNS[0]}\n\n<information>Doc 1(Title: "Ildra") The Ildra is a river. It flows through the city of Vonmark.'
        f'</information>\n\n{TURNS[1]}\n\n<information>Doc 1(Title: "Vonmark") Vonmark is a city of the country Sael. '
        f"Its mayor is Otto Brann.</information>\n\n{TURNS[2]}\nAnswer: Sael\n(answered, 2 searches, 3 turns, "
    )
    assert done.stdout.count(expected) == 2
