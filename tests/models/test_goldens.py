"""Models of every family against the outputs of the reference implementation, float32, plain causal attention.

A golden's tests stand together, for it is compiled once: that is the module's scope of their names.
"""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import open_checkpoint
from ferrum_jax.models.families import registry
from ferrum_jax.models.layers.attention import ForwardContext
from ferrum_jax.models.spec import ModelSpec
from tests.golden_table import GOLDENS, TABLE, goldens

NAMES = tuple(TABLE)
NEAR_TIE = 1e-4


@functools.cache
def load(name: str):
    """(spec, structure, parameters in float32, golden arrays) of one folder."""
    spec = registry.spec_of(open_checkpoint(GOLDENS / name).config).fitted(214)
    parameters = parameters_of(GOLDENS / name, spec)
    return (
        spec,
        registry.unbind(registry.abstract_model(spec))[0],
        parameters,
        dict(np.load(GOLDENS / name / "golden.npz")),
    )


def parameters_of(folder: pathlib.Path, spec: ModelSpec) -> dict[str, jax.Array]:
    """The parameters of a folder that a spec has."""
    family, targets = registry.family_of(spec.architecture), registry.abstract_parts(spec)[1]
    how = {"rules": family.weight_rules(spec), "harmless": family.harmless(spec)}
    return open_checkpoint(folder).load(**how, targets=targets)


@functools.cache
def executable(name: str):
    """ids [214] -> (every observed value, logits of every position): one shape for all prompts, padding behind."""
    _, graph, _, _ = load(name)

    @jax.jit
    def forward(parameters, ids):
        seen = {}
        model = registry.bind(graph, parameters)
        positions = jnp.arange(len(ids), dtype=jnp.int32)
        hidden = model(ids, positions, ForwardContext(observe=seen.__setitem__))
        return seen, model.logits(hidden)

    return forward


def run(name: str, ids: np.ndarray):
    padded = np.zeros(214, np.int32)
    padded[: len(ids)] = ids
    seen, logits = executable(name)(load(name)[2], padded)
    return {key: np.asarray(x)[: len(ids)] for key, x in seen.items()}, np.asarray(logits)[: len(ids)]


def assert_close(name: str, found: np.ndarray, wanted: np.ndarray) -> None:
    error = np.max(np.abs(found - wanted)) / np.max(np.abs(wanted))
    assert error < 1e-4, f"{name} is off by {error:.1e} of its largest value"


def test_there_is_a_golden_of_every_family_and_a_row_of_the_table_for_each():
    assert sorted(TABLE) == sorted(path.parent.name for path in GOLDENS.glob("*/golden.npz"))
    # those with images: test_text_part.py, test_vision.py
    assert {registry.spec_of(open_checkpoint(GOLDENS / name).config).architecture for name in NAMES} == {
        name for name in registry.FAMILIES if not name.endswith("ForConditionalGeneration")
    }


def slow_but(*names: str) -> list:
    """All goldens, but for these marked as slow."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]


@pytest.mark.parametrize("name", slow_but(*goldens("outputs", "layers", "fast")), scope="module")
def test_every_layer_of_a_golden_model_gives_the_reference_output(name: str):
    _, _, _, golden = load(name)
    for i in golden["observed"]:
        seen, logits = run(name, golden[f"prompt_{i}"])
        assert_close("embed", seen["embed"], golden[f"embed_{i}"])
        for layer, wanted in enumerate(golden[f"layers_{i}"]):
            assert_close(f"layer {layer}", seen[f"layers.{layer}"], wanted)
        assert_close("norm", seen["norm"], golden[f"norm_{i}"])
        assert_close("logits", logits, golden[f"logits_{i}"])


@pytest.mark.parametrize("name", slow_but(*goldens("outputs", "fast")), scope="module")
def test_greedy_tokens_of_a_golden_model_are_the_reference_tokens(name: str):
    """The reference's own tokens go in; each next one must come out, unless its two best logits nearly tie."""
    _, _, _, golden = load(name)
    for i, last in enumerate(golden["last_logits"]):
        prompt, tokens, best = golden[f"prompt_{i}"], golden[f"tokens_{i}"], golden[f"best_{i}"]
        _, logits = run(name, np.concatenate((prompt, tokens[:-1])))
        assert_close(f"logits after prompt {i}", logits[len(prompt) - 1], last)
        after = logits[len(prompt) - 1 :]
        clear = best[:, 0] - best[:, 1] >= NEAR_TIE
        np.testing.assert_array_equal(after.argmax(axis=-1)[clear], tokens[clear])
        assert_close(f"best logits of prompt {i}", np.max(after, axis=-1), best[:, 0])


def sizes(spec: ModelSpec) -> list[int]:
    experts, attention = spec.experts, spec.attention
    moe = [experts.num_experts, experts.num_experts_per_tok, experts.intermediate_size] if experts else []
    mlp = [spec.mlp.intermediate_size] if spec.dense_layers else []
    latent = attention.latent
    ranks = [latent.kv_lora_rank, latent.qk_nope_head_dim, latent.q_lora_rank] if latent is not None else []
    return [
        *(spec.vocab_size, spec.hidden_size, spec.num_hidden_layers, attention.num_attention_heads),
        *(attention.num_key_value_heads, attention.head_dim, *mlp, *moe, *ranks),
    ]


@pytest.mark.parametrize("name", slow_but(*goldens("outputs", "fast")))
def test_a_golden_model_has_a_different_size_in_every_dimension(name: str):
    found = sizes(load(name)[0])
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("name", slow_but(*goldens("outputs", "fast")))
def test_golden_folders_are_small_and_their_outputs_vary(name: str):
    assert sum(path.stat().st_size for path in (GOLDENS / name).iterdir()) < 600_000
    golden = load(name)[3]
    distinct = [len(set(golden[f"tokens_{i}"].tolist())) for i in range(len(golden["last_logits"]))]
    assert min(distinct) >= 10
    assert json.loads((GOLDENS / name / "config.json").read_text())["architectures"]
