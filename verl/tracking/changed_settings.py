"""Settings that differ between two configurations of a run, and whether they may change what it learns."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

NOT_SET = "not set"
_MODEL = r"(actor_rollout_ref|critic)\.model\."
_ROLE = r"(actor_rollout_ref\.(actor|ref|rollout)|critic)\."
HARMLESS = re.compile(
    r"data\.(val_\w+|test_files)|reward\.(val_kwargs(\..+)?|n_gpus|port)|retriever\.(timeout_s|deadline_s|max_batch)"
    rf"|{_MODEL}(enable_gradient_checkpointing|use_remove_padding|use_liger|fsdp_config\.(?!mixed_precision).+)"
    rf"|{_ROLE}(\w*micro_batch_size|\w*use_dynamic_bsz|\w*max_token_len_per_gpu|ulysses_sequence_parallel_size|use_prefix_grouper)"
    rf"|{_ROLE}(fsdp_config\.(?!mixed_precision).+|num_threads|head_chunk_tokens|old_log_probs)"
    r"|actor_rollout_ref\.ref\.log_probs"
    r"|actor_rollout_ref\.rollout\.(gpu_memory_utilization|free_cache_engine|enforce_eager|load_format|kv_cache_gib)"
    r"|actor_rollout_ref\.rollout\.(tensor_model_parallel_size|max_num_batched_tokens|max_num_seqs|num_engines)"
    r"|actor_rollout_ref\.rollout\.((max_)?nnodes|n_gpus_per_node|max_concurrent|max_restarts|(val_kwargs|weight_sync)\..+)"
    r"|trainer\.(project_name|experiment_name|logger|log_\w+|metrics_\w+|(min_)?nnodes|n_gpus_per_node|device|test_freq|step_timeout_s|sigterm_grace_s)"
    r"|trainer\.(default_\w+_dir|gather_state|overwrite|resume_\w+|max_ckpt_to_keep|del_local_ckpt_after_load|save_\w+)"
    r"|trainer\.(val_before_train|val_only|eval_ref_policy_freq|layout|rollout_gpus_per_node)|critic\.n_gpus_per_node"
)
"""Keys that change where and how fast a run goes, or what it reports, and gradients only by rounding. Any other key may
change what is learned."""


@dataclass(frozen=True)
class Change:
    """A key whose value differs. `NOT_SET` is the value of a key that one side lacks."""

    key: str
    old: Any
    new: Any

    @property
    def harmless(self) -> bool:
        return HARMLESS.fullmatch(self.key) is not None

    def __str__(self) -> str:
        effect = "does not change what is learned" if self.harmless else "may change what is learned"
        return f"{self.key}: {self.old} -> {self.new} ({effect})"


def changed_settings(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[Change]:
    """The keys that differ, those that may change what is learned first. Both configurations are as read from YAML."""
    old, new = dict(flattened(saved)), dict(flattened(wanted))
    keys = dict.fromkeys([*new, *old])
    changes = [Change(key, old.get(key, NOT_SET), new.get(key, NOT_SET)) for key in keys]
    return sorted((change for change in changes if change.old != change.new), key=lambda change: change.harmless)


def flattened(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values of a tree of settings by dotted key.

    An empty mapping has no values, so `kwargs: {}` and `kwargs: {k: 1}` differ in `kwargs.k` alone.
    """
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
