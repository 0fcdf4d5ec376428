"""Models that see images against the reference: tower, merged embeddings, every layer, greedy tokens."""

import itertools
import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ferrum_jax.inputs.prompt import PlacedImage, rope_positions, whole_chunk
from ferrum_jax.models.families import registry
from ferrum_jax.runtime.media_encoders.image_slots import encoder_sizes
from tests.marks import slow
from tests.models.test_goldens import NEAR_TIE, assert_close, parameters_of
from tests.models.vision_goldens import (
    CAUSAL_GEMMA4,
    COUNT_PLACES,
    GEMMA3,
    GEMMA4,
    GLM,
    IMAGE,
    MISTRAL3,
    QWEN,
    VISION,
    encoded,
    load,
    outputs,
    patches_of,
    placed,
)
from tests.rows import rows_beside

ROWS = rows_beside(__file__)

FAST = (QWEN[0], GLM[0], GEMMA3, GEMMA4, MISTRAL3)  # a tower of each kind
SLOW = (*QWEN[1:], *GLM[1:])
NAMES = (*FAST, *map(slow, (*SLOW, CAUSAL_GEMMA4)))
# Patches of a call; 300 is not a multiple of a tile. None: those of the prompt, for this tower is never padded.
CALLS = [
    *((name, 300) for name in (QWEN[0], GLM[0], MISTRAL3)),
    *(
        slow(name, size)
        for name, size in itertools.product((*QWEN, *GLM, MISTRAL3), (512, 300))
        if size > 300 or name in SLOW
    ),
    (GEMMA3, None),
    (GEMMA4, 153),
    slow(CAUSAL_GEMMA4, 153),
]
ALONE = [
    *((name, 300) for name in (QWEN[0], GLM[0], MISTRAL3)),
    (GEMMA3, None),
    (GEMMA4, 153),
    *(slow(name, 300) for name in SLOW),
]


@pytest.mark.parametrize(("name", "num_patches"), CALLS)
@pytest.mark.parametrize("prompt", [1, 2])
def test_the_tower_gives_the_reference_embeddings_whatever_stands_behind(name, prompt, num_patches):
    spec, _, golden = load(name)
    pixels, wanted = golden[f"patches_{prompt}"], golden[f"tower_{prompt}"]
    num_patches = num_patches or len(pixels)
    found = encoded(name, patches_of(name, golden[f"grids_{prompt}"], pixels, num_patches))
    assert len(found) == num_patches // spec.vision.merge**2 and np.isfinite(found).all()
    assert_close("tower", found[: len(wanted)], wanted)


