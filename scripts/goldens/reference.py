"""Tiny models of the reference implementation: drawing their weights, and recording their outputs."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch  # pyright: ignore[reportMissingImports]
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from transformers import conversion_mapping  # pyright: ignore[reportMissingImports]

from scripts.goldens.mesh_rows import GREEDY, answered
from scripts.goldens.mistral_large4 import text_model_class
from scripts.goldens.recipe import normal
from scripts.goldens.weights import make

PROMPT_LENGTHS = (1, 2, 11, 29, 64, 97, 150)
OBSERVED = (2, 3)
NUM_GREEDY = 64
MARGIN = 1e-4  # of the best logit, a hundred times the error of float32
LEAST_DIFFERENT = 10  # of the tokens that follow a prompt
_HALVES = (("attn", "attn"), ("mlp", "ffn"))  # of a layer of HYV4
_FINAL_NORMS = ("norm", "embedding_norm", "final_layernorm", "norm_f")
_DECIDING = (
    *("lm_head.weight", "mlp.gate.weight", "mlp.gate.wg.weight", "block_sparse_moe.gate.weight"),
    *("router.weight", "router.layer.weight"),
)
_PER_TOKEN = {"num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"}  # a config with experts has one of these


@dataclasses.dataclass(frozen=True, kw_only=True)
class Laws:
    """What weights are drawn from.

    gain: of linear layers. norm_mean: 0 where the model multiplies by 1 + weight. either_sign: of the last norm's
    weights, so that a tied table does not repeat every token. embed_std: of embeddings.
    """

    gain: float = 1.5
    norm_mean: float = 1.0
    either_sign: bool = False
    embed_std: float = 0.5

    def of(self, name: str, shape: tuple[int, ...]) -> dict[str, Any]:
        """Norms near their mean, small biases, linear layers with a gain that mixes tokens and keeps logits apart."""
        by_ending = (
            (("e_score_correction_bias", "expert_bias", "moe_statics"), normal(0.0, 0.1)),
            (("layer_scalar", "router.scale", "per_expert_scale"), normal(1.0, 0.2)),
            (("router.proj.weight",), normal(0.0, 3.0)),  # what it is given has a norm of one
            (("ssmax_scaling.s", "lerope.alpha"), normal(0.1, 0.1)),
            (("ssmax_scaling.b",), normal(0.8, 0.2)),
            (("A_log",), {"uniform": [-4.0, 1.0]}),  # some heads forget at once, others hardly ever
            (("bias",), normal(0.0, 0.3)),
            (("sinks",), normal(0.0, 1.0)),
        )
        for ends, said in by_ending:
            if name.endswith(ends):
                return said
        if name == "model.norm.weight" and self.either_sign:
            return normal(-1.0, 1.0)
        if "norm" in name and len(shape) == 1:  # not the matrices of a gate behind one
            return normal(1.0 if "linear_attn" in name else self.norm_mean, 0.2)
        if "embed" in name:
            return normal(0.0, self.embed_std)
        gain = 3.0 if name.endswith(_DECIDING) else self.gain
        return normal(0.0, gain / math.sqrt(shape[-1]))


@dataclasses.dataclass(frozen=True)
class Limits:
    """How often noise is drawn, its share of a weight, and the share of the largest logit that it may move."""

    draws: int
    noise: float
    moved: float


FLOAT32 = Limits(4, 1e-7, 3e-5)
MESH = Limits(4, 1e-7, 1.7e-5)  # thrice the noise of float32, and half of the 1e-5 that tests of meshes allow


def config_of(folder: Path) -> Any:
    """A golden's config.json as the reference reads it, for the plainest of its code.

    An engine that serves more tokens than longrope's short factors are for takes the long ones for all; the reference
    takes the short ones for short sequences, so there it is told the long ones twice.
    """
    said = json.loads((folder / "config.json").read_text())
    _name_as_published(said["model_type"])
    config = transformers.AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # weights are decoded before it sees them
    rope = getattr(config, "rope_parameters", None) or {}
    longest = max(PROMPT_LENGTHS) + NUM_GREEDY
    if rope.get("rope_type") == "longrope" and rope["original_max_position_embeddings"] < longest:
        config.rope_parameters = rope | {"short_factor": rope["long_factor"]}
    config._attn_implementation = "eager"
    if _PER_TOKEN & set(said):
        config._experts_implementation = "eager"
    return config


def skeleton(config: Any) -> Any:
    """The model in float32, with weights that nobody uses."""
    (name,) = config.architectures
    if name.startswith("MistralLarge4Text"):
        return text_model_class()(config).eval()
    model = getattr(transformers, name)(config).eval()
    recur_by_token(sys.modules[type(model).__module__])
    return model


def whole_skeleton(folder: Path) -> Any:
    """The model that a folder's config.json names, in float32, with weights that nobody uses."""
    config = transformers.AutoConfig.from_pretrained(folder, attn_implementation="eager")
    (name,) = config.architectures
    return getattr(transformers, name)(config).eval()


