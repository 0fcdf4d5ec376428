"""Text while it grows: never a part of a character, never a part of a stop string, and in the end all of it."""

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrum_jax.text import TextStream, Tokenizer
from tests.text.samples import KINDS, tokenizer
from tests.text.test_stop_strings import naive

PROFILE = settings(max_examples=150)


def stream_of(kind: str, ids: list[int], **options: object) -> tuple[list[str], TextStream]:
    """The text after each token and after the flush, and the stream."""
    stream = TextStream(tokenizer(kind), **options)
    texts = []
    for token_id in ids:
        stream.push(token_id)
        texts.append(stream.text)
    stream.flush()
    return [*texts, stream.text], stream


def characters(kind: str, ids: list[int]) -> str:
    """The characters whose bytes are all there."""
    own = tokenizer(kind)
    if own.byte_level:
        return b"".join(map(own.piece, ids)).decode(errors="ignore")
    found = [bytes([own.byte_ids[i]]) if i in own.byte_ids else own.decode([i], after=[i]).encode() for i in ids]
    return b"".join(found).decode(errors="ignore").removeprefix(" ")


@pytest.mark.parametrize("kind", KINDS)
@PROFILE
@given(text=st.text(max_size=30))
def test_the_text_of_any_unicode_grows_by_whole_characters_to_all_of_it(kind, text):
    ids = tokenizer(kind).encode(text)
    texts, _ = stream_of(kind, ids)
    assert texts[-1] == tokenizer(kind).decode(ids) == text
    assert all(text.startswith(part) for part in texts)


@pytest.mark.parametrize("kind", KINDS)
@PROFILE
@given(data=st.data(), skip=st.booleans())
def test_the_text_of_any_ids_is_what_decoding_gives_and_never_changes(kind, data, skip):
    ids = data.draw(st.lists(st.integers(0, 340), max_size=25))
    after = data.draw(st.lists(st.integers(0, 340), max_size=25))
    texts, _ = stream_of(kind, ids, skip_special_tokens=skip, after=after)
    whole = tokenizer(kind).decode(ids, skip_special_tokens=skip, after=after)
    assert texts[-1] == whole
    assert all(whole.startswith(part) for part in texts)


def test_byte_level_text_is_emitted_as_soon_as_a_character_is_complete():
    ids = [tokenizer("byte_level").encode(c)[0] for c in "a"]
    emoji = [i for byte in "🙂".encode() for i in range(3, 330) if tokenizer("byte_level").piece(i) == bytes([byte])]
    texts, _ = stream_of("byte_level", [*ids, *emoji, *ids])
    assert texts == ["a", "a", "a", "a", "a🙂", "a🙂a", "a🙂a"]


