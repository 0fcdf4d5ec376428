"""A tiny Whisper, opened once."""

import pytest

from tests.transcribing.heard import whisper_llm


@pytest.fixture(scope="session")
def llm():
    return whisper_llm()