def recur_by_token(reference: Any) -> None:
    """Kimi Delta Attention of prompts as that of new tokens: the same sums, in a fortieth of the time."""
    if hasattr(reference, "chunk_kimi_delta_attention"):
        reference.chunk_kimi_delta_attention = reference.recurrent_kimi_delta_attention


def _name_as_published(model_type: str) -> None:
    """Tensors are saved and loaded by the names in published checkpoints, where the reference would take others."""
    known = conversion_mapping.get_checkpoint_conversion_mapping
    if model_type == "minimax_m3_vl_text":  # the names in the whole, without its prefix
        named = [each for each in known("minimax_m3_vl") if not each.source_patterns[0].startswith("^")]
    elif model_type == "hy_v4":  # its own are not the same on the way back
        names = {"self_attn.learnable_sink_param": "self_attn.sinks", "self_attn.linear_gate": "self_attn.gate_proj"}
        for part in ("fn", "base", "scale"):
            names |= {f"hc_{half}_layer.hc_pre.hc_{part}": f"{ours}_hc.{part}" for half, ours in _HALVES}
            names |= {f"hc_head.hc_head_{part}": f"hc_head.hc_{part}"}
        make = conversion_mapping.WeightRenaming
        named = [make(source_patterns=re.escape(old), target_patterns=new) for old, new in names.items()]
    else:
        return
    conversion_mapping.register_checkpoint_conversion_mapping(model_type, named, overwrite=True)


