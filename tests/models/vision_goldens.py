"""Golden models that see images: their prompts and patches, and what the tower and the model for text make of them."""

import functools

import jax
import numpy as np

from checkpoints import open_checkpoint
from ferrum_jax.inputs.prompt import PlacedImage, rope_positions, seen_ends
from ferrum_jax.models.families import registry
from ferrum_jax.models.families.vision_tower import ImagePatches
from ferrum_jax.models.layers.attention import ForwardContext, ImageTokens, causal_attention
from tests.golden_table import GOLDENS
from tests.models.test_goldens import parameters_of

VISION = GOLDENS / "vision"
QWEN = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5_vision", "qwen3_5_moe_vision")
GLM = ("glm4v", "glm4v_moe")
COUNT_PLACES = (*QWEN, *GLM)  # rotary positions count rows and columns
GEMMA3, GEMMA4, CAUSAL_GEMMA4 = "gemma3_vision", "gemma4_vision", "gemma4_vision_causal"
MISTRAL3 = "mistral3_vision"
IMAGE, IMAGE_BEGINS = 150, 152
LONGEST = {True: 128, False: 160}  # one shape for all prompts, padding behind; Qwen's are shorter


@functools.cache
def load(name: str):
    """(spec, parameters, golden arrays)."""
    spec = registry.spec_of(open_checkpoint(VISION / name).config)
    return spec, parameters_of(VISION / name, spec), dict(np.load(VISION / name / "golden.npz"))


def patches_of(name: str, grids: np.ndarray, pixels: np.ndarray, num_patches: int) -> ImagePatches:
    """Patches of images, one image after the other, each by the squares that its tower merges; padding behind."""
    side, places = load(name)[0].vision.neighbours, [np.zeros((5, 0), np.int32)]
    for segment, (_, rows, columns) in enumerate(grids.tolist(), 1):
        top, left, y, x = np.indices((rows // side, columns // side, side, side)).reshape(4, -1)
        same = np.ones_like(x)
        places.append(np.stack([top * side + y, left * side + x, rows * same, columns * same, segment * same]))
    joined, more = np.concatenate(places, axis=1).astype(np.int32), num_patches - len(pixels)
    rows, columns, heights, widths, segments = np.pad(joined, ((0, 0), (0, more)))
    pixels = np.pad(pixels, ((0, more), (0, 0)))
    return ImagePatches(pixels=pixels, rows=rows, columns=columns, heights=heights, widths=widths, segments=segments)


@functools.partial(jax.jit, static_argnums=0)
def _encode(graph, weights, arrays):
    """Dense models and those of experts have one tower, and so one executable."""
    tower = registry.bind(graph, {name.removeprefix("vision."): x for name, x in weights.items()})
    return tower(ImagePatches(**arrays))


def encoded(name: str, patches: ImagePatches) -> np.ndarray:
    """The tower's embeddings."""
    spec, parameters, _ = load(name)
    graph, names = registry.abstract_tower(spec.vision)
    return np.asarray(_encode(graph, {n: parameters[n] for n in names}, vars(patches)))


def placed(name: str, prompt: int) -> tuple[PlacedImage, ...]:
    """The images of a golden prompt."""
    spec, _, golden = load(name)
    merge, both_ways, breaks = spec.vision.merge, spec.vision.sees_both_ways, spec.vision.breaks_rows
    starts = np.flatnonzero(golden[f"prompt_{prompt}"] == IMAGE_BEGINS) + 1
    return tuple(
        PlacedImage(
            start=int(start),
            length=rows * columns // merge**2 + (rows // merge - 1) * breaks,
            digest=b"-",
            grid=(frames, rows, columns),
            rope_grid=(frames, rows // merge, columns // merge) if name in COUNT_PLACES else None,
            sees_both_ways=both_ways,
            columns=columns // merge * breaks,
        )
        for start, (frames, rows, columns) in zip(starts, golden[f"grids_{prompt}"].tolist(), strict=True)
    )


@functools.cache
def _forward(name: str):
    spec, _, _ = load(name)
    graph, _ = registry.abstract_parts(spec)

    @jax.jit
    def forward(weights, ids, positions, images, ends):
        def attend(layer, q, k, v, *, window=None, **how):
            whole = spec.vision.sees_whole(window)
            return causal_attention(layer, q, k, v, window=window, seen_ends=ends if whole else None, **how)

        seen = {}
        model = registry.bind(graph, weights)
        images = ImageTokens(are_here=ids == IMAGE, embeddings=images)
        context = ForwardContext(attend=attend, observe=seen.__setitem__, images=images)
        return seen, model.logits(model(ids, positions, context))

    return forward


def outputs(name: str, prompt: int, more: np.ndarray | None = None):
    """(every observed value, logits) of a golden prompt and the tokens after it, with the golden embeddings of images.

    Images of a Gemma are seen whole where its config says so; positions of some count rows and columns.
    """
    spec, parameters, golden = load(name)
    ids = golden[f"prompt_{prompt}"]
    ids = ids if more is None else np.concatenate([ids, more])
    images = np.zeros((len(ids), spec.vision.embedding_size), np.float32)
    if f"tower_{prompt}" in golden:
        images[ids == IMAGE] = golden[f"tower_{prompt}"]
    there, rest = placed(name, prompt), LONGEST[name in COUNT_PLACES] - len(ids)
    positions = rope_positions(there, 0, len(ids)) if name in COUNT_PLACES else np.arange(len(ids), dtype=np.int32)
    weights = {name: x for name, x in parameters.items() if not registry.of_tower(name)}
    seen, logits = _forward(name)(
        weights,
        np.pad(ids, (0, rest)),
        np.pad(positions, (*[(0, 0)] * (positions.ndim - 1), (0, rest))),
        np.pad(images, ((0, rest), (0, 0))),
        np.pad(seen_ends(there, 0, len(ids)), (0, rest)),
    )
    return {key: np.asarray(x)[: len(ids)] for key, x in seen.items()}, np.asarray(logits)[: len(ids)]
