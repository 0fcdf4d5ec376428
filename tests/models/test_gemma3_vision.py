"""Gemma 3 with images against the reference: tower, merged embeddings, every layer, greedy tokens."""

from __future__ import annotations

import functools
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints import open_checkpoint
from ferrum_jax.layers.attention import ForwardContext, causal_attention
from ferrum_jax.layers.image_tokens import ImageTokens
from ferrum_jax.models import registry
from ferrum_jax.models.vision_tower import ImagePatches
from ferrum_jax.prompt import PlacedImage, seen_ends, whole_chunk
from tests.models.test_goldens import NEAR_TIE, assert_close
from tests.models.test_vision import FIELDS, IMAGE, VISION, bound, load

NAME = "gemma3_vision"
LONGEST = 160  # one shape for all prompts, padding behind
SIDE, TOKENS = 12, 16  # patches of a side of an image, and its tokens


def patches_of(pixels: np.ndarray) -> ImagePatches:
    """Patches of whole images, each row by row."""
    count = len(pixels) // SIDE**2
    rows, columns = np.indices((SIDE, SIDE)).reshape(2, -1)
    rows, columns = np.tile(rows, count), np.tile(columns, count)
    side = np.full_like(rows, SIDE)
    segments = np.repeat(np.arange(1, count + 1), SIDE**2)
    return ImagePatches(pixels=pixels, rows=rows, columns=columns, heights=side, widths=side, segments=segments)


@functools.cache
def tower():
    spec, parameters, _ = load(NAME)
    graph, names = registry.abstract_tower(spec)

    @jax.jit
    def encode(weights, *arrays):
        return bound(graph, weights, "vision.")(ImagePatches(**dict(zip(FIELDS, arrays, strict=True))))

    return lambda patches: np.asarray(
        encode({n: parameters[n] for n in names}, *(getattr(patches, field) for field in FIELDS))
    )


@pytest.mark.parametrize("prompt", [1, 2])
def test_the_tower_gives_the_reference_embeddings(prompt):
    golden = load(NAME)[2]
    assert_close("tower", tower()(patches_of(golden[f"patches_{prompt}"])), golden[f"tower_{prompt}"])


def test_an_image_s_embeddings_do_not_depend_on_the_others_of_a_call():
    pixels = load(NAME)[2]["patches_2"]
    whole = tower()(patches_of(pixels))
    for index in range(3):
        alone = tower()(patches_of(pixels[index * SIDE**2 : (index + 1) * SIDE**2]))
        np.testing.assert_allclose(whole[index * TOKENS : (index + 1) * TOKENS], alone, rtol=1e-4, atol=1e-5)


@functools.cache
def text():
    spec, parameters, _ = load(NAME)
    graph, _ = registry.abstract_parts(spec)
    weights = {name: x for name, x in parameters.items() if not registry.of_tower(name)}

    @jax.jit
    def forward(weights, ids, images, ends):
        seen = {}
        model = registry.bind(graph, weights)
        context = ForwardContext(
            attend=functools.partial(causal_attention, seen_ends=ends),
            observe=seen.__setitem__,
            images=ImageTokens(are_here=ids == IMAGE, embeddings=images),
        )
        return seen, model.logits(model(ids, np.arange(LONGEST), context))

    def run(ids, images, ends):
        rest = LONGEST - len(ids)
        seen, logits = forward(
            weights, np.pad(ids, (0, rest)), np.pad(images, ((0, rest), (0, 0))), np.pad(ends, (0, rest))
        )
        return {key: np.asarray(x)[: len(ids)] for key, x in seen.items()}, np.asarray(logits)[: len(ids)]

    return run


def placed(prompt: int) -> tuple[PlacedImage, ...]:
    """The images of a golden prompt."""
    starts = np.flatnonzero(load(NAME)[2][f"prompt_{prompt}"] == 152) + 1
    return tuple(
        PlacedImage(start=int(start), length=TOKENS, digest=b"-", grid=(1, SIDE, SIDE), sees_both_ways=True)
        for start in starts
    )


def case(prompt: int, more: np.ndarray | None = None):
    """(ids, embeddings of images, where what each token sees ends) of a golden prompt and the tokens after it."""
    spec, _, golden = load(NAME)
    ids = golden[f"prompt_{prompt}"]
    ids = ids if more is None else np.concatenate([ids, more])
    assert spec.vision is not None
    images = np.zeros((len(ids), spec.vision.embedding_size), np.float32)
    if f"tower_{prompt}" in golden:
        images[ids == IMAGE] = golden[f"tower_{prompt}"]
    return ids, images, seen_ends(placed(prompt), 0, len(ids))


