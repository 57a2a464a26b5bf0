"""How a setting is declared (a typed dataclass field with its meaning, its unit and its allowed range), and the keys of
a schema: its leaves as dotted paths, and the valid key nearest to a wrong one.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Key:
    """One setting: its dotted path, type, default, meaning, and bounds (`ge`, `gt`, `le`, `lt`)."""

    path: str
    type: Any
    default: Any
    meaning: str
    bounds: dict[str, float]
    shown: str | None

    @property
    def free_form(self) -> bool:
        """Whether any key may follow below this one (a mapping handed to someone else's code)."""
        return any(get_origin(kind) is dict for kind in alternatives(self.type))


def join(prefix: str, name: str) -> str:
    """Dotted path of `name` below `prefix` (empty at the root)."""
    return f"{prefix}.{name}" if prefix else name


def walk(cls: type, prefix: str = "", defaults: Any = None) -> Iterator[Key]:
    """All leaves of the schema, in the order of declaration. Every field has a default, so `cls()` has them all."""
    defaults = cls() if defaults is None else defaults
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        path, annotation, default = join(prefix, field.name), hints[field.name], getattr(defaults, field.name)
        if dataclasses.is_dataclass(annotation):
            yield from walk(annotation, path, default)  # type: ignore[arg-type]
            continue
        meta = field.metadata
        yield Key(path, annotation, default, meta.get("help", ""), meta.get("bounds", {}), meta.get("shown"))


def value_at(root: Any, path: str) -> Any:
    """Value of the attribute at the dotted `path`; below a mapping, its item."""
    for name in path.split("."):
        root = root[name] if isinstance(root, dict) else getattr(root, name)
    return root


def is_changed(root: Any, key: Key) -> bool:
    """Whether a setting has neither its default nor the value of the setting that it follows.

    root: a schema with its values, or those as YAML has them.
    """

    def as_yaml(value: Any) -> Any:
        return list(value) if isinstance(value, tuple) else value

    value, default = as_yaml(value_at(root, key.path)), as_yaml(key.default)
    if isinstance(default, str) and default.startswith("~/") and str(value).endswith(default.removeprefix("~")):
        return False  # in whoever's home
    source = re.fullmatch(r"\$\{(.+)\}", key.shown or "")
    return value != default and not (source and value == as_yaml(value_at(root, source[1])))


@lru_cache
def leaves(cls: type) -> dict[str, Key]:
    """All settings of a schema by dotted path."""
    return {key.path: key for key in walk(cls)}


@lru_cache
def sections(cls: type) -> frozenset[str]:
    """Dotted paths of all sections of a schema."""
    paths = (path.split(".") for path in leaves(cls))
    return frozenset(".".join(parts[:n]) for parts in paths for n in range(1, len(parts)))


def is_known(cls: type, path: str) -> bool:
    """Whether `path` is a setting, a section, or lies below a free-form mapping."""
    if path in leaves(cls) or path in sections(cls):
        return True
    parts = path.split(".")
    above = (".".join(parts[:n]) for n in range(1, len(parts)))
    return any(p in leaves(cls) and leaves(cls)[p].free_form for p in above)


def nearest(cls: type, path: str) -> str | None:
    """The setting that `path` most likely meant: it is its end, or its name is spelt like it in a like place."""
    known = list(leaves(cls))
    ends = [k for k in known if k.endswith(f".{path}")]
    if ends:
        return ends[0]
    # The names themselves have to be alike: between two keys of one long section half of the letters are the section's.
    close = [k for k in known if _alike(_name(path), _name(k)) >= 0.75]
    if "." in path:
        close = [k for k in close if _likeness(path, k) >= 0.6]
    return max(close, key=lambda k: (_alike(_name(path), _name(k)), _likeness(path, k)), default=None)


def _name(path: str) -> str:
    return path.rpartition(".")[2]


def _alike(given: str, known: str) -> float:
    """The likeness of two names; high if one only leaves words of the other out: `total_steps`."""
    words, others = set(given.split("_")), set(known.split("_"))
    return max(_likeness(given, known), 0.9 if len(words) > 1 and words <= others else 0.0)


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def alternatives(annotation: Any) -> set[Any]:
    """The types of a union; a type that is none by itself."""
    return set(get_args(annotation)) if get_origin(annotation) in (Union, UnionType) else {annotation}


def type_name(annotation: Any) -> str:
    """A type in words, for users: `int or null`, `one of fsdp, megatron`, `list of str`."""
    args = get_args(annotation)
    if annotation is type(None):
        return "null"
    if annotation is Any:
        return "any value"
    origin = get_origin(annotation)
    if origin is None:
        return str(getattr(annotation, "__name__", annotation))
    match getattr(origin, "__name__", str(origin)):
        case "Literal":
            return "one of " + ", ".join(str(a) for a in args)
        case "list":
            return f"list of {type_name(args[0])}"
        case "tuple":
            return f"list of {len(args)} {type_name(args[0])}"
        case "dict":
            return "mapping"
        case _:
            return " or ".join(type_name(a) for a in args)


def setting(
    default: Any,
    meaning: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    path: bool = False,
    shown: str | None = None,
) -> Any:
    """Declare one setting.

    `meaning` is printed by `--help` and in docs/configuration.md, and names the unit. `ge`, `gt`, `le`, `lt` bound a
    number (for a list: each element); None is never out of range. `path` marks a file name whose leading `~` is
    expanded. `shown` replaces the default in the documentation (for an interpolation in the YAML tree).
    """
    bounds = {"ge": ge, "gt": gt, "le": le, "lt": lt}
    metadata = {
        "help": meaning,
        "bounds": {name: bound for name, bound in bounds.items() if bound is not None},
        "path": path,
        "shown": shown,
    }
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def count(default: int | None, meaning: str, **more: Any) -> Any:
    """Declare a setting that is at least 1."""
    return setting(default, meaning, ge=1, **more)


def share(default: float | None, meaning: str, **more: Any) -> Any:
    """Declare a setting from 0 to 1."""
    return setting(default, meaning, ge=0, le=1, **more)


def section(cls: type, **changes: Any) -> Any:
    """Declare a nested section: `cls` with its own defaults, except for `changes`."""
    return dataclasses.field(default_factory=lambda: cls(**changes))


# The units of the settings that are numbers, as docs/configuration.md has them.

NONE = "-"
"""A number without a unit: a factor, a seed, a rate of an optimiser."""

_NAMES = {
    "tokens": (
        "max_prompt_length max_response_length max_start_length max_obs_length ppo_max_token_len_per_gpu "
        "loss_scale_factor kl_topk_tokens head_chunk_tokens log_prob_max_token_len_per_gpu top_k prompt_length "
        "response_length max_num_batched_tokens forward_max_token_len_per_gpu max_length compact_at "
        "max_summary_length"
    ),
    "prompts": "train_data_num val_data_num train_batch_size val_batch_size",
    "trajectories": (
        "ppo_mini_batch_size ppo_micro_batch_size log_prob_micro_batch_size forward_micro_batch_size micro_batch_size "
        "max_num_seqs n n_agent horizon log_trajectories actor_rollout_ref.rollout.max_concurrent"
    ),
    "RL steps": (
        "total_training_steps log_trajectories_freq save_freq test_freq critic_warmup eval_ref_policy_freq patience "
        "dead_run_steps ref_policy_ema_update_period max_staleness"
    ),
    "steps": "log_freq",
    "passes": "ppo_epochs total_epochs",
    "share": (
        "lr_warmup_steps_ratio min_lr_ratio gpu_memory_utilization over_sample top_p max_failed_ratio "
        "max_invalid_action_ratio max_repetition max_empty_think_ratio max_zero_variance_groups ref_policy_ema_tau "
        "lm_fraction"
    ),
    "probability": "keep_probability min_keep_probability",
    "probability ratio": (
        "clip_ratio clip_ratio_low clip_ratio_high clip_ratio_c kl_iw_clip_upper kl_iw_clip_lower importance_cap "
        "reject_low reject_high"
    ),
    "reward": ("cliprange_value structure_format_score final_format_score retrieval_score min_reward max_score_drop"),
    "nats per token": "target_kl min_entropy max_entropy max_kl max_mismatch",
    "norm": "grad_clip max_grad_norm",
    "seconds": "timeout_s deadline_s step_timeout_s sigterm_grace_s",
    "GiB": "kv_cache_gib",
    "MiB": "bucket_mib",
    "workers": "ulysses_sequence_parallel_size fsdp_size",
    "GPUs": "tensor_model_parallel_size n_gpus_per_node rollout_gpus_per_node n_gpus",
    "nodes": "nnodes min_nnodes max_nnodes",
    "engines": "num_engines",
    "threads": "num_threads",
    "calls": "retriever.max_concurrent max_calls_per_turn max_calls",
    "turns": "max_invalid_turns",
    "queries": "max_batch",
    "passages": "topk",
    "searches": "max_turns",
    "checkpoints": "max_ckpt_to_keep",
    "parameters": "min_num_params",
    "times": "max_restarts max_redraws max_rollbacks max_compactions",
    "batches": "max_num_gen_batches",
    "port": "metrics_port port",
    "layers": "trained_layers",
    "rank": "lora_rank",
    "seed": "seed",
    NONE: ("lora_alpha entropy_coeff kl_loss_coef lr betas eps weight_decay llds_coef temperature gamma lam kl_coef"),
}
UNITS = {name: unit for unit, names in _NAMES.items() for name in names.split()}
"""The unit of a key by its last part, or by as much of its end as tells it apart from others."""
WARM_START_UNITS = UNITS | {
    "train_batch_size": "rows",
    "total_training_steps": "steps",
    "max_token_len_per_gpu": "tokens",
    "patience": "measurements",
}
"""The units of the keys of `verl.config.sections.schema`."""


def is_number(key: Key) -> bool:
    kind = type_name(key.type)
    return not kind.startswith("one of") and ("int" in kind.split() or "float" in kind.split())


def unit_of(key: Key, units: Mapping[str, str] = UNITS) -> str:
    """The unit of a setting; empty if it is no number. Raises KeyError for a number that `units` does not have."""
    if not is_number(key):
        return ""
    parts = key.path.split(".")
    ends = [".".join(parts[start:]) for start in range(len(parts))]
    found = next((units[end] for end in ends if end in units), None)
    if found is None:
        raise KeyError(f"{key.path} is a number without a unit: add it to verl.config.sections.fields")
    return found