def packed_experts(name: str, shape: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """What MXFP4 experts of [E, in, out] are stored as, and drawn from."""
    num_experts, num_inputs, num_outputs = shape
    blocks = [num_experts, num_outputs, num_inputs // 32]
    return {
        f"{name}_blocks": {"dtype": "uint8", "shape": [*blocks, 16], "integers": [0, 255]},
        f"{name}_scales": {"dtype": "uint8", "shape": blocks, "integers": [122, 124]},
    }


def unpack_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """MXFP4 experts as the reference's function decodes them."""
    from transformers.integrations.mxfp4 import (  # pyright: ignore[reportMissingImports]
        _convert_moe_packed_tensors,
    )

    found = {name: x for name, x in tensors.items() if not name.endswith(("_blocks", "_scales"))}
    for name in (name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")):
        blocks, scales = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
        found[name] = _convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return found


def load(like: Any, folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Any:
    """The model with a golden's weights in float32. change: made to the tensors, for a form that it cannot read."""
    tensors: dict[str, torch.Tensor] = {}
    with tempfile.TemporaryDirectory() as plain:
        make(folder, Path(plain))
        for path in Path(plain).glob("*.safetensors*"):  # and the index of several
            tensors |= safetensors.torch.load_file(path) if path.suffix == ".safetensors" else {}
            path.unlink()
        dense = {name: x.contiguous() for name, x in change(tensors).items()}
        safetensors.torch.save_file(dense, Path(plain) / "model.safetensors", metadata={"format": "pt"})
        model, told = type(like).from_pretrained(
            plain, config=like.config, dtype=torch.float32, output_loading_info=True
        )
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    return model.eval()


def draw_prompts(vocab_size: int, seed: int) -> list[np.ndarray]:
    """One prompt of each length; the two longest share 48 tokens."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(6, vocab_size, length).astype(np.int32) for length in PROMPT_LENGTHS]
    prompts[-1][:48] = prompts[-2][:48]
    return prompts


@torch.no_grad()
def greedy_row(logits: Callable[[np.ndarray], Any], prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """(tokens [64], two best logits of each step [64, 2]), end tokens too. None where two logits nearly tie.

    logits: of the token behind ids [T] int32, [V].
    """
    ids, best = prompt, []
    for _ in range(NUM_GREEDY):
        top = torch.topk(logits(ids), 2)
        if top.values[0] - top.values[1] < MARGIN * top.values.abs().max():
            return None
        best.append(top.values.numpy())
        ids = np.append(ids, top.indices[0].numpy()).astype(np.int32)
    return ids[len(prompt) :], np.stack(best)


@torch.no_grad()
def greedy(model: Any, prompts: list[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]] | None:
    """For each prompt (tokens [64], two best logits of each step [64, 2], logits after the prompt [V]), also after end
    tokens; None where logits nearly tie, so that another processor might choose otherwise, or where few tokens differ.
    """
    ends = torch.tensor([len(prompt) for prompt in prompts])
    rows = torch.arange(len(prompts))
    ids = torch.zeros((len(prompts), int(ends.max()) + NUM_GREEDY), dtype=torch.long)  # what follows changes nothing
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = torch.from_numpy(prompt)
    best, first = [], None
    for step in range(NUM_GREEDY):
        logits = model(ids[:, : int(ends.max()) + step], use_cache=False).logits[rows, ends + step - 1]
        first = logits if first is None else first
        top = torch.topk(logits, 2)
        if bool((top.values[:, 0] - top.values[:, 1] < MARGIN * top.values.abs().amax(1)).any()):
            return None
        best.append(top.values)
        ids[rows, ends + step] = top.indices[:, 0]
    tokens = [row[end : end + NUM_GREEDY].numpy().astype(np.int32) for row, end in zip(ids, ends, strict=True)]
    if min(len(set(each.tolist())) for each in tokens) < LEAST_DIFFERENT:
        return None
    assert first is not None
    return list(zip(tokens, torch.stack(best, 1).numpy(), first.numpy(), strict=True))


@torch.no_grad()
def is_steady(answer: Callable[[], torch.Tensor], model: Any, limits: Limits = FLOAT32) -> bool:
    """Whether noise on the weights, as of other orders of sums, hardly moves the answer.

    It does where two experts or two codes of an activation nearly tie.
    """
    kept = {name: weight.clone() for name, weight in model.named_parameters()}
    exact, draws = answer(), torch.Generator().manual_seed(0)
    moved = 0.0
    for _ in range(limits.draws):
        for name, weight in model.named_parameters():
            shares = torch.rand(weight.shape, generator=draws, dtype=weight.dtype) * 2 - 1
            weight.copy_(kept[name] * (1 + limits.noise * shares))
        moved = max(moved, float((answer() - exact).abs().max() / exact.abs().max()))
        if moved > limits.moved:
            break
    for name, weight in model.named_parameters():
        weight.copy_(kept[name])
    print(f"  noise moves the answer by {moved:.1e}")
    return moved <= limits.moved


def steady(model: Any, prompts: list[np.ndarray], limits: Limits = FLOAT32) -> dict[str, np.ndarray] | None:
    """What `greedy` says of prompts, as golden.npz holds it; None for weights that leave too much to chance."""
    if (said := greedy(model, prompts)) is None:
        return None
    sequences = [np.concatenate((prompt, tokens)) for prompt, (tokens, _, _) in zip(prompts, said, strict=True)]
    if not is_steady(lambda: all_logits(model, sequences), model, limits):
        return None
    arrays = {"last_logits": np.stack([logits for _, _, logits in said])}
    for i, (tokens, best, _) in enumerate(said):
        arrays |= {f"prompt_{i}": prompts[i], f"tokens_{i}": tokens, f"best_{i}": best}
    return arrays


@torch.no_grad()
def is_same_on_meshes(folder: Path, model: Any, limits: Limits = MESH) -> bool:
    """Whether noise leaves what the mesh tests compare as it is: logits of rows, and best tokens of preempted ones."""
    rows, pressed = answered(folder)

    def best() -> torch.Tensor:
        num_tokens = GREEDY.max_tokens
        assert num_tokens is not None
        return torch.cat([all_logits(model, [ids])[-1 - num_tokens : -1].argmax(1) for ids in pressed]).double()

    return is_steady(lambda: all_logits(model, rows), model, limits) and is_steady(best, model, limits)


@torch.no_grad()
def observe(model: Any, prompt: np.ndarray) -> dict[str, np.ndarray]:
    """What the first layer is given, outputs of every layer, of the final norm, and all logits of one prompt."""
    seen: dict[str, np.ndarray] = {}
    body = model.model
    modules = {"norm": next(getattr(body, name) for name in _FINAL_NORMS if hasattr(body, name))}
    modules |= {f"layer {i}": layer for i, layer in enumerate(body.layers)}

    def hook(name: str) -> Any:
        return lambda module, inputs, output: seen.__setitem__(
            name, (output[0] if isinstance(output, tuple) else output)[0].numpy()
        )

    def given(module: Any, inputs: Any, named: Any) -> None:
        seen["embed"] = (inputs[0] if inputs else named["hidden_states"])[0].numpy()

    handles = [module.register_forward_hook(hook(name)) for name, module in modules.items()]
    handles.append(body.layers[0].register_forward_pre_hook(given, with_kwargs=True))
    logits = model(torch.from_numpy(prompt).long()[None], use_cache=False).logits[0].numpy()
    for handle in handles:
        handle.remove()
    layers = np.stack([seen[f"layer {i}"] for i in range(len(body.layers))])
    return {"embed": seen["embed"], "layers": layers, "norm": seen["norm"], "logits": logits}


@torch.no_grad()
def all_logits(model: Any, sequences: list[np.ndarray]) -> torch.Tensor:
    """float64 [positions of all sequences, V]"""
    return torch.cat(
        [model(torch.from_numpy(ids).long()[None], use_cache=False).logits[0] for ids in sequences]
    ).double()


@torch.no_grad()
def bf16_error(model: Any, sequences: list[np.ndarray]) -> np.ndarray:
    """The error of the model in bfloat16, as make_goldens.py says; the model stays in bfloat16."""
    exact = all_logits(model, sequences)
    error = all_logits(model.to(torch.bfloat16), sequences) - exact
    spread = exact - exact.mean(dim=1, keepdim=True)
    return np.asarray((error**2).mean().sqrt() / (spread**2).mean().sqrt(), np.float32)
