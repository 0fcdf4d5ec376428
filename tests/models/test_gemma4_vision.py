"""Gemma 4 with images against the reference: tower, merged embeddings, every layer, greedy tokens."""

from __future__ import annotations

import functools
import json

import jax
import numpy as np
import pytest

from checkpoints import open_checkpoint
from ferrum_jax.layers.attention import ForwardContext, causal_attention
from ferrum_jax.layers.image_tokens import ImageTokens
from ferrum_jax.models import registry
from ferrum_jax.models.vision_tower import ImagePatches
from ferrum_jax.prompt import PlacedImage, seen_ends
from ferrum_jax.towers.image_slots import encoder_sizes
from tests.models.test_goldens import NEAR_TIE, assert_close
from tests.models.test_vision import FIELDS, IMAGE, VISION, bound, load

WHOLE, CAUSAL = "gemma4_vision", "gemma4_vision_causal"
NAMES = [WHOLE, pytest.param(CAUSAL, marks=pytest.mark.slow)]
LONGEST = 160  # one shape for all prompts, padding behind
MERGE = 3
MOST = 153  # patches of a call, some of them padding


def patches_of(pixels: np.ndarray, grids: np.ndarray) -> ImagePatches:
    """MOST patches of images, each by squares of MERGE x MERGE, and of padding."""
    more = MOST - len(pixels)
    parts = []
    for segment, (_, rows, columns) in enumerate(grids.tolist(), 1):
        top, left, y, x = np.indices((rows // MERGE, columns // MERGE, MERGE, MERGE)).reshape(4, -1)
        same = np.ones_like(x)
        parts.append([top * MERGE + y, left * MERGE + x, rows * same, columns * same, segment * same])
    places = np.pad(np.concatenate(parts, axis=1), ((0, 0), (0, more)))
    return ImagePatches(pixels=np.pad(pixels, ((0, more), (0, 0))), **dict(zip(FIELDS[1:], places, strict=True)))


@functools.cache
def tower(name: str):
    spec, parameters, _ = load(name)
    graph, names = registry.abstract_tower(spec)

    @jax.jit
    def encode(weights, *arrays):
        return bound(graph, weights, "vision.")(ImagePatches(**dict(zip(FIELDS, arrays, strict=True))))

    return lambda patches: np.asarray(
        encode({n: parameters[n] for n in names}, *(getattr(patches, field) for field in FIELDS))
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prompt", [1, 2])
def test_the_tower_gives_the_reference_embeddings_whatever_stands_behind(name, prompt):
    golden = load(name)[2]
    wanted = golden[f"tower_{prompt}"]
    found = tower(name)(patches_of(golden[f"patches_{prompt}"], golden[f"grids_{prompt}"]))
    assert_close("tower", found[: len(wanted)], wanted)


def test_an_image_s_embeddings_do_not_depend_on_the_others_of_a_call():
    golden = load(WHOLE)[2]
    grids, pixels = golden["grids_2"], golden["patches_2"]
    whole, at = tower(WHOLE)(patches_of(pixels, grids)), 0
    for grid in grids:
        end = at + int(np.prod(grid))
        alone = tower(WHOLE)(patches_of(pixels[at:end], grid[None]))
        np.testing.assert_allclose(whole[at // 9 : end // 9], alone[: (end - at) // 9], rtol=1e-4, atol=1e-5)
        at = end


@functools.cache
def text(name: str):
    spec, parameters, _ = load(name)
    graph, _ = registry.abstract_parts(spec)
    weights = {name: x for name, x in parameters.items() if not registry.of_tower(name)}

    @jax.jit
    def forward(weights, ids, images, ends):
        def attend(layer, q, k, v, *, window=None, **how):
            whole = spec.vision.sees_whole(window)
            return causal_attention(layer, q, k, v, window=window, seen_ends=ends if whole else None, **how)

        seen = {}
        model = registry.bind(graph, weights)
        images = ImageTokens(are_here=ids == IMAGE, embeddings=images)
        context = ForwardContext(attend=attend, observe=seen.__setitem__, images=images)
        return seen, model.logits(model(ids, np.arange(LONGEST), context))

    def run(ids, images, ends):
        rest = LONGEST - len(ids)
        seen, logits = forward(
            weights, np.pad(ids, (0, rest)), np.pad(images, ((0, rest), (0, 0))), np.pad(ends, (0, rest))
        )
        return {key: np.asarray(x)[: len(ids)] for key, x in seen.items()}, np.asarray(logits)[: len(ids)]

    return run


def case(name: str, prompt: int, more: np.ndarray | None = None):
    """(ids, embeddings of images, where what each token sees ends) of a golden prompt and the tokens after it."""
    spec, _, golden = load(name)
    ids = golden[f"prompt_{prompt}"]
    starts = np.flatnonzero(ids == 152) + 1
    placed = tuple(
        PlacedImage(
            start=int(start), length=rows * columns // 9, digest=b"-", grid=(1, rows, columns), sees_both_ways=True
        )
        for start, (_, rows, columns) in zip(starts, golden[f"grids_{prompt}"].tolist(), strict=True)
    )
    ids = ids if more is None else np.concatenate([ids, more])
    images = np.zeros((len(ids), spec.vision.embedding_size), np.float32)
    if f"tower_{prompt}" in golden:
        images[ids == IMAGE] = golden[f"tower_{prompt}"]
    return ids, images, seen_ends(placed, 0, len(ids))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prompt", [0, 1, 2])
def test_every_layer_gives_the_reference_output(name, prompt):
    golden = load(name)[2]
    seen, logits = text(name)(*case(name, prompt))
    assert_close("embed", seen["embed"], golden[f"embed_{prompt}"])
    for layer, wanted in enumerate(golden[f"layers_{prompt}"]):
        assert_close(f"layer {layer}", seen[f"layers.{layer}"], wanted)
    assert_close("norm", seen["norm"], golden[f"norm_{prompt}"])
    assert_close("logits", logits, golden[f"logits_{prompt}"])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prompt", [0, 1, 2])
def test_greedy_tokens_are_the_reference_s(name, prompt):
    golden = load(name)[2]
    tokens, best = golden[f"tokens_{prompt}"], golden[f"best_{prompt}"]
    _, logits = text(name)(*case(name, prompt, tokens[:-1]))
    after = logits[-len(tokens) :, :IMAGE]
    clear = best[:, 0] - best[:, 1] >= NEAR_TIE
    np.testing.assert_array_equal(after.argmax(axis=-1)[clear], tokens[clear])
    assert_close("best logits", after.max(axis=-1), best[:, 0])


def test_an_image_is_seen_whole_only_in_windows_where_the_config_says_so():
    whole, causal = (load(name)[0].vision for name in (WHOLE, CAUSAL))
    assert (whole.sees_both_ways, whole.sees_whole(7), whole.sees_whole(None)) == (True, True, False)
    assert (causal.sees_both_ways, causal.sees_whole(7), causal.sees_whole(None)) == (False, False, False)


def test_a_model_that_is_served_for_text_alone_leaves_the_tower_out():
    spec, whole, _ = load(WHOLE)
    text_alone = registry.without_tower(spec)
    family, targets = registry.family_of(spec.architecture), registry.abstract_parts(text_alone)[1]
    assert not any(registry.of_tower(name) for name in targets)
    parameters = open_checkpoint(VISION / WHOLE).load(
        rules=family.weight_rules(text_alone), harmless=family.harmless(text_alone), targets=targets
    )
    assert all(np.array_equal(x, whole[name]) for name, x in parameters.items())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_attention_heads": 7, "num_key_value_heads": 7}, "hidden_size is 40 and num_heads 7"),
        ({"num_key_value_heads": 1}, "num_key_value_heads 1 and head_dim 8"),
        ({"head_dim": 16}, "head_dim must be hidden_size / num_attention_heads, 8"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps"),
        ({"rope_parameters": {"rope_type": "yarn"}}, 'rope_type is "yarn"'),
        ({"window_size": 112}, "window_size"),
    ],
)
def test_a_tower_that_cannot_be_is_refused_by_name(change, said):
    config = json.loads((VISION / WHOLE / "config.json").read_text())
    config["vision_config"] |= change
    with pytest.raises(ValueError, match=said):
        registry.spec_of(config)


def test_calls_hold_whole_squares_of_patches():
    assert encoder_sizes(2520, 9, invariant=False) == (261, 1044, 2565)
    assert encoder_sizes(54, 9, invariant=True) == (54,)
