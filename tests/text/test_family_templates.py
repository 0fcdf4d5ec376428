"""Templates with the constructs of each family give the reference's text; scripts/make_chat_goldens.py recorded it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ferrum_jax.text import ChatTemplate

FOLDER = Path(__file__).parent / "templates"
RECORDED = json.loads((FOLDER / "recorded.json").read_text(encoding="utf-8"))
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))


@pytest.mark.parametrize("name", NAMES)
def test_a_familys_template_gives_the_reference_text_or_refuses(name: str):
    template = ChatTemplate((FOLDER / f"{name}.jinja").read_text(encoding="utf-8"), RECORDED["tokens"])
    assert set(RECORDED["texts"][name]) == set(RECORDED["conversations"])
    for conversation, expected in RECORDED["texts"][name].items():
        options = {"date_string": "2 Feb 2022", **RECORDED["conversations"][conversation]}
        messages = options.pop("messages")
        if expected is None:
            with pytest.raises(ValueError, match="the chat template refuses these messages"):
                template.render(messages, **options)
        else:
            assert template.render(messages, **options) == expected, conversation
