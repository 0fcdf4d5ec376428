"""Makes tests/goldens/adapters/: tiny LoRA adapters of golden models, with what peft says of them, float32, on the CPU.

    python -m scripts.make_adapter_goldens [--out tests/goldens/adapters] [name ...]

Needs torch, transformers and peft (made with 2.13, 5.24 and 0.21); the tests need none of them. Each folder is one that
`PeftModel.save_pretrained` wrote, and `golden.npz` beside it holds, for three prompts of the base model's golden:

    prompt_I [T] int32   tokens_I [64] int32, greedy   best_I [64, 2] float32, the two best logits of each step
    last_logits [prompts, V]
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import peft  # pyright: ignore[reportMissingImports]
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

from scripts.goldens.command import run
from scripts.goldens.recipe import first_seed, normal, replace_weights
from scripts.goldens.reference import draw_prompts, steady
from scripts.goldens.weights import ENDING, LAWS, made, recipe_of

GOLDENS = Path("tests/goldens")
_PROMPTS = (2, 3, 4)
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_MLP = ["gate_proj", "up_proj", "down_proj"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapter:
    """base: a folder of tests/goldens. lora: what LoraConfig is given. gain: of its weights."""

    seed: int
    base: str
    lora: dict[str, Any]
    gain: float = 1.0


ADAPTERS = {
    "llama_attention": Adapter(
        seed=1, base="llama", lora={"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    ),
    "llama_patterns": Adapter(
        seed=2,
        base="llama",
        gain=0.6,
        lora={
            "r": 6,
            "lora_alpha": 9,
            "use_rslora": True,
            "target_modules": [*_ATTENTION, *_MLP],
            "rank_pattern": {"down_proj": 3, "layers.1.self_attn.q_proj": 8},
            "alpha_pattern": {"gate_proj": 5, "^model.layers.2.mlp.up_proj": 12},
        },
    ),
    "qwen3_moe_experts": Adapter(
        seed=3,
        base="qwen3_moe",
        lora={
            "r": 2,
            "lora_alpha": 4,
            "target_modules": [*_ATTENTION, *_MLP],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
    "llama_head": Adapter(  # of a head that is the embedding
        seed=5, base="llama", lora={"r": 3, "lora_alpha": 6, "target_modules": ["v_proj", "lm_head"]}
    ),
    "qwen3_moe_head": Adapter(
        seed=4, base="qwen3_moe", lora={"r": 5, "lora_alpha": 5, "target_modules": ["o_proj", "lm_head"]}
    ),
}


def make(name: str, folder: Path) -> None:
    """Writes one folder."""
    chosen = ADAPTERS[name]
    config = json.loads((GOLDENS / chosen.base / "config.json").read_text())
    bare = peft.get_peft_model(
        base_of(chosen, config), peft.LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **chosen.lora)
    )
    bare.peft_config["default"].base_model_name_or_path = chosen.base
    bare.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    replace_weights(folder, chosen.seed, lambda weight, shape: law(weight, shape, chosen))
    drawn = draw_prompts(config["vocab_size"], chosen.seed)
    prompts = [drawn[i] for i in _PROMPTS]

    def answer() -> dict[str, np.ndarray] | None:
        return steady(peft.PeftModel.from_pretrained(base_of(chosen, config), str(made(folder))).eval(), prompts)

    np.savez_compressed(folder / "golden.npz", allow_pickle=False, **first_seed(folder, chosen.seed, answer))


def base_of(chosen: Adapter, config: dict[str, Any]) -> Any:
    experts = {"experts_implementation": "eager"} if "num_experts_per_tok" in config else {}
    return transformers.AutoModelForCausalLM.from_pretrained(
        made(GOLDENS / chosen.base), dtype=torch.float32, attn_implementation="eager", **experts
    )


def law(name: str, shape: tuple[int, ...], chosen: Adapter) -> dict[str, Any]:
    """What a weight is drawn from; that of the base model, which is stored beside the adapter of a head, as there."""
    if "lora_" in name:
        return normal(0.0, chosen.gain * shape[-1] ** -0.5)
    of_base = name.removeprefix("base_model.model.").replace(".base_layer", "")
    for path in (GOLDENS / chosen.base).glob(f"*{ENDING}"):
        if (said := recipe_of(path).get(of_base)) is not None:
            (ruled,) = ({key: said[key]} for key in said if key in LAWS)
            seed = json.loads(path.read_text())["seed"]
            return {**ruled, "seed": seed, "name": said.get("name", of_base), "through": said["dtype"]}
    raise KeyError(f"{name} is no weight of {chosen.base}")


if __name__ == "__main__":
    run(__doc__, ADAPTERS, "tests/goldens/adapters", make)
