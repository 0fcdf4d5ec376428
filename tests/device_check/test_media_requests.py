"""A model that sees or hears is checked with media of its own tower: of every tower, and found wrong where it is."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from ferrum_jax.cli.device_check import engine_check
from ferrum_jax.cli.device_check.engine_check import EngineOrder, check_engine
from ferrum_jax.cli.device_check.media_requests import _request, _seen, media_requests, with_room
from ferrum_jax.config import EngineConfig
from ferrum_jax.engine.image_intake import ImageLimits, placed_images
from ferrum_jax.inputs.prompt import MediaSpan
from ferrum_jax.models.families import registry
from ferrum_jax.models.spec import VisionSpec
from ferrum_jax.sampling_params import SamplingParams
from scripts.published import PUBLISHED
from tests.support import COMPILED, GOLDENS

SMALL_CONFIG = EngineConfig(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=256)
ENGINES = ("hearing/whisper", "hearing/qwen3_asr", "vision/qwen3_vl", "whisper_words")
PARAMS = SamplingParams(max_tokens=4)


def with_towers() -> dict[str, Any]:
    """A published spec of each tower, by the tower's name."""
    specs = (registry.spec_of(config) for config, _ in PUBLISHED.values())
    return {tower.tower: spec for spec in specs for tower in spec.towers}


def limits_of(spec: Any, config: EngineConfig, kind: str) -> ImageLimits:
    """What an engine of this config has room for. kind: of a medium."""
    tower = spec.sound if kind == "audio" else spec.vision
    return ImageLimits(
        noun="image" if isinstance(tower, VisionSpec) else "sound",
        max_tokens=config.max_image_tokens,
        max_patches=config.max_image_patches,
        merge=tower.merge,
        chunk=tower.chunk,
        grid=tower.grid_of_all,
        sees_both_ways=tower.sees_both_ways,
        max_whole_tokens=config.max_num_batched_tokens - config.max_num_seqs + 1,
        breaks_rows=tower.breaks_rows,
        is_beside=bool(spec.cross_layers),
        ends_anywhere=kind == "audio" and not tower.window_chunks,
    )


@pytest.mark.parametrize("name", ["qwen", "siglip", "gemma4", "pixtral", "glm4v", "whisper", "qwen_sound", "voxtral"])
def test_media_of_every_tower_are_such_as_its_engine_takes(name):
    spec = with_towers()[name]
    config = with_room(SMALL_CONFIG, spec)
    requests = _seen(spec, PARAMS)
    assert len(requests) == 3 * len(spec.towers)
    for ids, start, medium, _ in requests:
        span = MediaSpan(kind=medium.kind, digest=medium.digest, start=start, length=max(medium.num_tokens, 1))
        ((placed,), _) = placed_images([medium], [span], limits_of(spec, config, medium.kind))
        assert placed.end <= len(ids) and len(ids) + 32 <= config.max_model_len <= spec.max_position_embeddings
        assert max(ids) < spec.vocab_size and np.isfinite(medium.patches).all()


def test_a_model_of_text_alone_is_given_no_media():
    spec = registry.spec_of(PUBLISHED["Qwen3-0.6B"][0])
    assert with_room(SMALL_CONFIG, spec) is SMALL_CONFIG and _seen(spec, PARAMS) == []


def test_the_same_media_under_another_salt_count_as_others():
    request = _seen(with_towers()["whisper"], PARAMS)[0]
    one, other = (_request(0, *request, salt).options for salt in (0, 1))
    assert one.media[0].digest != other.media[0].digest
    np.testing.assert_array_equal(one.images[0].patches, other.images[0].patches)


def lines_of(model: str) -> dict[str, dict[str, Any]]:
    """The lines of the runs of a check, by name."""
    sent: list[dict[str, Any]] = []
    order = EngineOrder(
        model=str(GOLDENS / model), prompts=((5, 6, 7),), full=False, compilation_cache_dir=str(COMPILED)
    )
    check_engine(order, sent.append)
    return {line["run"]: line for line in sent if "run" in line}


@pytest.mark.slow
@pytest.mark.parametrize("model", ENGINES)
def test_media_together_alone_and_from_the_cache_have_the_same_tokens(model):
    found = lines_of(model)
    of_text = set() if "whisper" in model else {"xla", "xla, from the cache"}
    assert set(found) == of_text | {"xla, media", "xla, media alone", "xla, media, from the cache"}
    assert all(line["problem"] is None for line in found.values())
    assert found["xla, media alone"]["equal"] == found["xla, media"]["of"] == 3
    assert found["xla, media alone"]["beside"] == found["xla, media, from the cache"]["beside"] == "xla, media"


@pytest.mark.slow
def test_a_tower_that_gives_something_else_alone_is_found(monkeypatch):
    def brighter(llm, params, *, salt=0):
        return [_brighter(request, salt) for request in media_requests(llm, params, salt=salt)]

    monkeypatch.setattr(engine_check, "media_requests", brighter)
    found = lines_of("hearing/whisper")
    assert found["xla, media"]["problem"] is None and found["xla, media, from the cache"]["problem"] is None
    assert "is expected" in found["xla, media alone"]["problem"]


def _brighter(request, salt):
    (medium,) = request.options.images
    other = dataclasses.replace(medium, patches=medium.patches * (1 + 4 * salt))
    return request._replace(options=dataclasses.replace(request.options, images=[other]))
