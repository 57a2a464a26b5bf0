"""Stored trajectories of a small agent: written by hand, with the ids of the tests' tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from search_r1.replay.__main__ import main
from verl.protocol import Prompt, Segment, Source, Status, Trajectory
from verl.tracking.trajectory_store import write_trajectories

QUESTION = "Which river?"


def bytes_of(tokenizer: Any, text: str) -> tuple[int, ...]:
    """One token for each byte, as a policy may sample it; the tokenizer itself would merge some."""
    letters = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return tuple(tokenizer.convert_tokens_to_ids([letter for word, _ in letters for letter in word]))


def encoded(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


@dataclass(frozen=True)
class Replay:
    """Trajectories with the ids of `tokenizer`, which is also in the folder of `model`; files go to `folder`."""

    tokenizer: Any
    model: Path
    folder: Path

    def trajectory(self, reward: float | None = 1.0, question: str = QUESTION, **changes: Any) -> Trajectory:
        """`turns` are texts or ids of the policy; documents stand between them. The last turn ends with EOS."""
        tokenizer = self.tokenizer
        turns = changes.pop("turns", ("<search> the river </search>", "<answer> Lune </answer>"))
        data_source = changes.pop("data_source", "tinywiki")
        prompt = encoded(tokenizer, f"Question: {question}\n")
        segments = [Segment(Source.PROMPT, prompt)]
        for number, turn in enumerate(turns):
            if number:
                observation = "\n\n<information>Doc 1(Title: x) the Lune</information>\n\n"
                segments.append(Segment(Source.ENVIRONMENT, encoded(tokenizer, observation)))
            ids = bytes_of(tokenizer, turn) if isinstance(turn, str) else tuple(turn)
            if number == len(turns) - 1:
                ids += (tokenizer.eos_token_id,)
            segments.append(Segment(Source.POLICY, ids, (-1.0,) * len(ids)))
        row = {"question": question, "reward_model": {"ground_truth": {"target": ["Lune"]}}}
        searched = {"action": "search", "query": "the river", "executed": True, "valid": True}
        events = [{"turn": number, **(searched if number < len(turns) - 1 else {})} for number in range(len(turns))]
        values = {"status": Status.ANSWERED, "num_turns": len(turns), "num_searches": len(turns) - 1, "events": events}
        return Trajectory("g", Prompt(prompt, data_source, row), segments, reward=reward, **(values | changes))

    def failed(self) -> Trajectory:
        return self.trajectory(None, turns=("<search>",), status=Status.FAILED, failure="timed out")

    def store(self, *trajectories: Trajectory, step: int = 3) -> Path:
        return write_trajectories(self.folder, "train", step, trajectories, self.tokenizer.decode)

    def score(self, files: Sequence[Path], reward: str, *options: str) -> Path:
        output = self.folder / "out" / "scored.parquet"
        command = ["score", *map(str, files), "--tokenizer", str(self.model), "--reward", reward]
        assert main([*command, "--output", str(output), *options]) == 0
        return output

    def export(self, files: Sequence[Path], *options: str) -> list[dict[str, Any]]:
        output = self.folder / "out" / "sft.parquet"
        assert main(["export", *map(str, files), "--output", str(output), *options]) == 0
        return pq.read_table(output).to_pylist()

    def log_probs(self, file: Path, model: Path, *options: str) -> list[list[float]]:
        """What is written to `folder`/out.parquet."""
        output = self.folder / "out.parquet"
        assert main(["log_probs", str(file), "--model", str(model), "--output", str(output), *options]) == 0
        return pq.read_table(output)["log_probs_under"].to_pylist()
