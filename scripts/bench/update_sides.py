"""The sides of `update.py`, each in a process of its own.

update_sides.py write FOLDER                 a model and tokenizer for all sides
update_sides.py tokens - ROWS                how many tokens the rows have
update_sides.py SIDE FOLDER ROWS THREADS     one update for each line of standard input
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from verl.protocol import TrainBatch

MEAN, LONGEST, PROMPT, RETRIEVED, PASSAGES = 900, 4000, 150, 0.4, 300
SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "vocab_size": 4096}
LR, CLIP_NORM, CLIP = 1e-6, 1.0, 0.2
BUDGET = 4096  # tokens of a packed micro-batch
Update = Callable[[], None]


def search_rows(num_rows: int) -> TrainBatch:
    """Prompt, then what the policy wrote and passages in turn; an advantage for each row."""
    generator = torch.Generator().manual_seed(0)
    drawn = (0.6 * torch.randn(num_rows - 1, generator=generator)).exp()
    lengths = (drawn / drawn.sum() * (MEAN * num_rows - LONGEST)).int().clamp(2 * PROMPT, LONGEST - 1)
    order = torch.randperm(num_rows, generator=generator)
    lengths_B = torch.cat([lengths, torch.tensor([LONGEST])])[order].long()
    masks = [flag for length in lengths_B.tolist() for flag in _mask(length)]
    ids_T = torch.randint(3, SIZES["vocab_size"], (len(masks),), generator=generator)
    advantage_T = torch.randn(num_rows, generator=generator).repeat_interleave(lengths_B)
    tokens = {"ids": ids_T, "loss_mask": torch.tensor(masks), "advantages": advantage_T}
    return TrainBatch(lengths_B, tokens)


def _mask(length: int) -> list[bool]:
    searches = max(1, round(RETRIEVED * length / PASSAGES))
    passages = round(RETRIEVED * length / searches)
    written = length - PROMPT - searches * passages
    turns = [written // (searches + 1)] * searches
    parts = [[True] * turn + [False] * passages for turn in turns]
    return [False] * PROMPT + [flag for part in parts for flag in part] + [True] * (written - sum(turns))


def write(folder: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=True, **SIZES)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    tokenizer.save_pretrained(folder)


def ours(folder: Path, batch: TrainBatch, num_threads: int) -> Update:
    from verl.config import load_config
    from verl.engine.device.runtime import init_process_group
    from verl.engine.policy_engine import PolicyEngine

    actor, device = "actor_rollout_ref.actor", torch.device("cpu")
    settings = [
        *("data.train_files=-", "data.val_files=-", "trainer.device=cpu", f"actor_rollout_ref.model.path={folder}"),
        *(f"{actor}.use_dynamic_bsz=true", f"{actor}.ppo_max_token_len_per_gpu={BUDGET}", f"{actor}.optim.lr={LR}"),
        *(f"{actor}.entropy_coeff=0", f"{actor}.num_threads={num_threads}", f"trainer.default_local_dir={folder}"),
    ]
    init_process_group(0, 1, f"file://{folder}/store", device)
    engine = PolicyEngine(load_config("ppo_trainer", settings), device, 1000, with_anchor=False)
    return lambda: engine.update_and_score(batch) and None


def padded_rows(batch: TrainBatch, rows: list[int]) -> tuple[torch.Tensor, ...]:
    """Ids, loss mask, advantages and attention mask [B, L] of some rows."""
    part = batch.select(rows)
    ids_BL, mask_BL, advantage_BL = (part.padded(name) for name in ("ids", "loss_mask", "advantages"))
    attended_BL = torch.arange(ids_BL.shape[1]) < part.lengths_B[:, None]
    return ids_BL, mask_BL, advantage_BL, attended_BL.long()


def hugging_face(folder: Path, batch: TrainBatch, rows_at_once: int) -> Update:
    """What the loop of a textbook does."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    model.train()
    num_tokens = int(batch.tokens["loss_mask"].sum())

    def update() -> None:
        for start in range(0, len(batch), rows_at_once):
            ids_BL, mask_BL, advantage_BL, attended_BL = padded_rows(batch, list(range(start, start + rows_at_once)))
            logits_BLV = model(input_ids=ids_BL, attention_mask=attended_BL, use_cache=False).logits[:, :-1]
            log_prob_BL = logits_BLV.log_softmax(-1).gather(-1, ids_BL[:, 1:, None]).squeeze(-1)
            ratio_BL = (log_prob_BL - log_prob_BL.detach()).exp()
            gain_BL, advantage_BL = ratio_BL * advantage_BL[:, 1:], advantage_BL[:, 1:]
            gain_BL = torch.minimum(gain_BL, ratio_BL.clamp(1 - CLIP, 1 + CLIP) * advantage_BL)
            (-(gain_BL * mask_BL[:, 1:]).sum() / num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return update


def trl(folder: Path, batch: TrainBatch, rows_at_once: int) -> Update:
    """GRPOTrainer's own loss on inputs as it makes them: padded to the longest row of the step."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=rows_at_once,
        gradient_accumulation_steps=len(batch) // rows_at_once,
        num_generations=len(batch),
        max_completion_length=LONGEST,
        loss_type="dapo",
        beta=0.0,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to=[],
        model_init_kwargs={"dtype": "float32"},
    )
    prompts = Dataset.from_list([{"prompt": "x"}] * len(batch))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trainer = GRPOTrainer(
        str(folder), lambda completions, **_: [0.0] * len(completions), config, prompts, processing_class=tokenizer
    )
    model, trainer.current_gradient_accumulation_steps = trainer.model.train(), len(batch) // rows_at_once
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    ids_BL, mask_BL, advantage_BL, attended_BL = padded_rows(batch, list(range(len(batch))))  # all of a step at once

    def inputs(rows: slice) -> dict[str, Any]:
        return {
            "prompt_ids": ids_BL[rows, :PROMPT],
            "prompt_mask": attended_BL[rows, :PROMPT],
            "completion_ids": ids_BL[rows, PROMPT:],
            "completion_mask": attended_BL[rows, PROMPT:],
            "tool_mask": mask_BL[rows, PROMPT:].long(),
            "advantages": advantage_BL[rows, 0],
            "num_items_in_batch": batch.tokens["loss_mask"].sum(),
        }

    def update() -> None:
        for start in range(0, len(batch), rows_at_once):
            trainer.compute_loss(model, inputs(slice(start, start + rows_at_once))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return update


def build(side: str, folder: Path, batch: TrainBatch, num_threads: int) -> Update:
    torch.set_num_threads(num_threads)
    if side == "ours":
        return ours(folder, batch, num_threads)
    name, rows_at_once = side.split(", ")
    return (trl if name == "TRL" else hugging_face)(folder, batch, int(rows_at_once.split()[0]))


def resident(what: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most since `forget_peak`."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


def forget_peak() -> None:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def serve(update: Update) -> None:
    forget_peak()
    loaded = resident("VmRSS")
    for _ in sys.stdin:
        forget_peak()
        start, cpu_start = time.perf_counter(), time.process_time()
        update()
        found = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu_start}
        print("\n" + json.dumps(found | {"bytes": resident("VmHWM") - loaded}), flush=True)


def main() -> None:
    side, folder = sys.argv[1], Path(sys.argv[2])
    if side == "write":
        write(folder)
        return
    batch = search_rows(int(sys.argv[3]))
    if side == "tokens":
        print(len(batch.tokens["ids"]))
        return
    serve(build(side, folder, batch, int(sys.argv[4])))


if __name__ == "__main__":
    main()
