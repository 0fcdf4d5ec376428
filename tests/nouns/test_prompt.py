"""Prompts: every form is taken, and what is not understood is refused by name."""

import pytest

from ferrum_jax.inputs.prompt import MediaSpan, single, take_apart
from ferrum_jax.openai.contents import messages_of
from tests.rows import rows_beside

ROWS = rows_beside(__file__)

SPAN = MediaSpan(kind="image", digest=b"cat", start=1, length=2)
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("content", ["text", [1, 2], MESSAGES])
def test_content_stands_alone_or_under_its_name(content):
    name = {"text": "prompt", 1: "prompt_token_ids"}.get(content if isinstance(content, str) else 1, "")
    name = "messages" if content is MESSAGES else name
    assert take_apart(content).content == take_apart({name: content}).content == content
    parts = take_apart({name: content, "cache_salt": "a", "media": [SPAN]})
    assert (parts.cache_salt, parts.media) == ("a", (SPAN,))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        *ROWS["what is not understood is refused by name"],
        ({"prompt": "a", "messages": MESSAGES}, "the prompt has prompt and messages; give exactly one"),
        ({"prompt": "a", "media": [b"cat"]}, r"media is \[b'cat'\]; it must be a list of MediaSpan"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(prompt, message):
    with pytest.raises(ValueError, match=message):
        take_apart(prompt)


@pytest.mark.parametrize(("field", "value", "message"), ROWS["a span that means nothing is refused"])
def test_a_span_that_means_nothing_is_refused(field, value, message):
    fields = {"kind": "image", "digest": b"cat", "start": 1, "length": 2} | {field: value}
    with pytest.raises(ValueError, match=message):
        MediaSpan(**fields)


def test_a_detail_that_would_change_nothing_is_refused():
    def asked(**more):
        return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:", **more}}]}]

    for more in ({}, {"detail": None}, {"detail": "auto"}, {"detail": "high"}):
        assert take_apart(asked(**more)).images == ("data:",)
        assert "detail" not in str(messages_of("messages", asked(**more)))
    for refuse in (take_apart, lambda messages: messages_of("messages", messages)):
        for detail in ("low", "tiny", 3):
            with pytest.raises(ValueError, match=f"an image's detail is {detail!r}; .* leave detail out"):
                refuse(asked(detail=detail))


def test_one_prompt_is_told_from_many():
    assert all(single(p) for p in ("a", [1, 2], MESSAGES, {"prompt": "a"}))
    assert not any(single(p) for p in (["a"], [[1, 2]], [MESSAGES], [{"prompt": "a"}, {"prompt": "b"}], []))
