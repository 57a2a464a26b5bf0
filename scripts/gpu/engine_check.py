"""What one GPU shows of the engine, with torch and transformers alone: right numbers, then time and memory.

    .venv/bin/python scripts/gpu/engine_check.py [--shape 3b] [--tokens 16384] [--device cuda]

Random weights, no download, no Ray, no vLLM. One line per check, PASS or FAIL with its figures, or SKIP;
the exit status is 1 when a check failed. `--device cpu --shape tiny` tries the script itself in seconds.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from shapes import SHAPES as PUBLISHED
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from verl.engine.batching import model_input
from verl.engine.fused_layers import MODEL_TYPES, fuse, liger
from verl.engine.head import Head, HeadRequest, token_stats
from verl.engine.hf_model import decoder_layers
from verl.engine.micro_batches import Budget, plan
from verl.engine.model import CausalModel, layout_of
from verl.protocol import TrainBatch

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32_768,
    },
    "3b": PUBLISHED["3b"],
}
PEAK_TFLOPS = {"B200": 2250, "H200": 989, "H100": 989, "A100": 312, "L40S": 362}  # dense bfloat16, makers' data sheets
ROUNDED = 2.0**-7  # relative size of an error that bfloat16 alone explains
GIB = 2**30
OF_TYPES: dict[str, Any] = {  # granite's scores would not be divided by the root of the head size
    **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
    "attention_multiplier": 64**-0.5,
}
Layouting = dict[str, bool]  # arguments of `layout_of`


class Result(NamedTuple):
    passed: bool | None  # None: there is nothing to check on this machine
    figures: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="3b", help="of head, offload and speed")
    parser.add_argument("--tokens", type=int, default=16_384, help="in a micro-batch of the last check")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args()
    device = torch.device(args.device)
    print(f"torch {torch.__version__}, {device_name(device)}")
    checks: dict[str, Callable[[], Result]] = {
        "packed gradients": lambda: packed_gradients(device),
        "bfloat16 log-probs": lambda: short_log_probs(device),
        "fused layers": lambda: fused_gradients(device),
        "head": lambda: head_formats(device, SHAPES[args.shape], min(args.tokens, 8192)),
        "offload": lambda: offload(device, GIB if args.shape == "3b" else 2**20),
        "model FLOP utilisation": lambda: utilisation(device, SHAPES[args.shape], args.tokens),
    }
    results = [tried(name, check) for name, check in checks.items()]
    sys.exit(0 if all(results) else 1)


def tried(name: str, check: Callable[[], Result]) -> bool:
    """A check that raises has failed; the ones after it still run."""
    try:
        result = check()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        result = Result(False, f"{type(error).__name__}: {str(error).splitlines()[0]}")
    word = {True: "PASS", False: "FAIL", None: "SKIP"}[result.passed]
    print(f"{word}  {name}: {result.figures}", flush=True)
    return result.passed is not False


def packed_gradients(device: torch.device) -> Result:
    """Of packed rows, and of those with a prompt in common, against padded ones in float32; and of the kernel's format
    against the same reference.
    """
    batch = with_prompts(random_batch([700, 33, 260, 1, 129, 512], vocabulary=512), rows=(0, 2, 5), length=200)
    ways: dict[str, Layouting] = {"padded": {"remove_padding": False}, "packed": {"remove_padding": True}}
    ways["shared"] = {"remove_padding": True, "share_prefixes": True}
    reference = gradient_of(device, torch.float32, batch, ways["padded"])
    exact = [distance(gradient_of(device, torch.float32, batch, ways[way]), reference) for way in ("packed", "shared")]
    short = {way: distance(gradient_of(device, torch.bfloat16, batch, how), reference) for way, how in ways.items()}
    figures = f"float32 {exact[0]:.1e} from padded, {exact[1]:.1e} with shared prompts; bfloat16 from float32: "
    figures += ", ".join(f"{way} {error:.1e}" for way, error in short.items())
    return Result(max(exact) < 1e-5 and max(short.values()) < 2 * short["padded"] + ROUNDED, figures)


def short_log_probs(device: torch.device) -> Result:
    """In bfloat16 against float32, at the sampled tokens of a model that is far from uniform."""
    batch = random_batch([400, 120, 256], vocabulary=512)
    with torch.no_grad():
        both = [log_probs(device, dtype, batch) for dtype in (torch.float32, torch.bfloat16)]
    difference_N = (both[1] - both[0]).abs()
    mean, largest = float(difference_N.mean()), float(difference_N.max())
    return Result(mean < 0.05, f"mean |difference| {mean:.1e}, largest {largest:.1e} nats")


def fused_gradients(device: torch.device) -> Result:
    """Of every type of model with fused layers: against plain layers in float32; and in bfloat16 against the same
    reference, beside how far from it plain layers are.
    """
    if device.type != "cuda" or importlib.util.find_spec("liger_kernel") is None:
        return Result(None, "they need CUDA and the package liger-kernel")
    batch = with_prompts(random_batch([700, 33, 260, 1, 129, 512], vocabulary=512), rows=(0, 2, 5), length=200)
    passed, figures = True, []
    for kind in MODEL_TYPES:
        how: Layouting = {"remove_padding": True, "share_prefixes": True}
        plain, short, fused, fused_short = (
            gradient_of(device, dtype, batch, how, kind, fused)
            for fused in (False, True)
            for dtype in (torch.float32, torch.bfloat16)
        )
        exact, rounded, plain_rounded = distance(fused, plain), distance(fused_short, plain), distance(short, plain)
        passed &= exact < 1e-5 and rounded < 1.5 * plain_rounded + ROUNDED
        figures.append(f"{kind} {exact:.1e}, {rounded:.1e} ({plain_rounded:.1e})")
    return Result(passed, f"float32 from plain, bfloat16 from float32 (plain): {'; '.join(figures)}")


def head_formats(device: torch.device, shape: dict[str, Any], num_tokens: int) -> Result:
    """Time and memory of the head's forward and backward with factors in float32 and in bfloat16."""
    torch.manual_seed(0)
    vocabulary, hidden = shape["vocab_size"], shape["hidden_size"]
    hidden_NH = torch.randn(num_tokens, hidden, device=device, dtype=torch.bfloat16).requires_grad_()
    weight_VH = (0.02 * torch.randn(vocabulary, hidden, device=device)).bfloat16().requires_grad_()
    label_N = torch.randint(0, vocabulary, (num_tokens,), device=device)

    def run(dtype: torch.dtype) -> torch.Tensor:
        stats = token_stats(hidden_NH, Head(weight_VH), HeadRequest(label_N, 1.0, dtype=dtype))
        return torch.autograd.grad(stats.log_prob_N.sum(), [hidden_NH, weight_VH])[0]

    gradients, figures = [], []
    for dtype in (torch.float32, torch.bfloat16):
        gradients.append(run(dtype).float())
        seconds, peak = measured(device, lambda dtype=dtype: run(dtype))
        figures.append(f"{str(dtype).removeprefix('torch.')} {seconds * 1e3:.1f} ms, {peak / GIB:.2f} GiB")
    error = float((gradients[1] - gradients[0]).norm() / gradients[0].norm())
    figures.append(f"gradients {error:.1e} apart")
    return Result(error < 2 * ROUNDED, f"{num_tokens} x {vocabulary}: {'; '.join(figures)}")


