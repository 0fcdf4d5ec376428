"""Fields that a spec's digest leaves out, where they say that a model does without something."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Fields that are left out where a model does without, so that the keys of its blocks are those of earlier versions.
_ABSENT: Mapping[str, Any] = {
    "forms": (),
    "borrowed": (),
    "v_head_dim": None,
    "latent": None,
    "indexer": None,
    "turns_last": False,
    "key_norm_eps": 1e-6,
    "by_head": False,
    "group_size": 1,
    "local_groups": 0,
    "num_best": 2,
    "grouped": True,
    "head_gate": False,
    "value_gate": False,
    "vision": None,
    "tower": "qwen",
    "clipped": False,
    "standardized": False,
    "windows_see_whole": False,
    "sections": (),
    "sections_in_order": False,
    "without_mlp": (),
    "head_bias": False,
    "rivals_within": None,
    "gate_multiplier": 1.0,
    "output_multiplier": 1.0,
    "has_gates": True,
    "gated_limit": 0.0,
    "limits": (),
    "value_of_key": False,
    "v_norm": False,
    "own_norms": False,
    "rounds_once": False,
    "gate_rank": 0,
    "raw_queries": False,
    "zero_outside": False,
    "norm_eps": 1e-6,
    "shared_key": True,
    "shared_norm": False,
    "rooted": False,
    "own_queries": False,
    "learned_temperature": False,
    "learned_frequencies": False,
    "other_mlp": (),
    "layer_inputs": None,
    "image_id": 0,
    "layer_scales": False,
    "hyper_connections": None,
    "wide_head": False,
    "gate_limit": None,
    "chunked": False,
    "num_mtp_layers": 0,
    "sound": None,
    "chunk_frames": 0,
    "window_chunks": 0,
    "conv_channels": 0,
    "stacked": 1,
    "state_size": 0,
    "learned_positions": False,
    "key_bias": True,
}


def without_absent(fields: Any) -> Any:
    """The fields of a spec, as a tree, but for those that say that something is not there."""
    if isinstance(fields, list | tuple):
        return [without_absent(each) for each in fields]
    if not isinstance(fields, dict):
        return fields
    return {
        name: without_absent(value) for name, value in fields.items() if name not in _ABSENT or value != _ABSENT[name]
    }
