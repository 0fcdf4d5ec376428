"""AsyncLLM.transcribe: tasks get what LLM.transcribe gives."""

from __future__ import annotations

import asyncio

import pytest

from ferrum_jax.serve.async_llm import AsyncLLM
from tests.transcribing.heard import CASES, how_of, sound_of, text_of, whisper_llm


def test_tasks_side_by_side_get_what_a_program_gets():
    async def ask() -> list:
        inner = whisper_llm()
        inner.calls.drop()
        llm = AsyncLLM.over(inner)
        try:
            found = await asyncio.gather(*(llm.transcribe(sound_of(case), **how_of(case)) for case in CASES))
            with pytest.raises(ValueError, match="the sound is not a file of a kind"):
                await llm.transcribe(b"no sound")
            with pytest.raises(TypeError, match="tempo"):
                await llm.transcribe(b"no sound", tempo=2)
        finally:
            llm.close()
        return found

    assert [each.text for each in asyncio.run(ask())] == [text_of(case) for case in CASES]