def offload(device: torch.device, num_bytes: int) -> Result:
    """One pinned copy to the host and back."""
    on_device = torch.arange(num_bytes // 4, dtype=torch.float32, device=device)
    host = torch.empty_like(on_device, device="cpu", pin_memory=device.type == "cuda")
    before = on_device.clone()
    out, _ = measured(device, lambda: host.copy_(on_device, non_blocking=True))
    on_device.zero_()
    back, _ = measured(device, lambda: on_device.copy_(host, non_blocking=True))
    rates = f"{num_bytes / out / 1e9:.1f} GB/s to the host, {num_bytes / back / 1e9:.1f} GB/s back"
    return Result(torch.equal(before, on_device), f"{rates} ({num_bytes / GIB:.3g} GiB)")


def utilisation(device: torch.device, shape: dict[str, Any], num_tokens: int) -> Result:
    """Forward and backward of one packed micro-batch with gradient checkpointing; every token is trained."""
    model = build(device, torch.bfloat16, shape)
    model.model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    layout = layout_of([model.model], remove_padding=True)
    longest = min(4096, num_tokens)
    batch = random_batch([longest] * (num_tokens // longest), shape["vocab_size"])
    inputs = model_input(batch, device, layout)
    losses = []

    def update() -> None:
        model.zero_grad()
        loss = -model(inputs, 1.0, entropy_gradient=False).log_prob_N.mean()
        loss.backward()
        losses.append(loss.item())

    update()
    seconds, peak = measured(device, update)
    weights = sum(p.numel() for layer in decoder_layers(model.model) for p in layer.parameters())
    head = num_tokens * shape["vocab_size"] * shape["hidden_size"]
    per_pass = 2 * (weights * sum(layout.cost(length) for length in batch.lengths_B.tolist()) + head)
    achieved = 3 * per_pass / seconds / 1e12  # recomputing is not counted
    figures = f"{num_tokens / seconds:.0f} tokens/s, {achieved:.1f} TFLOP/s, peak {peak / GIB:.1f} GiB"
    if known := [tflops for name, tflops in PEAK_TFLOPS.items() if name in device_name(device)]:
        figures += f", {achieved / known[0]:.0%} of the device's {known[0]}"
    return Result(all(loss < 2 * math.log(shape["vocab_size"]) for loss in losses), figures)


def build(
    device: torch.device, dtype: torch.dtype, shape: dict[str, Any], scale: float = 1.0, kind: str = "qwen2"
) -> CausalModel:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape, **OF_TYPES))
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for matrix in (parameter for parameter in model.parameters() if parameter.dim() == 2):
            matrix.mul_(scale)
    return CausalModel(model, None, torch.bfloat16 if dtype is torch.bfloat16 else torch.float32)


def random_batch(lengths: list[int], vocabulary: int) -> TrainBatch:
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(lengths)
    ids_T = torch.randint(0, vocabulary, (num_tokens,), generator=generator)
    return TrainBatch(torch.tensor(lengths), {"ids": ids_T, "loss_mask": torch.ones(num_tokens, dtype=torch.bool)})


def small(device: torch.device, dtype: torch.dtype, kind: str = "qwen2", fused: bool = False) -> CausalModel:
    """The same float32 weights in every format; heads of 64, which the kernel takes."""
    shape = SHAPES["tiny"] | {"hidden_size": 256, "head_dim": 64}
    model = build(torch.device("cpu"), torch.float32, shape, 3.0, kind).to(device, dtype)
    if fused:
        fuse(model.model, liger())
    return model


def with_prompts(batch: TrainBatch, rows: Sequence[int], length: int) -> TrainBatch:
    """The batch, in which `rows` begin with the same prompt, on which nothing is trained."""
    ids, masks = (batch.tokens[name].split(batch.lengths_B.tolist()) for name in ("ids", "loss_mask"))
    for row in rows:
        ids[row][:length] = ids[rows[0]][:length].clone()
        masks[row][:length] = False
    return batch


def micro_batches(model: CausalModel, batch: TrainBatch, device: torch.device, how: Layouting) -> Iterator[Any]:
    layout = layout_of([model.model], **how)
    for rows in plan(batch.lengths_B, 1, 0, Budget(rows=3), layout, layout.prefixes(batch)):
        yield rows, model_input(batch.select(rows), device, layout)


def gradient_of(
    device: torch.device,
    dtype: torch.dtype,
    batch: TrainBatch,
    how: Layouting,
    kind: str = "qwen2",
    fused: bool = False,
) -> torch.Tensor:
    """All parameters' in one float64 vector."""
    model = small(device, dtype, kind, fused)
    for _, inputs in micro_batches(model, batch, device, how):
        model(inputs, 1.0).log_prob_N.sum().backward()
    return torch.cat([p.grad.double().flatten().cpu() for p in model.parameters() if p.grad is not None])


def log_probs(device: torch.device, dtype: torch.dtype, batch: TrainBatch) -> torch.Tensor:
    model = small(device, dtype)
    packed = micro_batches(model, batch, device, {"remove_padding": True})
    return torch.cat([model(inputs, 1.0).log_prob_N.cpu() for _, inputs in packed])


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def measured(device: torch.device, work: Callable[[], object]) -> tuple[float, int]:
    """Seconds of one run, and on CUDA the bytes that it allocated beyond what there was."""
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start, 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before, start = torch.cuda.memory_allocated(device), time.perf_counter()
    work()
    torch.cuda.synchronize(device)
    return time.perf_counter() - start, torch.cuda.max_memory_allocated(device) - before


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


if __name__ == "__main__":
    main()