@pytest.mark.parametrize(("name", "num_patches"), ALONE)
def test_an_image_s_embeddings_do_not_depend_on_the_others_of_a_call(name, num_patches):
    spec, _, golden = load(name)
    grids, pixels, merged = golden["grids_2"], golden["patches_2"], spec.vision.merge**2
    whole = encoded(name, patches_of(name, grids, pixels, num_patches or len(pixels)))
    start = 0
    for grid in grids:
        end = start + int(grid.prod())
        alone = encoded(name, patches_of(name, grid[None], pixels[start:end], num_patches or end - start))
        part = slice(start // merged, end // merged)
        np.testing.assert_allclose(whole[part], alone[: (end - start) // merged], rtol=1e-4, atol=1e-5)
        start = end


@pytest.mark.parametrize("name", COUNT_PLACES)
@pytest.mark.parametrize("prompt", [0, 1, 2])
def test_positions_are_the_reference_s(name, prompt):
    golden = load(name)[2]
    length = len(golden[f"prompt_{prompt}"])
    wanted = golden.get(f"rope_{prompt}", np.broadcast_to(np.arange(length), (3, length)))
    np.testing.assert_array_equal(rope_positions(placed(name, prompt), 0, length), wanted)
    np.testing.assert_array_equal(rope_positions(placed(name, prompt), 7, length - 3), wanted[:, 7:-3])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prompt", [0, 1, 2])
def test_every_layer_gives_the_reference_output(name, prompt):
    golden = load(name)[2]
    seen, logits = outputs(name, prompt)
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
    _, logits = outputs(name, prompt, tokens[:-1])
    after = logits[-len(tokens) :, :IMAGE]
    clear = best[:, 0] - best[:, 1] >= NEAR_TIE
    np.testing.assert_array_equal(after.argmax(axis=-1)[clear], tokens[clear])
    assert_close("best logits", after.max(axis=-1), best[:, 0])


@pytest.mark.parametrize("name", NAMES[:-1])
def test_a_model_that_is_served_for_text_alone_leaves_the_tower_out(name):
    spec, whole, _ = load(name)
    assert spec.vision.embedding_size == (3 if "_vl" in name else 1) * spec.hidden_size
    text = registry.without_tower(spec)
    assert not any(registry.of_tower(name) for name in registry.abstract_parts(text)[1])
    parameters = parameters_of(VISION / name, text)
    assert all(np.array_equal(x, whole[parameter]) for parameter, x in parameters.items())


def test_tensors_of_the_tower_have_one_of_two_prefixes_and_the_same_values(tmp_path):
    """As later versions of the reference write them, and as published ones are named."""
    spec, wanted, _ = load(GEMMA3)
    (tmp_path / "config.json").write_text((VISION / GEMMA3 / "config.json").read_text())
    tensors = load_file(VISION / GEMMA3 / "model.safetensors")
    published = {name.replace("vision_tower.", "vision_tower.vision_model."): x for name, x in tensors.items()}
    assert set(published) != set(tensors)
    save_file(published, tmp_path / "model.safetensors")
    found = parameters_of(tmp_path, spec)
    assert set(found) == set(wanted)
    assert all(np.array_equal(x, wanted[name]) for name, x in found.items())


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        *ROWS["a tower that cannot be is refused by name"],
        (GEMMA3, {"image_size": 44}, "mm_tokens_per_image is 16, and vision_config has image_size 44 and patch_size 4"),
        (GEMMA3, {"image_size": 50}, "image_size 50"),
        (GEMMA3, {"num_attention_heads": 7}, "hidden_size is 40 and num_heads 7"),
        (GEMMA3, {"layer_norm_eps": 1e-5}, "layer_norm_eps"),
        (GEMMA4, {"num_attention_heads": 7, "num_key_value_heads": 7}, "hidden_size is 40 and num_heads 7"),
        (GEMMA4, {"num_key_value_heads": 1}, "num_key_value_heads 1 and head_dim 8"),
        (GEMMA4, {"head_dim": 16}, "head_dim must be hidden_size / num_attention_heads, 8"),
        (GEMMA4, {"rms_norm_eps": 1e-5}, "rms_norm_eps"),
        (GEMMA4, {"rope_parameters": {"rope_type": "yarn"}}, 'rope_type is "yarn"'),
        (MISTRAL3, {"head_dim": 16}, "head_dim is 16; it must be hidden_size / num_attention_heads, 8"),
        (MISTRAL3, {"num_attention_heads": 7}, "hidden_size is 40 and num_heads 7"),
        (MISTRAL3, {"rope_parameters": {"rope_type": "yarn"}}, 'rope_type is "yarn"'),
        *((name, {"window_size": 112}, "window_size") for name in ("qwen3_vl", "glm4v", GEMMA3, GEMMA4, MISTRAL3)),
    ],
)
def test_a_tower_that_cannot_be_is_refused_by_name(name, change, said):
    config = json.loads((VISION / name / "config.json").read_text())
    config["vision_config"] |= change
    with pytest.raises(ValueError, match=said):
        registry.spec_of(config)


@pytest.mark.parametrize(
    ("change", "said"), ROWS["what joins a tower to its text model is refused where it is another"]
)
def test_what_joins_a_tower_to_its_text_model_is_refused_where_it_is_another(change, said):
    config = json.loads((VISION / MISTRAL3 / "config.json").read_text())
    config |= change | {"text_config": config["text_config"] | change.get("text_config", {})}
    with pytest.raises(ValueError, match=said):
        registry.spec_of(config)


def test_tokens_between_rows_of_an_image_have_no_embedding():
    image = PlacedImage(start=10, length=11, digest=b"-", grid=(1, 6, 6), columns=3)
    assert image.num_embeddings == 9
    places = [0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8]
    assert image.embeddings_of(0, 11).tolist() == places and image.embeddings_of(2, 9).tolist() == places[2:9]
    run = PlacedImage(start=10, length=9, digest=b"-", grid=(1, 6, 6))
    assert run.num_embeddings == 9 and run.embeddings_of(2, 5).tolist() == [2, 3, 4]


def test_an_image_is_seen_whole_only_in_windows_where_the_config_says_so():
    whole, causal = (load(name)[0].vision for name in (GEMMA4, CAUSAL_GEMMA4))
    assert (whole.sees_both_ways, whole.sees_whole(7), whole.sees_whole(None)) == (True, True, False)
    assert (causal.sees_both_ways, causal.sees_whole(7), causal.sees_whole(None)) == (False, False, False)


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


def test_calls_hold_whole_squares_of_patches():
    assert encoder_sizes(2520, 9, invariant=False) == (261, 1044, 2565)
    assert encoder_sizes(54, 9, invariant=True) == (54,)
