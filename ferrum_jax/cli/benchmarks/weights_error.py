"""The error of quantised weights: every form that can be made, against the same weights in float32, on one text.

Logits are those of whole windows of the text, computed at once; no pool and no cache takes part.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.memory import take
from checkpoints.stored_weight import weight_of
from ferrum_jax.cli.benchmarks.kv_error import TEXT
from ferrum_jax.llm import LLM
from ferrum_jax.models.families.registry import abstract_model, bind, quantised_spec, unbind
from ferrum_jax.models.layers.attention import ForwardContext
from ferrum_jax.models.spec import ModelSpec

MADE = ("int8", "int8-a16", "fp8", "fp8-a16", "int4-g32", "int4-g128", "mxfp4")


def measure_weights_error(llm: LLM, text: str | None = None) -> dict[str, Any]:
    """Bits per byte, and the divergence from float32, of the model's weights in each form that fits them; JSON-ready.

    text: what is predicted, in windows of max_model_len tokens; None takes a fixed one. kl_nats is the mean over
    positions of KL(float32 || form); same_top_token the share of positions whose most likely token stays; increase that
    of bits per byte, as a share; of_float32_bytes what the quantised layers take of what they took. Raises ValueError
    for weights that are quantised already, on a mesh, and without a tokenizer.
    """
    if llm.config.mesh_shape.size > 1:
        raise ValueError(f"mesh is {llm.config.mesh!r}; what quantising changes is measured on one device")
    if not isinstance(llm.spec, ModelSpec):
        raise ValueError("this model is an encoder, whose weights are not quantised; name one that generates")
    made = [quantised_spec(llm.spec, form) for form in MADE]
    if llm.tokenizer is None:
        raise ValueError("the model has no tokenizer, so a text has no tokens; put its tokenizer.json beside it")
    text = TEXT if text is None else text
    ids = llm.tokenizer.encode(text, add_special_tokens=True)
    windows = [ids[start : start + llm.max_model_len] for start in range(0, len(ids), llm.max_model_len)]
    arrays = dict(zip(llm.loaded.layout.targets, llm.loaded.weights, strict=True))
    exact = _Predicted.of(llm.spec, arrays, windows)
    bits = exact.bits / len(text.encode())
    return {
        "text_bytes": len(text.encode()),
        "tokens": len(ids),
        "bits_per_byte": round(bits, 6),
        "forms": [_measure(*each, arrays, windows, exact) for each in zip(MADE, made, strict=True)],
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Predicted:
    """log_probs: of every token at every position of all windows but their first, [positions, V] float64. bits: of the
    tokens that stand there. bytes: what each weight takes on the device."""

    log_probs: np.ndarray
    bits: float
    bytes: dict[str, int]

    @classmethod
    def of(cls, spec: ModelSpec, arrays: Mapping[str, Any], windows: Sequence[Sequence[int]]) -> _Predicted:
        """The predictions of these arrays; arrays with a form in the spec are quantised first."""
        graph, targets = unbind(abstract_model(spec))
        weights = take(arrays, targets, cast=True)

        @jax.jit
        def forward(weights: dict[str, jax.Array], ids: jax.Array) -> jax.Array:
            model = bind(graph, weights)
            hidden = model(ids, jnp.arange(ids.shape[0], dtype=jnp.int32), ForwardContext())
            return jax.nn.log_softmax(model.logits(hidden).astype(jnp.float32), axis=-1)

        found = [np.asarray(forward(weights, jnp.asarray(ids, jnp.int32)), np.float64)[:-1] for ids in windows]
        log_probs = np.concatenate(found)
        said = np.concatenate([np.asarray(ids[1:], np.int64) for ids in windows])
        sizes: dict[str, int] = {}
        for name, array in weights.items():
            sizes[weight_of(name)] = sizes.get(weight_of(name), 0) + array.nbytes
        bits = -float(log_probs[np.arange(len(said)), said].sum()) / math.log(2)
        return cls(log_probs=log_probs, bits=bits, bytes=sizes)


def _measure(
    form: str, made: ModelSpec, arrays: Mapping[str, Any], windows: Sequence[Sequence[int]], exact: _Predicted
) -> dict[str, Any]:
    """One form's line; why there is none, where groups do not divide the weights."""
    try:
        own = _Predicted.of(made, arrays, windows)
    except ValueError as error:
        return {"form": form, "refused": str(error)}
    names = [name for name, _ in made.forms]
    kl = np.sum(np.exp(exact.log_probs) * (exact.log_probs - own.log_probs), axis=-1)
    return {
        "form": form,
        "increase": round(own.bits / exact.bits - 1, 6),
        "kl_nats": float(kl.mean()),
        "same_top_token": float((own.log_probs.argmax(axis=1) == exact.log_probs.argmax(axis=1)).mean()),
        "of_float32_bytes": round(sum(own.bytes[n] for n in names) / sum(exact.bytes[n] for n in names), 4),
    }
