"""Makes tests/goldens/mtp/: goldens with layers that predict one token more, and what transformers drafts, float32.

    python -m scripts.make_mtp_goldens [--out tests/goldens/mtp] [name ...]

Needs torch and transformers (made with 2.13 and 5.24); the tests need neither. A folder is a checkpoint as published
ones are, with a config.json by hand. `golden.npz` holds, of a prompt of 40 tokens, and for layer K that predicts:

    prompt [T] int32     hidden [T, D], of the model, after its norm
    draft_K [T - 1 - K, D], after the layer's norm     logits_K [T - 1 - K, V]

The tensors of such a layer are shaped as those of a layer of the model. transformers reads them by its own conversions;
of Qwen's it knows the names from Mellum, which has the same.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from transformers.cache_utils import MtpCache  # pyright: ignore[reportMissingImports]
from transformers.modeling_layers import MtpModel  # pyright: ignore[reportMissingImports]

from scripts.goldens.command import run
from scripts.goldens.folder import draw
from scripts.goldens.recipe import first_seed, write_recipe
from scripts.goldens.reference import Laws, config_of, is_steady, skeleton
from scripts.goldens.weights import ENDING, make, recipe_of

_LENGTH = 40
_FULL = {"mtp_layer_types": ["full_attention"]}
_SPARSE = {"mtp_mlp_layer_types": ["sparse"]}
_IN_LAYER = {"embed": "enorm", "hidden": "hnorm", "join": "eh_proj", "norm": "shared_head.norm"}
_ABOVE = {"embed": "pre_fc_norm_embedding", "hidden": "pre_fc_norm_hidden", "join": "fc", "norm": "norm"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafting:
    """What a model is given such layers by; its config.json says how many.

    seed, laws: of all weights. like: the layer whose tensors they have. above: their ends stand above them, under
    "mtp.". told: what transformers is told of them beside config.json.
    """

    seed: int
    laws: Laws
    like: int
    count: int = 1
    above: bool = False
    told: dict[str, Any] = dataclasses.field(default_factory=dict)


_LAWS = Laws(gain=2.0)
_ABOUT_ZERO = Laws(gain=1.6, norm_mean=0.0, either_sign=True)
DRAFTING = {
    "deepseek_v3": Drafting(seed=71, laws=_LAWS, like=2, count=2),
    "glm4_moe": Drafting(seed=48, laws=_LAWS, like=2),
    "glm4_moe_lite": Drafting(seed=84, laws=_LAWS, like=2, told=_SPARSE),
    "qwen3_next": Drafting(seed=30, laws=dataclasses.replace(_ABOUT_ZERO, gain=1.2), like=3, above=True, told=_FULL),
    "qwen3_5": Drafting(seed=91, laws=_ABOUT_ZERO, like=3, above=True, told=_FULL),
    # transformers takes the class of norms from the last layer, whose first must not be that of a Gated DeltaNet.
    "qwen3_5_moe": Drafting(seed=92, laws=_ABOUT_ZERO, like=2, above=True, told=_FULL),
}


def make_one(name: str, folder: Path) -> None:
    """Writes one folder, with the first seed for which no expert depends on how sums are rounded."""
    own, config = DRAFTING[name], config_of(folder)
    like = skeleton(config)
    draw(like, folder, own.seed, own.laws.of)
    add_layers(own, like, folder)
    prompt = np.random.default_rng(own.seed).integers(6, config.vocab_size, _LENGTH)

    def answer() -> dict[str, np.ndarray] | None:
        model, drafts = load(own, like, folder)
        both = torch.nn.ModuleList([model, drafts])
        ids = torch.from_numpy(prompt)[None]
        if not is_steady(lambda: torch.cat([x.flatten() for x in drafted(model, drafts, ids).values()]), both):
            return None
        found = {key: x[0].numpy() for key, x in drafted(model, drafts, ids).items()}
        return {"prompt": prompt.astype(np.int32), **found}

    np.savez_compressed(folder / "golden.npz", allow_pickle=False, **first_seed(folder, own.seed, answer))


def add_layers(own: Drafting, like: Any, folder: Path) -> None:
    """Adds the layers to a folder's recipe."""
    path, num_layers = folder / f"model{ENDING}", like.config.num_hidden_layers
    stored = recipe_of(path)
    D, a_norm = like.config.hidden_size, f"model.layers.{own.like}.input_layernorm.weight"
    for i in range(own.count):
        layer = f"mtp.layers.{i}." if own.above else f"model.layers.{num_layers + i}."
        ends, names = ("mtp.", _ABOVE) if own.above else (layer, _IN_LAYER)
        before = f"model.layers.{own.like}."
        stored |= {layer + key.removeprefix(before): said for key, said in stored.items() if key.startswith(before)}
        stored |= {f"{ends}{names[part]}.weight": stored[a_norm] for part in ("embed", "hidden", "norm")}
        join = f"{ends}{names['join']}.weight"
        stored[join] = {**stored[a_norm], "shape": [D, 2 * D]}
        del stored[join]["normal"]
        stored[join] |= own.laws.of(join, (D, 2 * D))
        if not own.above:  # what published checkpoints repeat
            for copy, source in {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}.items():
                stored[f"{layer}{copy}.weight"] = stored[f"{source}.weight"] | {"name": f"{source}.weight"}
    write_recipe(path, own.seed, stored)


def load(own: Drafting, like: Any, folder: Path) -> tuple[Any, MtpModel]:
    """The model, and its layers that predict, in float32."""
    behind = like.config.num_hidden_layers
    type(like)._keys_to_ignore_on_load_unexpected = (
        [r"^mtp\."] if own.above else [rf"model\.layers\.{behind + i}\..*" for i in range(own.count)]
    )
    with tempfile.TemporaryDirectory() as plain:
        make(folder, Path(plain))
        config = type(like.config).from_pretrained(plain)
        for key, value in ({"num_mtp_layers": own.count} | own.told).items():
            setattr(config, key, value)
        config._attn_implementation = "eager"
        config._experts_implementation = "eager"
        model, told = type(like).from_pretrained(plain, config=config, dtype=torch.float32, output_loading_info=True)
        assert not any(told[key] for key in ("missing_keys", "mismatched_keys")), told
        drafts = MtpModel.from_pretrained(model)
    return model.eval(), drafts.eval()


@torch.no_grad()
def drafted(model: Any, drafts: MtpModel, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Hidden states and logits: those of the model, and of each layer given the true tokens."""
    hidden = model(ids, output_hidden_states=True, use_cache=False).hidden_states[-1]
    found, cache = {"hidden": hidden}, MtpCache(config=drafts.config)
    for i in range(len(drafts.layers)):
        positions = torch.arange(1 + i, ids.shape[1])[None]
        hidden = drafts.forward_layer(i, hidden[:, :-1], positions, cache, input_ids=ids[:, 1 + i :])
        found |= {f"draft_{i}": hidden, f"logits_{i}": drafts._project_to_logits(hidden)}
    return found


if __name__ == "__main__":
    run(__doc__, DRAFTING, "tests/goldens/mtp", make_one, keeps=True)
