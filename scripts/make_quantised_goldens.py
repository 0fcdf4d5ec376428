"""Makes tests/goldens/quantised/: tiny models in every published format of quantised weights.

    python -m scripts.make_quantised_goldens [--out tests/goldens/quantised] [name ...]

Needs torch, transformers and compressed-tensors (made with 2.13, 5.23 and 0.20); the tests need none of them. Each
folder is a checkpoint as it would be published, and `golden.npz` beside it what transformers says of what the weights
stand for:

    prompt_I [T] int32   tokens_I [64] int32, greedy   best_I [64, 2] float64, the two best logits of each step
    last_logits [prompts, V] float64

It computes in float64. Where a format rounds activations, the inputs of each quantised product are rounded as
pallas_kernels/quantized_matmul/activations.py says.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch  # pyright: ignore[reportMissingImports]
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

from scripts.goldens.command import run
from scripts.goldens.folder import save
from scripts.goldens.golden import YARN, Golden
from scripts.goldens.quantised import FORMATS, Quantised
from scripts.goldens.reference import NUM_GREEDY, build, draw_prompts

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}
DENSE = Golden(seed=50, architecture="Llama", dtype="bfloat16", gain=2.0, config=_SIZES)
EXPERTS = Golden(
    seed=51,
    architecture="Qwen3Moe",
    dtype="bfloat16",
    gain=2.0,
    config=_SIZES
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    | {"norm_topk_prob": True},
)
LATENT = Golden(
    seed=52,
    architecture="DeepseekV3",
    dtype="float32",
    gain=2.0,
    config={
        **{key: value for key, value in _SIZES.items() if key not in ("head_dim", "rope_parameters")},
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 16,  # a latent and its key are two and a half blocks of outputs
        "qk_nope_head_dim": 24,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "num_mtp_layers": 0,
        "rope_parameters": YARN | {"rope_theta": 10000.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
)
MODELS = {"dense": DENSE, "experts": EXPERTS, "latent": LATENT}
# With these seeds float32 and float64 round every fp8 input to the same code: none lies near a tie. fp8_blocks_latent's
# also holds on other CPUs: noise of 1e-7 on the weights, drawn twelve times, moves logits by 0.08 of the test's
# tolerance at most. Only 3 of 112 seeds stayed within it.
SEEDS = {"float8": 73, "float8_blocks": 72, "fp8_blocks_latent": 134}
_PROMPTS = (1, 2)  # of those that the other goldens have


def make(name: str, folder: Path) -> None:
    """Writes one folder."""
    chosen = FORMATS[name]
    golden = MODELS[chosen.model]
    if chosen.rounding == "fp8":  # embeddings of eight bits put inputs on ties between two codes
        golden = dataclasses.replace(golden, dtype="float32", seed=SEEDS.get(name, golden.seed))
    save(build(golden), {}, golden, folder)
    decoded = _quantise(folder, chosen)
    with tempfile.TemporaryDirectory() as plain:
        _write_plain(folder, Path(plain), decoded)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            plain, dtype=torch.float64, attn_implementation="eager"
        )
        with contextlib.suppress(AttributeError):
            model.set_experts_implementation("eager")
        with _rounding(model.eval(), chosen, decoded):
            arrays = _answers(model, draw_prompts(golden.config["vocab_size"], golden.seed))
    (folder / "generation_config.json").unlink(missing_ok=True)
    np.savez_compressed(folder / "golden.npz", **arrays)  # pyright: ignore[reportArgumentType]


def _quantise(folder: Path, chosen: Quantised) -> dict[str, torch.Tensor]:
    """Replaces the folder's weights by quantised ones; what those stand for, by the names of the dense tensors."""
    tensors, stored, decoded = safetensors.torch.load_file(folder / "model.safetensors"), {}, {}
    for name, weight in tensors.items():
        module = name.removesuffix(".weight")
        is_matrix = weight.ndim == 2 and "embed" not in name
        packed = chosen.pack(module, weight.float()) if is_matrix else None
        if packed is None:
            stored[name] = weight
            continue
        stored |= {f"{module}.{end}": tensor.contiguous() for end, tensor in packed[0].items()}
        decoded[name] = packed[1]
    safetensors.torch.save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": chosen.config}, indent=1) + "\n")
    return decoded


