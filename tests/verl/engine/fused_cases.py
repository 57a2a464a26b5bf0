"""Kernels for tests of fused layers, by formula, for any device; and engines with them, or with Liger's own, beside
plain ones. `python fused_cases.py MODEL_FOLDER FOLDER` prints how far Liger's are from plain layers; it needs Triton,
which runs on a CPU with TRITON_INTERPRET=1.

The kernels here overwrite what Liger's overwrite, so that whatever else would need it is found. They have the names and
arguments of Liger's, so that this module can stand in the place of `liger_kernel.ops`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from engine_cases import make_batch, make_engine, relative_error
from engine_state import full_state, gradients
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from verl.engine.batching import model_input
from verl.engine.fused_layers import Kernels, fuse, liger
from verl.engine.model import CausalModel, layout_of
from verl.engine.policy_engine import PolicyEngine

CHECKPOINTING = ("actor_rollout_ref.model.enable_gradient_checkpointing=true",)
INTERPRETED = ("llama", "qwen2", "qwen3")  # the interpreter is slow, and qwen3 alone has norms of its heads
LORA = ("actor_rollout_ref.model.lora_rank=3",)
KL = ("actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_type=full_reverse")
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


class LigerRMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float, *_: object) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.epsilon = epsilon
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + ctx.epsilon)
        normed, own = x * scale, grad * weight
        grad_weight = (grad * normed).flatten(0, -2).sum(0)
        grad.copy_(scale * (own - normed * (own * normed).mean(-1, keepdim=True)))
        return grad, grad_weight, None, None, None, None


class LigerSiLUMulFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return gate * torch.sigmoid(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, ...]:
        gate, up = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate)
        grad_gate = grads[0] * up * sigmoid * (1 + gate * (1 - sigmoid))
        grad_up = grads[0] * gate * sigmoid
        return gate.detach().copy_(grad_gate), up.detach().copy_(grad_up)


class LigerRopeFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, *angles: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(*angles)
        return _rotated(q, *angles), _rotated(k, *angles)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, -sin), _rotated(grads[1], cos, -sin), None, None


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    memory = x.detach().transpose(1, 2).contiguous()  # that of x, which is a transposed view
    left, right = memory.chunk(2, -1)
    turned = memory * cos[:, :, None] + torch.cat([-right, left], -1) * sin[:, :, None]
    return memory.copy_(turned).transpose(1, 2)


def tiny_model(kind: str) -> PreTrainedModel:
    """Two layers, of any type."""
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, **sizes, **heads, **NO_TOKENS, max_position_embeddings=128, initializer_range=0.3
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def log_probs_and_gradient(model: PreTrainedModel) -> list[torch.Tensor]:
    """Of packed rows that share prompts, with gradient checkpointing."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    layout = layout_of([model], remove_padding=True, share_prefixes=True)
    log_prob_N = CausalModel(model, None)(model_input(make_batch(), torch.device("cpu"), layout), 1.0).log_prob_N
    (log_prob_N * torch.linspace(-1, 1, len(log_prob_N))).sum().backward()
    return [log_prob_N.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])]


def largest_error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(float((one - other).norm() / other.norm()) for one, other in zip(found, expected, strict=True))


def updated(engine: PolicyEngine, kernels: Kernels | None) -> list[dict[str, torch.Tensor]]:
    """The gradient of a batch, log-probs, and the weights after two updates."""
    if kernels is not None:
        fuse(engine.policy.model, kernels)
        if engine.anchor is not None:
            fuse(engine.anchor.model, kernels)
    batch = make_batch(6)
    found = [gradients(engine, batch), engine.log_probs(batch, 1.0).tokens]
    for _ in range(2):
        engine.update(batch)
    return [*found, full_state(engine)]


def errors_of_engine(
    kernels: Kernels, folder: Path, model_path: str, other_model_path: str, overrides: tuple[str, ...]
) -> list[float]:
    """How far the engine with `kernels` is from the plain one, in what `updated` returns; [] but on rank 0."""
    plain, fused = (
        updated(make_engine(model_path, folder, *KL, *overrides, anchor_path=other_model_path), used)
        for used in (None, kernels)
    )
    return [relative_error(one, other) for one, other in zip(fused, plain, strict=True) if other]


def by_formula() -> Kernels:
    """The kernels of this module."""
    norm: Callable[..., torch.Tensor] = LigerRMSNormFunction.apply
    return Kernels(norm, LigerSiLUMulFunction.apply, LigerRopeFunction.apply)


def on_two_ranks(folder: Path, model_path: str, other_model_path: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    """A task of engine_workers."""
    return {"errors": errors_of_engine(by_formula(), folder, model_path, other_model_path, overrides)}


def replaced(model: nn.Module) -> int:
    """The number of modules with a forward of their own."""
    return sum("forward" in vars(module) for module in model.modules())


def _prepare_interpreter() -> None:
    """Triton's interpreter passes scalars as plain numbers, which have no `.to`, and has no libdevice."""
    import liger_kernel.ops.rms_norm as liger_rms_norm
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def with_scalars(value: Any) -> Any:
        if isinstance(value, float):
            return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32)
        return convert(value)

    interpreter._implicit_cvt = with_scalars
    liger_rms_norm.rsqrt = lambda x: tl.rsqrt(x)


def main(model_path: str, folder: Path) -> None:
    from verl.engine.device.runtime import init_process_group

    _prepare_interpreter()
    for kind in INTERPRETED:
        model = tiny_model(kind)
        fuse(model, liger())
        print(kind, largest_error(log_probs_and_gradient(model), log_probs_and_gradient(tiny_model(kind))))
    init_process_group(0, 1, f"file://{folder}/store", torch.device("cpu"))
    for name, overrides in (("engine", CHECKPOINTING), ("adapters", LORA)):
        print(name, max(errors_of_engine(liger(), folder, model_path, model_path, overrides)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
