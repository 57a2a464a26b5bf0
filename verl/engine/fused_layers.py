"""Fused layers: Liger's Triton kernels in place of a model's RMSNorm, SwiGLU MLP and rotary embedding, on CUDA.

A layer of many small operations reads and writes its activations once for each of them; a fused kernel does so once.
Liger's own functions replace classes and functions of transformers for the whole process. Here only the given model
changes: its modules, and so the names of its weights, stay, and get another `forward`.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from verl.engine.device.runtime import kind_of
from verl.errors import ConfigError

logger = logging.getLogger(__name__)

# Types whose three layers compute what the kernels do, and whose norms feed linear layers only: the backward of a norm
# overwrites the gradient that it gets.
MODEL_TYPES = ("granite", "llama", "ministral", "mistral", "qwen2", "qwen3", "smollm3")
ROTARY = "apply_rotary_pos_emb"  # the function that attention calls, a global name of the type's module in transformers
INSTALL = "install it: .venv/bin/pip install -e '.[liger]' (scripts/setup.sh --gpu does so)"


class Kernels(NamedTuple):
    """The three operations, each differentiable. They may overwrite gradients, `rotary` its arguments, too."""

    norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    """[..., H]: x [..., H] by the root of its mean square plus epsilon, times the weight [H]."""
    swiglu: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """[..., F]: silu(gate) * up."""
    rotary: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """Queries and keys [B, heads, L, D], rotated by cos and sin [1 or B, L, D]."""


def use_fused_layers(model: PreTrainedModel, wanted: bool | None, device: torch.device) -> bool:
    """Fuse the layers of a model for `device`, before it is sharded; `wanted` is the setting `use_liger`. Returns
    whether they are fused now; where not, the log says why. Raises ConfigError if they are `wanted` (true) and `device`
    is not CUDA or Liger is not installed.
    """
    if wanted is False:
        return False
    # A missing device or package is an error only if the fused layers were asked for.
    if device.type != "cuda":
        if wanted and kind_of(device) != "cuda":  # a CPU that stands for a GPU computes no numbers
            on = f"use_liger=true, but the model is on {device.type}: Liger's kernels run on CUDA"
            raise ConfigError(f"{on}; set use_liger=null (on where it can be) or false")
        return False
    installed = importlib.util.find_spec("liger_kernel") is not None
    if wanted and not installed:
        raise ConfigError(f"use_liger=true, but the package liger-kernel is not there; {INSTALL}")
    if not has_fused_layers(model):
        say = logger.warning if wanted else logger.info
        say("layers are not fused: there are no fused layers for model type %s", model.config.model_type)
        return False
    if not installed:
        logger.info("layers are not fused: the package liger-kernel is not there; to save time, %s", INSTALL)
        return False
    fuse(model, liger())
    logger.info("norms, MLPs and rotary embeddings of %s are Liger's fused kernels", type(model).__name__)
    return True


def has_fused_layers(model: PreTrainedModel) -> bool:
    """Whether `fuse` knows the layers of the model: its type, as transformers implements it."""
    name = model.config.model_type
    return name in MODEL_TYPES and type(model.base_model).__module__ == f"transformers.models.{name}.modeling_{name}"


def liger() -> Kernels:
    """Liger's kernels."""
    from liger_kernel.ops import LigerRMSNormFunction, LigerRopeFunction, LigerSiLUMulFunction  # imports Triton

    def norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        y: torch.Tensor = LigerRMSNormFunction.apply(x, weight, epsilon, 0.0, "llama", True)
        return y

    return Kernels(norm, LigerSiLUMulFunction.apply, LigerRopeFunction.apply)


def fuse(model: PreTrainedModel, kernels: Kernels) -> None:
    """Let the layers of a model that `has_fused_layers` compute by `kernels`. An MLP whose activation is not SiLU stays
    as it is.
    """
    # Only layers of the model type's own file in transformers: of these, the names say what they compute.
    home = type(model.base_model).__module__
    own = [module for module in model.base_model.modules() if type(module).__module__ == home]
    silu = getattr(model.config, "hidden_act", None) in ("silu", "swish")

    def norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return kernels.norm(hidden_states, self.weight, self.variance_epsilon)

    def mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down_proj(kernels.swiglu(self.gate_proj(x), self.up_proj(x)))
        return down

    for module in own:
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            _replace_forward(module, norm)
        elif kind.endswith("MLP") and silu:
            _replace_forward(module, mlp)
        elif kind.endswith("Attention"):
            _replace_forward(module, _calling(type(module).forward, kernels.rotary))


def _replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    module.forward = MethodType(forward, module)


def _calling(forward: Any, rotary: Callable[..., Any]) -> FunctionType:
    """The same function, which finds `rotary` under the name of transformers' function."""
    if ROTARY not in forward.__code__.co_names:
        raise RuntimeError(f"{forward.__qualname__} of this transformers does not call {ROTARY}; set use_liger=false")
    names = forward.__globals__ | {ROTARY: rotary}
    return FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