def _write_plain(folder: Path, plain: Path, decoded: dict[str, torch.Tensor]) -> None:
    """The same model with dense weights in float32."""
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    modules = {name.removesuffix("weight") for name in decoded}
    dense = {name: x.float() for name, x in stored.items() if not name.startswith(tuple(modules))}
    safetensors.torch.save_file(dense | decoded, plain / "model.safetensors", metadata={"format": "pt"})


@contextlib.contextmanager
def _rounding(model: Any, chosen: Quantised, decoded: dict[str, torch.Tensor]) -> Iterator[None]:
    """Rounds what goes into products with these weights, also those that the model has stacked."""
    if chosen.rounding is None:
        yield
        return
    linear = torch.nn.functional.linear
    left = tuple(f"{end}.weight" for end in chosen.not_rounded)
    owned = [p for n, p in model.named_parameters() if (n in decoded or ".experts." in n) and not n.endswith(left)]
    spans = [(p.data_ptr(), p.data_ptr() + p.numel() * p.element_size()) for p in owned]

    def rounded(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        is_quantised = any(first <= weight.data_ptr() < last for first, last in spans)
        return linear(_round(x, chosen) if is_quantised else x, weight, bias)

    torch.nn.functional.linear = rounded
    try:
        yield
    finally:
        torch.nn.functional.linear = linear


def _round(x: torch.Tensor, chosen: Quantised) -> torch.Tensor:
    limit = 127 if chosen.rounding == "int8" else 448
    groups = x.unflatten(-1, (-1, chosen.group or x.shape[-1]))
    scale = groups.abs().amax(-1, keepdim=True) / limit
    scale = (
        torch.where(scale == 0, 1.0, scale) if chosen.input_scale is None else torch.tensor(chosen.input_scale).double()
    )
    share = groups / scale
    if chosen.rounding == "int8":
        codes = torch.round(share).clamp(-128, 127)
    else:
        codes = share.clamp(-limit, limit).float().to(torch.float8_e4m3fn).double()
    return (codes * scale).flatten(-2)


def _answers(model: Any, prompts: list[np.ndarray]) -> dict[str, np.ndarray]:
    arrays, last = {}, []
    for i, chosen in enumerate(_PROMPTS):
        tokens, best, logits = _greedy(model, prompts[chosen])
        arrays |= {f"prompt_{i}": prompts[chosen], f"tokens_{i}": tokens, f"best_{i}": best}
        last.append(logits)
        gap = np.min(best[:, 0] - best[:, 1])
        print(f"  {len(prompts[chosen])} tokens: {len(set(tokens.tolist()))} differ, smallest gap {gap:.1e}")
    return arrays | {"last_logits": np.stack(last)}


@torch.no_grad()
def _greedy(model: Any, prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As `reference.greedy`, a token at a time: in float64 a cache changes nothing that counts."""
    tokens, best, first, cache = [], [], None, None
    ids = torch.from_numpy(prompt).long()[None]
    for _ in range(NUM_GREEDY):
        answer = model(ids, use_cache=True, past_key_values=cache)
        logits, cache = answer.logits[0, -1], answer.past_key_values
        first = logits.numpy() if first is None else first
        top = torch.topk(logits, 2)
        best.append(top.values.numpy())
        tokens.append(int(top.indices[0]))
        ids = top.indices[None, :1]
    assert first is not None
    return np.asarray(tokens, np.int32), np.stack(best), first


if __name__ == "__main__":
    run(__doc__, FORMATS, "tests/goldens/quantised", make)
