"""tunix's rollout over an engine: a trainer's own model samples and scores through it as it would by itself."""

import types

import numpy as np
import pytest

from ferrum_jax import LLM, EngineConfig
from tests.rows import rows_beside
from tests.support import COMPILED, ROOT

pytestmark = pytest.mark.tunix

SIZES = {"num_layers": 2, "vocab_size": 4096, "embed_dim": 64, "hidden_dim": 96, "num_heads": 4, "head_dim": 16}
# rope_theta is the one that tunix's attention computes with, whatever its config says
CONFIG = rows_beside(__file__)["config"]
PROMPTS = ["def add(a, b):", "import os\n"]


def trainer(seed: int):
    """tunix's model with random weights; its MLPs begin as zeros."""
    import jax
    from flax import nnx
    from tunix.models.qwen3 import model as qwen3

    config = qwen3.ModelConfig(**SIZES, num_kv_heads=2, norm_eps=1e-6, rope_theta=1_000_000, use_tied_embedding=True)
    found = qwen3.Qwen3(config, rngs=nnx.Rngs(seed))
    graph, state = nnx.split(found)
    leaves, tree = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    drawn = [x + 0.1 * jax.random.normal(key, x.shape, x.dtype) for x, key in zip(leaves, keys, strict=True)]
    return nnx.merge(graph, jax.tree.unflatten(tree, drawn))


def own_logprobs(model, ids: list[int]) -> np.ndarray:
    """Log-probabilities of the trainer's forward, of ids from the second on."""
    import jax
    import jax.numpy as jnp

    tokens = jnp.asarray([ids])
    mask = jnp.tril(jnp.ones((1, len(ids), len(ids)), bool))
    with jax.numpy_dtype_promotion("standard"):  # tunix mixes dtypes
        logits, _ = model(tokens, jnp.arange(len(ids))[None], None, mask)
    found = jax.nn.log_softmax(logits[0, :-1], axis=-1)
    return np.asarray(found)[np.arange(len(ids) - 1), ids[1:]]


@pytest.fixture(scope="module")
def rollout():
    pytest.importorskip("tunix")
    from flax import nnx

    from ferrum_jax.integrations.tunix import FerrumJaxRollout
    from ferrum_jax.models.families.decoder import Decoder
    from ferrum_jax.models.families.registry import spec_of

    sizes = EngineConfig(
        max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, compilation_cache_dir=str(COMPILED)
    )
    model = Decoder(spec_of(CONFIG), rngs=nnx.Rngs(0))
    llm = LLM.from_model(model, sizes, tokenizer=str(ROOT / "checkpoints" / "demo"))
    return FerrumJaxRollout(trainer(1), types.SimpleNamespace(pad_id=lambda: 0), llm=llm)


def test_it_samples_with_the_trainers_weights_and_log_probabilities(rollout):
    from tunix.rl.rollout.base_rollout import RolloutConfig

    config = RolloutConfig(max_tokens_to_generate=8, temperature=1.0, max_prompt_length=16, return_logprobs=True)
    for model in (rollout.model(), trainer(2)):
        rollout.update_params(model)
        found = rollout.generate(PROMPTS, config)
        assert found.left_padded_prompt_tokens.shape == (2, 16) and len(found.text) == 2
        again = rollout.get_per_token_logps(found.left_padded_prompt_tokens, _padded(found.tokens))
        for row, tokens, logprobs, scored in zip(
            found.left_padded_prompt_tokens, found.tokens, found.logprobs, np.asarray(again), strict=True
        ):
            prompt = row[np.flatnonzero(row)[0] :].tolist()
            wanted = own_logprobs(model, [*prompt, *tokens.tolist()])[len(prompt) - 1 :]
            np.testing.assert_allclose(logprobs, wanted, atol=1e-4)
            np.testing.assert_allclose(scored[: len(wanted)], wanted, atol=1e-4)


def test_what_the_table_does_not_know_is_named(rollout):
    with pytest.raises(ValueError, match=r"no pattern .* extra\.w"):
        rollout.update_params({"extra": {"w": np.zeros(2)}})
    with pytest.raises(ValueError, match="filter_types"):
        rollout.update_params({}, filter_types=(int,))


def _padded(rows: list[np.ndarray]) -> np.ndarray:
    found = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for row, tokens in zip(found, rows, strict=True):
        row[: len(tokens)] = tokens
    return found
