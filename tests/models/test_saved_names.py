"""Checkpoints whose tensors have names that the reference implementation gives them when it saves a model."""

import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints import open_checkpoint
from ferrum_jax.models.families.registry import spec_of
from tests.golden_table import GOLDENS
from tests.models.test_goldens import load, parameters_of
from tests.rows import rows_beside

HY4_SAVED = {
    r"\.hc_(attn|mlp)_layer\.hc_pre\.": r".hc_pre.hc_\1_layer.",
    r"model\.hc_head\.": "model.hc_pre.hc_head.",
    r"(mlp|shared_experts)\.gate_proj": r"\1.linear_gate",
}
HY4_INTERNAL = rows_beside(__file__)["hy4 internal"]
MINIMAX_INTERNAL = {
    r"block_sparse_moe\.e_score": "mlp.gate.e_score",
    "block_sparse_moe": "mlp",
    "self_attn.index_": "self_attn.indexer.",
}


def renamed(tensors, names):
    for old, new in names.items():
        tensors = {re.sub(old, new, name): x for name, x in tensors.items()}
    return tensors


def fused(tensors):
    """The tensors of MiniMax-M3, experts stacked, gate and up of experts and of MLPs one behind the other."""
    apart, found = re.compile(r"(.*)\.(\d+)\.w[123]\.weight"), {}
    for name, x in tensors.items():
        if match := apart.fullmatch(name):
            block, num = match[1], sum(other.startswith(f"{match[1]}.") for other in tensors) // 3
            gate, down, up = (np.stack([tensors[f"{block}.{e}.w{n}.weight"] for e in range(num)]) for n in (1, 2, 3))
            found |= {f"{block}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{block}.down_proj": down}
        elif name.endswith(".gate_proj.weight"):
            up = tensors[name.replace("gate_proj", "up_proj")]
            found[name.replace("gate_proj", "gate_up_proj")] = np.concatenate([x, up])
        elif not name.endswith(".up_proj.weight"):
            found[name] = x
    return found


def in_whole(tensors):
    """The tensors of a text part, named as in the reference's own model, and one of each part of images."""
    named = renamed(tensors, {r"^model\.": "model.language_model."})
    return named | {f"model.{part}.a": np.ones(3, np.float16) for part in ("vision_tower", "multi_modal_projector")}


@pytest.mark.parametrize(
    ("golden", "as_saved", "is_whole"),
    [
        ("hy_v4", lambda tensors: renamed(tensors, HY4_SAVED), False),
        ("hy_v4", lambda tensors: renamed(tensors, HY4_INTERNAL), False),
        ("minimax_m3", lambda tensors: renamed(fused(tensors), MINIMAX_INTERNAL), False),
        ("minimax_m3", lambda tensors: in_whole(renamed(fused(tensors), MINIMAX_INTERNAL)), True),
    ],
    ids=["Hy4", "Hy4, internal", "MiniMax-M3, text", "MiniMax-M3"],
)
def test_tensors_with_the_names_of_the_reference_are_those_of_the_golden(golden, as_saved, is_whole, tmp_path):
    config = json.loads((GOLDENS / golden / "config.json").read_text())
    if is_whole:
        architectures = ["MiniMaxM3SparseForConditionalGeneration"]
        config = {"architectures": architectures, "merged_hidden_size": 184, "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(as_saved(load_file(GOLDENS / golden / "model.safetensors")), tmp_path / "model.safetensors")

    found = parameters_of(tmp_path, spec_of(open_checkpoint(tmp_path).config))
    expected = load(golden)[2]
    assert set(found) == set(expected)
    for name, x in expected.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)


@pytest.mark.parametrize(
    ("rope", "turning"),
    [
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, 8),  # as published, beside rotary_dim
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}, 4),
        ({"rope_parameters": {"rope_theta": 1e4}}, 16),
        ({"rope_theta": 1e4}, 8),
    ],
)
def test_minimax_turns_what_the_reference_turns(rope, turning):
    config = json.loads((GOLDENS / "minimax_m3/config.json").read_text())
    del config["rope_parameters"]
    spec = spec_of(config | {"index_head_dim": 20} | rope)
    assert spec.attention.rope is not None and spec.attention.rope.rotary_dim(16) == turning
