"""Tiny models of the reference implementation: drawing their weights, and recording their outputs."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

from scripts.goldens.golden import Golden

PROMPT_LENGTHS = (1, 2, 11, 29, 64, 97, 150)
OBSERVED = (2, 3)
NUM_GREEDY = 64
_FINAL_NORMS = ("norm", "embedding_norm", "final_layernorm", "norm_f")
_SEE_IMAGES = ("Gemma3", "Gemma4", "Llama4", "Qwen3_5", "Qwen3_5Moe")  # whose config of text has a class of its own
_STORED_BUFFERS = ("e_score_correction_bias", "layer_scalar")
_PER_TOKEN = {"num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"}  # a config with experts has one of these


def build(golden: Golden) -> Any:
    """The model in float32, its weights rounded to golden.dtype."""
    torch.manual_seed(golden.seed)
    text = "Text" if golden.architecture in _SEE_IMAGES else ""
    config_class = getattr(transformers, f"{golden.architecture}{text}Config")
    config = config_class(
        **golden.config,
        max_position_embeddings=512,
        bos_token_id=2,
        eos_token_id=golden.eos_token_id,
        attn_implementation="eager",
        **({"experts_implementation": "eager"} if _PER_TOKEN & set(golden.config) else {}),
    )
    model = getattr(transformers, f"{golden.architecture}ForCausalLM")(config).eval()
    stored = getattr(torch, golden.dtype)
    with torch.no_grad():
        stored_too = ((n, x) for n, x in model.named_buffers() if n.endswith(_STORED_BUFFERS))
        for name, weight in itertools.chain(model.named_parameters(), stored_too):
            draw(name, weight, golden)
            weight.copy_(weight.to(stored).float())
    return model


def draw(name: str, weight: torch.Tensor, golden: Golden) -> None:
    """Draws a weight: norms near their mean, small biases, linear layers with a gain that mixes tokens and keeps
    logits apart."""
    if name.endswith("e_score_correction_bias"):
        weight.normal_(0.0, 0.1)
    elif name.endswith("norm.bias"):
        weight.normal_(0.0, 0.3)
    elif name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
        weight.normal_(1.0, 0.2)
    elif name.endswith("router.proj.weight"):
        weight.normal_(0.0, 3.0)  # what it is given has a norm of one
    elif name == "model.norm.weight" and (golden.norm_mean == 0 or golden.architecture == "Gemma4"):
        weight.normal_(-1.0, 1.0)  # of either sign; otherwise a tied table would repeat every token
    elif "norm" in name:
        weight.normal_(1.0 if "linear_attn" in name else golden.norm_mean, 0.2)
    elif name.endswith("A_log"):
        weight.uniform_(-4.0, 1.0)  # some heads forget at once, others hardly ever
    elif name.endswith("bias"):
        weight.normal_(0.0, 0.3)
    elif name.endswith("sinks"):
        weight.normal_(0.0, 1.0)
    elif "embed" in name:
        weight.normal_(0.0, golden.embed_std)
    else:
        gain = (
            3.0
            if name.endswith(("lm_head.weight", "mlp.gate.weight", "mlp.gate.wg.weight", "router.weight"))
            else golden.gain
        )
        weight.normal_(0.0, gain / math.sqrt(weight.shape[-1]))


def pack_experts(model: Any, seed: int) -> dict[str, torch.Tensor]:
    """Draws MXFP4 experts, decodes them into the model with the reference's function, returns the packed tensors."""
    from transformers.integrations.mxfp4 import (  # pyright: ignore[reportMissingImports]
        _convert_moe_packed_tensors,
    )

    rng = np.random.default_rng(seed)
    packed = {}
    for name, weight in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            num_experts, num_inputs, num_outputs = weight.shape
            shape = (num_experts, num_outputs, num_inputs // 32)
            blocks = torch.from_numpy(rng.integers(0, 256, (*shape, 16), np.uint8))
            scales = torch.from_numpy(rng.integers(122, 125, shape, np.uint8))
            with torch.no_grad():
                weight.copy_(_convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    return packed


def draw_prompts(vocab_size: int, seed: int) -> list[np.ndarray]:
    """One prompt of each length; the two longest share 48 tokens."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(6, vocab_size, length).astype(np.int32) for length in PROMPT_LENGTHS]
    prompts[-1][:48] = prompts[-2][:48]
    return prompts


@torch.no_grad()
def greedy(model: Any, prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens [64], two best logits of each step [64, 2], logits after the prompt [V]); goes on after end tokens."""
    ids, best, after = torch.from_numpy(prompt).long()[None], [], []
    for _ in range(NUM_GREEDY):
        logits = model(ids, use_cache=False).logits[0, -1]
        after.append(logits)
        top = torch.topk(logits, 2)
        best.append(top.values.numpy())
        ids = torch.cat((ids, top.indices[None, :1]), dim=1)
    return ids[0, len(prompt) :].numpy().astype(np.int32), np.stack(best), after[0].numpy()


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
def bf16_error(model: Any, sequences: list[np.ndarray]) -> np.ndarray:
    """The error of the model in bfloat16, as in this file's docstring; the model stays in bfloat16."""

    def logits() -> np.ndarray:
        outputs = [model(torch.from_numpy(ids).long()[None], use_cache=False).logits[0] for ids in sequences]
        return torch.cat(outputs).double().numpy()

    exact = logits()
    model.to(torch.bfloat16)
    error = logits() - exact
    spread = exact - exact.mean(axis=1, keepdims=True)
    return np.asarray(np.sqrt(np.mean(error**2) / np.mean(spread**2)), np.float32)