def test_a_run_of_byte_tokens_is_emitted_when_it_ends():
    own = tokenizer("sentencepiece")
    ids = own.encode("你e", add_special_tokens=False)
    texts, _ = stream_of("sentencepiece", ids)
    assert texts == ["", "", "", "", "你e", "你e"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_id_beyond_the_vocabulary_is_no_text_and_ends_no_run_of_bytes(kind):
    own = tokenizer(kind)
    first, second = (own.encode("é", add_special_tokens=False)[i] for i in (-2, -1)) if own.byte_ids else (3, 131)
    ids = [first, own.vocab_size, second]
    texts, _ = stream_of(kind, ids)
    assert texts[-1] == own.decode(ids) == own.decode([first, second])


def test_what_is_taken_is_the_text_once():
    own = tokenizer("byte_level")
    stream = TextStream(own, stop=["zz"])
    taken = []
    for token_id in own.encode("the end of"):
        stream.push(token_id)
        taken.append(stream.take())
    stream.flush()
    assert "".join([*taken, stream.take()]) == stream.text == "the end of"
    assert stream.take() == ""


@pytest.mark.parametrize("kind", KINDS)
@PROFILE
@given(
    text=st.text("ab é\n", max_size=20),
    stops=st.lists(st.text("ab é\n", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
)
def test_nothing_at_or_beyond_a_stop_string_is_ever_emitted(kind, text, stops, include):
    texts, stream = stream_of(kind, tokenizer(kind).encode(text), stop=stops, include_stop=include)
    stop, allowed = naive(text, stops, 0)
    allowed += stop if stop and include else ""
    assert stream.stopped == stop and texts[-1] == allowed
    assert all(allowed.startswith(part) for part in texts)


def test_push_names_the_stop_string_at_the_token_that_completes_it():
    own = tokenizer("byte_level")
    ids = [own.encode(c)[0] for c in "ab##c"]
    stream = TextStream(own, stop=["##"])
    assert [stream.push(i) for i in ids] == [None, None, None, "##", "##"]
    assert stream.text == "ab"
    assert stream.flush() == "##" and stream.text == "ab"


@pytest.mark.parametrize("kind", KINDS)
@PROFILE
@given(
    text=st.text("ab é", max_size=16),
    stops=st.lists(st.text("ab é", min_size=1, max_size=3), min_size=1, max_size=2),
    min_tokens=st.integers(0, 8),
)
def test_a_stop_string_within_the_first_min_tokens_does_not_count(kind, text, stops, min_tokens):
    ids = tokenizer(kind).encode(text)
    texts, stream = stream_of(kind, ids, stop=stops, min_tokens=min_tokens)
    early = len(characters(kind, ids[:min_tokens]))
    assert (stream.stopped, texts[-1]) == naive(text, stops, early)
    assert all(texts[-1].startswith(part) for part in texts)


def test_a_stop_string_that_only_the_flush_completes_is_found():
    own = tokenizer("sentencepiece")
    ids = own.encode("a你", add_special_tokens=False)[:-1]
    stream = TextStream(own, stop=["\ufffd"])
    assert [stream.push(i) for i in ids] == [None] * len(ids)
    assert stream.flush() == "\ufffd" and stream.text == "a"


@PROFILE
@given(
    text=st.text("aжщ你", min_size=1, max_size=12),
    stop=st.text("aжщ你", min_size=1, max_size=2),
    include=st.booleans(),
    min_tokens=st.integers(0, 6),
)
def test_a_stop_string_in_bytes_ends_the_text_at_the_byte_that_completes_it(text, stop, include, min_tokens):
    own = tokenizer("sentencepiece")
    ids = own.encode(text, add_special_tokens=False)
    lengths = [len(characters("sentencepiece", ids[:end])) for end in range(len(ids) + 1)]
    early = lengths[min(min_tokens, len(ids))]
    ends = [end for end in range(early + 1, len(text) + 1) if text[:end].endswith(stop)]
    stream = TextStream(own, stop=[stop], include_stop=include, min_tokens=min_tokens)
    count = next((number for number, token in enumerate(ids, 1) if stream.push(token)), None)
    assert count == (lengths.index(ends[0]) if ends else None)
    stream.flush()
    assert stream.text == (text[: ends[0] - (0 if include else len(stop))] if ends else text)


def test_a_byte_that_is_no_text_shows_its_whole_run_and_each_after_it_at_once():
    own = tokenizer("sentencepiece")
    first, second = own.encode("ж", add_special_tokens=False)[-2:]
    texts, _ = stream_of("sentencepiece", [first, second, second, first, second, *own.encode("e")[-1:]])
    assert texts == ["", "", "\ufffd" * 3, "\ufffd" * 4, "\ufffd" * 5, "\ufffd" * 5 + "e", "\ufffd" * 5 + "e"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_work_for_a_token_does_not_grow_with_the_text(kind, monkeypatch):
    own = tokenizer(kind)
    decoded = []
    raw_text = own.raw_text
    monkeypatch.setattr(own, "raw_text", lambda ids: decoded.append(len(ids)) or raw_text(ids))
    stream_of(kind, own.encode("the line " * 200), stop=["never"])
    assert max(decoded, default=0) <= 4


@pytest.mark.parametrize("decoder", ["Fuse", "ByteLevel"])
def test_a_long_run_of_replaced_characters_is_shown_as_it_comes_for_little_work(decoder, monkeypatch):
    library = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "\ufffd": 1, "Ð": 2, "¶": 3}, []))
    library.decoder = tokenizers.decoders.Sequence([getattr(tokenizers.decoders, decoder)()])
    own, decoded = Tokenizer(library), []
    raw_text = own.raw_text
    monkeypatch.setattr(own, "raw_text", lambda ids: decoded.append(len(ids)) or raw_text(ids))
    bad = [1] if decoder == "Fuse" else [2]
    for ids in (bad * 500 + [0], bad * 500 + [2, 3, 0] + bad * 9):
        stream, shown = TextStream(own), []
        for token_id in ids:
            stream.push(token_id)
            shown.append(len(stream.text))
        stream.flush()
        assert stream.text == raw_text(ids)
        assert shown[499] == 499
    assert max(decoded) <= 10
