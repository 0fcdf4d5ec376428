"""Makes tests/goldens/routed_experts/: the experts that the routers of transformers choose in golden models, float32.

    python -m scripts.make_routing_goldens [--out tests/goldens/routed_experts] [name ...]

Needs torch and transformers (made with 2.13 and 5.24); the tests need neither. `golden.npz` of a folder holds, of
prompts 2, 3, 4 of the model's golden and the tokens that it continues them by, but the last:

    experts_I [T, layers with experts, X] uint8, ascending
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

from scripts.goldens.command import run
from scripts.goldens.weights import made

GOLDENS = Path("tests/goldens")
NAMES = ("qwen3_moe", "deepseek_v3", "gpt_oss")
_PROMPTS = (2, 3, 4)


def make(name: str, folder: Path) -> None:
    """Writes one folder."""
    own = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(made(GOLDENS / name), **own)
    golden = np.load(GOLDENS / name / "golden.npz")
    arrays = {}
    for i in _PROMPTS:
        sequence = np.concatenate((golden[f"prompt_{i}"], golden[f"tokens_{i}"]))[:-1]
        arrays[f"experts_{i}"] = chosen(model.eval(), sequence)
        print(f"  {len(sequence)} tokens: {arrays[f'experts_{i}'].shape[1:]} experts")
    np.savez_compressed(folder / "golden.npz", **arrays)


def chosen(model: Any, token_ids: np.ndarray) -> np.ndarray:
    """[T, layers with experts, X] uint8, ascending: what each router says last."""
    found: list[np.ndarray] = []

    def keep(module: Any, inputs: Any, outputs: Any) -> None:
        found.append(np.sort(outputs[-1].reshape(len(token_ids), -1).numpy()).astype(np.uint8))

    routers = [module for module in model.modules() if type(module).__name__.endswith("Router")]
    hooks = [module.register_forward_hook(keep) for module in routers]
    with torch.no_grad():
        model(torch.tensor(token_ids[None].astype(np.int64)))
    for hook in hooks:
        hook.remove()
    return np.stack(found, axis=1)


if __name__ == "__main__":
    run(__doc__, NAMES, "tests/goldens/routed_experts", make)
