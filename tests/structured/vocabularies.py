"""The vocabulary of the demo model for tests, and texts drawn from a grammar."""

import functools
import random
from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np

from ferrum_jax.text.structured.matcher import Matcher
from ferrum_jax.text.structured.vocabulary import Vocabulary
from ferrum_jax.text.tokenizer import Tokenizer
from tests.support import ROOT

END = 0
T = TypeVar("T")


@functools.cache
def demo_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.load(ROOT / "checkpoints" / "demo")
    assert tokenizer is not None
    return tokenizer


@functools.cache
def demo_vocabulary() -> Vocabulary:
    """The vocabulary of a model with more ids than its tokenizer has tokens."""
    return Vocabulary(demo_tokenizer(), vocab_size=demo_tokenizer().vocab_size + 70, end_ids=frozenset({END}))


def allowed(matcher: Matcher) -> list[int]:
    """The tokens that may come next."""
    mask = demo_vocabulary().blank_masks(1)
    assert matcher.fill(mask[0]), matcher.error
    return np.flatnonzero(np.unpackbits(mask[0].view(np.uint8), bitorder="little")).tolist()


def fed(take: Callable[[str], Iterable[T]], text: str, rng: random.Random) -> list[T]:
    """What is taken of a text that comes in pieces of 1 to 9 characters."""
    found: list[T] = []
    while text:
        size = rng.randint(1, 9)
        found += take(text[:size])
        text = text[size:]
    return found


def drawn(matcher: Matcher, rng: random.Random, *, most: int = 300) -> list[int] | None:
    """Tokens drawn at random up to an end token, which comes as soon as it may; None where `most` do not get there."""
    tokens: list[int] = []
    while len(tokens) < most:
        choices = allowed(matcher)
        token = END if END in choices else rng.choice(choices)
        assert matcher.advance(token)
        if token == END:
            return tokens
        tokens.append(token)
    return None
