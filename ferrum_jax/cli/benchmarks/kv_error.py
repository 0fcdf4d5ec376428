"""The error of a KV dtype: logits over K and V as the pool keeps them, against those over K and V as computed.

Every layer of the second pass rounds, and its error reaches all later layers, as in an engine's step.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ferrum_jax.llm import LLM
from ferrum_jax.models.families.registry import bind
from ferrum_jax.models.layers.attention import ForwardContext, causal_attention
from pallas_kernels.kv_pool import KV_DTYPES, round_trip

TEXT = (
    "The harbour was quiet when the first boats came back. Men in wet coats threw ropes to the boys on the quay, and "
    "the scales in the long shed began to move. A clerk wrote 14 boxes, 9 boxes, 21 boxes into a book with a green "
    "cover, and never looked up. By seven the ice was gone and the lorries stood in a row: two for the market in the "
    "city, one for the smokehouse behind the church, and one, as always, for nobody knew whom. In 1958 there had been "
    "sixty boats; now there were eleven, and most of them had engines that were older than their crews."
)


def measure_kv_error(llm: LLM, token_ids: Sequence[int] | None = None) -> dict[str, Any]:
    """How far logits are moved by the engine's kv_dtype, over every position of a prompt; JSON-ready.

    token_ids: a prompt of the caller's choice, at most max_model_len tokens; None takes a fixed text, or fixed random
    ids where there is no tokenizer. logit_rms is the root mean square of the logits, each position's mean taken
    off; rms_error and max_error are of their differences; same_top_token is the share of positions whose most likely
    token stays.
    """
    ids = _fixed_prompt(llm) if token_ids is None else list(token_ids)
    ids = ids[: llm.max_model_len]
    exact, kept = (prompt_logits(llm, ids, rounds=rounds) for rounds in (False, True))
    error = kept - exact
    return {
        "kv_dtype": llm.loaded.layout.kv_dtype,
        "tokens": len(ids),
        "logit_rms": _rms(exact - exact.mean(axis=1, keepdims=True)),
        "rms_error": _rms(error),
        "max_error": float(np.abs(error).max()),
        "same_top_token": float((kept.argmax(axis=1) == exact.argmax(axis=1)).mean()),
    }


def _fixed_prompt(llm: LLM) -> list[int]:
    if llm.tokenizer is not None:
        return llm.tokenizer.encode(TEXT, add_special_tokens=True)
    return np.random.default_rng(0).integers(0, llm.spec.vocab_size, 128).tolist()


def prompt_logits(llm: LLM, ids: Sequence[int], *, rounds: bool) -> np.ndarray:  # [T, V] float64
    """Logits of every position of one sequence; with `rounds`, over K and V as the engine's pool keeps them."""
    layout = llm.loaded.layout
    dtype = KV_DTYPES[layout.kv_dtype]

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
        if rounds:
            k, v = (round_trip(x, dtype).astype(x.dtype) for x in (k, v))
        return causal_attention(layer, q, k, v, **options)

    def forward(weights: tuple[jax.Array, ...], token_ids: jax.Array) -> jax.Array:
        named = dict(zip(layout.targets, weights, strict=True))
        model = bind(layout.graph, {name: named[name] for name in layout.decoder_targets})
        hidden = model(token_ids, jnp.arange(len(ids), dtype=jnp.int32), ForwardContext(attend=attend))
        return model.logits(hidden)

    return np.asarray(jax.jit(forward)(llm.loaded.weights, jnp.asarray(ids, jnp.int32)), np.float64)


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt((x * x).mean()))
