"""Stop strings are found where a naive search finds them, and a character costs the same however many there are."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrum_jax.sampling_params import MAX_STOP_CHARACTERS, MAX_STOPS
from ferrum_jax.text.stream import StopStrings, TextStream, stop_strings

PROFILE = settings(max_examples=400)
LETTERS = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=6)


class Pieces:
    """A byte-level tokenizer whose tokens are these texts."""

    byte_level, byte_ids = True, {}

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    def piece(self, token_id: int) -> bytes:
        return self._texts[token_id].encode()

    def visible(self, ids, skips: bool):
        return ids


def naive(text: str, stops: list[str], early: int) -> tuple[str | None, str]:
    """The stop string that ends a text, counted from its first character behind `early`, and the text before it."""
    for end in range(early + 1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            stop = max(done, key=len)
            return stop, text[: end - len(stop)]
    return None, text


def longest_beginning(text: str, stops: list[str]) -> int:
    """How many characters at the end of a text begin a stop string that is not complete."""
    ends = [text[len(text) - n :] for n in range(len(text) + 1)]
    return max(len(end) for end in ends if not end or any(s != end and s.startswith(end) for s in stops))


@PROFILE
@given(tokens=st.lists(st.text("abc", max_size=4), max_size=10), stops=STOPS, min_tokens=st.integers(0, 4))
def test_a_text_ends_and_is_held_back_as_a_naive_search_says(tokens, stops, min_tokens):
    stream = TextStream(Pieces(tokens), stop=stops, min_tokens=min_tokens)  # type: ignore[arg-type]
    for token_id in range(len(tokens)):
        so_far = "".join(tokens[: token_id + 1])
        stop, before = naive(so_far, stops, len("".join(tokens[:min_tokens])))
        assert stream.push(token_id) == stop
        if stop is not None:
            assert stream.text == before
            return
        assert stream.text == so_far[: len(so_far) - longest_beginning(so_far, stops)]
    assert stream.flush() is None and stream.text == "".join(tokens)


class CountingEdges(dict):
    """The edges of a state; all of an automaton count in one list."""

    def __init__(self, edges: dict, counts: list) -> None:
        super().__init__(edges)
        self._counts = counts

    def get(self, character):  # type: ignore[override]
        self._counts.append(character)
        return super().get(character)


def steps(stops: list[str], text: str) -> int:
    """How many edges are looked for while a text is read."""
    counts: list[str] = []
    search = StopStrings(stops)
    search._next = [CountingEdges(edges, counts) for edges in search._next]
    state = 0
    for character in text:
        state = search.step(state, character)
    return len(counts)


@pytest.mark.parametrize("text", ["a" * 2000, "ab" * 1000, "xyz" * 700])
def test_a_character_takes_two_steps_at_most_however_many_and_long_the_stops_are(text):
    beginnings = ["a" * length + "b" * (MAX_STOPS - length) + "!" for length in range(MAX_STOPS)]
    longest = ["a" * (MAX_STOP_CHARACTERS - 1) + chr(0x100 + place) for place in range(MAX_STOPS)]
    for stops in (["!"], beginnings, longest):
        assert len(text) <= steps(stops, text) <= 2 * len(text)


def test_equal_stops_have_one_automaton():
    assert stop_strings(("a", "b")) is stop_strings(("a", "b"))