@pytest.mark.parametrize("prompt", [0, 1, 2])
def test_every_layer_gives_the_reference_output(prompt):
    golden = load(NAME)[2]
    seen, logits = text()(*case(prompt))
    assert_close("embed", seen["embed"], golden[f"embed_{prompt}"])
    for layer, wanted in enumerate(golden[f"layers_{prompt}"]):
        assert_close(f"layer {layer}", seen[f"layers.{layer}"], wanted)
    assert_close("norm", seen["norm"], golden[f"norm_{prompt}"])
    assert_close("logits", logits, golden[f"logits_{prompt}"])


@pytest.mark.parametrize("prompt", [0, 1, 2])
def test_greedy_tokens_are_the_reference_s(prompt):
    golden = load(NAME)[2]
    tokens, best = golden[f"tokens_{prompt}"], golden[f"best_{prompt}"]
    _, logits = text()(*case(prompt, tokens[:-1]))
    after = logits[-len(tokens) :, :IMAGE]
    clear = best[:, 0] - best[:, 1] >= NEAR_TIE
    np.testing.assert_array_equal(after.argmax(axis=-1)[clear], tokens[clear])
    assert_close("best logits", after.max(axis=-1), best[:, 0])


def test_tensors_of_the_tower_have_one_of_two_prefixes_and_the_same_values(tmp_path):
    """As later versions of the reference write them, and as published ones are named."""
    spec, wanted, _ = load(NAME)
    (tmp_path / "config.json").write_text((VISION / NAME / "config.json").read_text())
    tensors = load_file(VISION / NAME / "model.safetensors")
    published = {name.replace("vision_tower.", "vision_tower.vision_model."): x for name, x in tensors.items()}
    assert set(published) != set(tensors)
    save_file(published, tmp_path / "model.safetensors")
    family, targets = registry.family_of(spec.architecture), registry.abstract_parts(spec)[1]
    found = open_checkpoint(tmp_path).load(
        rules=family.weight_rules(spec), harmless=family.harmless(spec), targets=targets
    )
    assert set(found) == set(wanted)
    assert all(np.array_equal(x, wanted[name]) for name, x in found.items())


def test_a_model_that_is_served_for_text_alone_leaves_the_tower_out():
    spec, whole, _ = load(NAME)
    text_alone = registry.without_tower(spec)
    family, targets = registry.family_of(spec.architecture), registry.abstract_parts(text_alone)[1]
    assert not any(registry.of_tower(name) for name in targets)
    parameters = open_checkpoint(VISION / NAME).load(
        rules=family.weight_rules(text_alone), harmless=family.harmless(text_alone), targets=targets
    )
    assert all(np.array_equal(x, whole[name]) for name, x in parameters.items())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"image_size": 44}, "mm_tokens_per_image is 16, and vision_config has image_size 44 and patch_size 4"),
        ({"image_size": 50}, "image_size 50"),
        ({"num_attention_heads": 7}, "hidden_size is 40 and num_heads 7"),
        ({"layer_norm_eps": 1e-5}, "layer_norm_eps"),
        ({"window_size": 112}, "window_size"),
    ],
)
def test_a_tower_that_cannot_be_is_refused_by_name(change, said):
    config = json.loads((VISION / NAME / "config.json").read_text())
    config["vision_config"] |= change
    with pytest.raises(ValueError, match=said):
        registry.spec_of(config)


@pytest.mark.parametrize(
    ("start", "count", "most", "found"),
    [
        (0, 10, 10, 10),  # before the image
        (0, 12, 40, 10),  # up to it
        (0, 26, 26, 26),  # to its end
        (10, 5, 16, 16),  # all of it
        (10, 5, 15, 0),  # too few
        (12, 3, 14, 14),  # what a hit left of it
        (26, 4, 4, 4),
    ],
)
def test_a_chunk_ends_inside_no_image_whose_tokens_see_each_other(start, count, most, found):
    images = (PlacedImage(start=10, length=16, digest=b"-", grid=(1, 12, 12), sees_both_ways=True),)
    assert whole_chunk(images, start, count, most) == found
    one_way = (PlacedImage(start=10, length=16, digest=b"-", grid=(1, 12, 12)),)
    assert whole_chunk(one_way, start, count, most) == count
