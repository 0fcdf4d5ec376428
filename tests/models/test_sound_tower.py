"""The encoder of sounds that have tokens in a prompt against the reference, and how its config and tensors are read."""

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints import open_checkpoint
from ferrum_jax.models.families import registry
from scripts.goldens.weights import make
from tests.marks import slow
from tests.models.sound_goldens import GEMMA, HEARING, QWEN, VOXTRAL, clips_of, encoded, load
from tests.models.test_goldens import assert_close, parameters_of
from tests.rows import rows_beside


# Frames of a call; tiles and windows of padding are not computed.
@pytest.mark.parametrize(
    ("name", "num_frames"),
    [
        *((QWEN, 400), (VOXTRAL, 104), (GEMMA, 144)),
        *(slow(*sizes) for sizes in ((QWEN, 700), (QWEN, 2300), (VOXTRAL, 260), (GEMMA, 1024))),
    ],
)
@pytest.mark.parametrize("prompt", [1, 2])
def test_embeddings_are_the_reference_s_whatever_stands_behind(name, num_frames, prompt):
    found = encoded(clips_of(prompt, name=name), num_frames, name)
    assert_close("tower", np.concatenate(found), load(name)[2][f"tower_{prompt}"])


def test_windows_of_a_sound_give_the_same_bits_alone_and_beside_each_other():
    (clip,) = clips_of(1, name=VOXTRAL)
    both, frames = encoded([clip], 104, VOXTRAL)[0], load(VOXTRAL)[0].sound.chunk_frames
    for window, found in enumerate(np.split(both, 2)):
        part = clip.features[window * frames : (window + 1) * frames]
        alone = dataclasses.replace(clip, features=part, grid=(1, frames, 1), num_frames=frames, num_tokens=len(found))
        np.testing.assert_array_equal(encoded([alone], 104, VOXTRAL)[0], found)


def test_a_clip_s_embeddings_do_not_depend_on_the_others_of_a_call():
    (clip,) = clips_of(1)
    alone = encoded([clip], 700)[0]
    beside = encoded([*clips_of(2), clip], 700)[-1]
    np.testing.assert_allclose(beside, alone, rtol=1e-4, atol=1e-5)


def test_a_sound_that_ends_anywhere_hears_nothing_of_the_one_behind_it():
    (clip,) = clips_of(1, name=GEMMA)
    others = clips_of(2, name=GEMMA)
    alone = encoded([clip], 1024, GEMMA)[0]
    np.testing.assert_allclose(encoded([*others, clip], 1024, GEMMA)[-1], alone, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(encoded([clip, *others], 1024, GEMMA)[0], alone, rtol=1e-4, atol=1e-5)


def test_positions_of_one_window_do_not_hear_those_of_another():
    (clip,) = clips_of(1)
    before = encoded([clip], 400)[0]
    clip.features[250:330] += 1.0
    after, window = encoded([clip], 400)[0], 26
    np.testing.assert_array_equal(after[:window], before[:window])
    assert not np.allclose(after[window:], before[window:], atol=1e-2)


def _config(**changes):
    config = json.loads((HEARING / QWEN / "config.json").read_text())
    return config | changes


def test_qwen_s_own_files_say_the_same(tmp_path):
    """Their config is under `thinker_config` and has sections; their tensors have other names."""
    config = json.loads((HEARING / QWEN / "config.json").read_text())
    sections = {"mrope_interleaved": True, "interleaved": True, "mrope_section": [4, 2, 2], "type": "default"}
    text = dict(config["text_config"])
    text["rope_theta"] = text.pop("rope_parameters")["rope_theta"]
    audio = config["audio_config"] | {"model_type": "qwen3_asr_audio_encoder", "conv_chunksize": 500}
    thinker = {"audio_config": audio, "text_config": text | {"rope_scaling": {"rope_type": "default", **sections}}}
    own = {"architectures": config["architectures"], "model_type": "qwen3_asr", "support_languages": ["English"]}
    ends = {"audio_start_token_id": 152, "audio_end_token_id": 153, "audio_token_id": 150, "dtype": "float32"}
    make(HEARING / QWEN, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({_own_name(name): x for name, x in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(own | {"thinker_config": thinker | ends | {"eos_token_id": 1}}))
    spec, wanted, _ = load()
    assert registry.spec_of(open_checkpoint(tmp_path).config) == spec
    found = parameters_of(tmp_path, spec)
    assert set(found) == set(wanted) and all(np.array_equal(found[name], wanted[name]) for name in wanted)


def _own_name(name: str) -> str:
    name = name.replace("model.multi_modal_projector.linear_", "audio_tower.proj")
    return "thinker." + name.replace("model.language_model.", "model.").replace("model.audio_tower.", "audio_tower.")


def test_a_model_that_is_served_for_text_alone_leaves_the_encoder_out():
    spec, whole, _ = load()
    text = registry.without_tower(spec)
    assert text.sound is None and not any(registry.of_tower(name) for name in registry.abstract_parts(text)[1])
    parameters = parameters_of(HEARING / QWEN, text)
    assert all(np.array_equal(x, whole[parameter]) for parameter, x in parameters.items())


@pytest.mark.parametrize(
    ("of_audio", "said"),
    [
        ({"intermediate_size": 50}, "intermediate_size is 50, hidden_size 24 and max_source_positions 26"),
        ({"max_source_positions": 25}, "and max_source_positions 25; .* none is left"),
        ({"activation_function": "relu"}, 'activation_function is "relu"; of this architecture it must be'),
    ],
)
def test_what_windows_cannot_be_is_refused_by_its_key(of_audio, said):
    config = json.loads((HEARING / VOXTRAL / "config.json").read_text())
    with pytest.raises(ValueError, match=said):
        registry.spec_of(config | {"audio_config": config["audio_config"] | of_audio})


@pytest.mark.parametrize(("of_audio", "said"), rows_beside(__file__)["what an encoder cannot be is refused by its key"])
def test_what_an_encoder_cannot_be_is_refused_by_its_key(of_audio, said):
    with pytest.raises(ValueError, match=said):
        registry.spec_of(_config(audio_config=_config()["audio_config"] | of_audio))
    with pytest.raises(ValueError, match="audio_config is 3; it must be an object"):
        registry.spec_of(_config(audio_config=3))
