"""The model of spoken digits that is shipped reads the sound that is shipped, spoken by a voice that was held out."""

from __future__ import annotations

from ferrum_jax import LLM, EngineConfig
from tests.support import COMPILED, ROOT

SOUND = ROOT / "scripts/demo_sounds/call.flac"
SAID = "Please call 020 7946 0958."


def test_the_shipped_model_reads_the_shipped_sound_and_again_from_what_it_keeps():
    config = EngineConfig(dtype="float32", max_num_seqs=4, compilation_cache_dir=str(COMPILED))
    llm = LLM(str(ROOT / "checkpoints/demo_digits"), config)
    for _ in range(2):
        (found,) = llm.transcribe(SOUND)
        assert (found.text, found.language) == (SAID, "en")
    (timed,) = llm.transcribe(SOUND, timestamps="segment")
    (segment,) = timed.segments
    assert segment.text.strip() == SAID
    assert 0 <= segment.start_s < segment.end_s <= timed.duration_s + 0.1
    (told,) = llm.transcribe(SOUND, language="en", prompt="seven " * 200)
    assert told.duration_s == timed.duration_s, "of a long text before, half of what the decoder reads is left"
