"""Vocabulary: a checkpoint's tokenizer as grammars see it: the bytes of each token, and which tokens end a text."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from ferrum_jax.core.outputs import NO_STRUCTURE
from ferrum_jax.io.ints import ceil_div
from ferrum_jax.io.paths import install_command
from ferrum_jax.text.structured.trial_process import TrialProcess
from ferrum_jax.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance


def require_llguidance() -> Any:
    """The library. Raises ValueError naming the extra where it is not installed."""
    try:
        import llguidance
        import llguidance.gbnf_to_lark
    except ImportError as error:
        raise ValueError(f"{NO_STRUCTURE}; install it: {install_command('structured')}") from error
    return llguidance


class Vocabulary:
    """The tokens of a model: those that its tokenizer has, then ids that are padding, which no grammar allows.

    words: int32 words of a mask, one bit for each of the model's ids. specials: texts of special tokens, and their ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, end_ids: frozenset[int]) -> None:
        """vocab_size: the model's. end_ids: its end tokens, which a grammar allows where the text may end.

        Raises ValueError for a model without end tokens, and for a tokenizer whose tokens have no bytes of their own.
        """
        require_llguidance()
        if not end_ids:
            raise ValueError("the model has no end token, so a text with a grammar could not end; give it one")
        self.size = tokenizer.vocab_size
        self.words = ceil_div(vocab_size, 32)
        self.end_ids = end_ids
        self.specials = tokenizer.special_texts()
        self._tokenizer = tokenizer
        if self.size > vocab_size:
            raise ValueError(f"the tokenizer has {self.size} tokens, and the model only {vocab_size}")
        self.trials = TrialProcess(self)  # reads the tokenizer while this process does
        self._read(tokenizer.to_json())

    def _read(self, content: str) -> None:
        """content: of tokenizer.json."""
        library = require_llguidance()
        try:
            self.tokens: llguidance.LLTokenizer = library.LLTokenizer(
                content, n_vocab=self.size, eos_token=sorted(self.end_ids)
            )
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"structured output cannot use this tokenizer: {error}") from error

    def __getstate__(self) -> tuple[int, int, frozenset[int], str]:
        """The values that a trial process makes its own vocabulary from."""
        return self.size, self.words, self.end_ids, self._tokenizer.to_json()

    def __setstate__(self, state: tuple[int, int, frozenset[int], str]) -> None:
        self.size, self.words, self.end_ids, content = state
        self._read(content)

    @functools.cached_property
    def executor(self) -> llguidance.LLExecutor:
        """Threads in which matchers make their masks."""
        return require_llguidance().LLExecutor()

    @property
    def own_words(self) -> int:
        """Words of a mask that the tokenizer's tokens need."""
        return ceil_div(self.size, 32)

    def blank_masks(self, count: int) -> np.ndarray:
        """[count, words] int32 that allow nothing."""
        return np.zeros((count, self.words), np.int32)
