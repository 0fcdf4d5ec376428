"""Reasoning out of a text, whole or as it grows: what a model thinks goes apart from what it answers."""

from __future__ import annotations

from ferrum_jax.text.structured.forms.reasoning_forms import ReasoningForm
from ferrum_jax.text.structured.forms.tool_forms import spelled
from ferrum_jax.text.structured.reading.text_reader import Marks


class ReasoningParser:
    """Takes a text apart into reasoning and answer.

    A text thinks where its prompt opened the thinking, or where it begins with the mark that does.
    """

    def __init__(self, form: ReasoningForm, *, is_open: bool = False) -> None:
        """is_open: whether the prompt ends within the thinking."""
        self._begins = sorted(spelled(form.begin), key=len, reverse=True)
        self._ends = Marks(spelled(form.end))
        self._held = ""
        self._thinks: bool | None = True if is_open else None  # None: the text has not said so yet

    @property
    def thinks(self) -> bool:
        """Whether the thinking has begun and has not ended."""
        return self._thinks is True

    def push(self, text: str) -> tuple[str, str]:
        """The reasoning and the answer that this piece has made certain."""
        return self._advance(text, is_last=False)

    def flush(self) -> tuple[str, str]:
        """The rest, since no more text will come."""
        return self._advance("", is_last=True)

    def _advance(self, text: str, *, is_last: bool) -> tuple[str, str]:
        self._held += text
        if self._thinks is None and not self._open(is_last):
            return "", ""
        if not self._thinks:
            answer, self._held = self._held, ""
            return "", answer
        if (found := self._ends.pattern.search(self._held)) is not None:
            before, after = self._held[: found.start()], self._held[found.end() :]
            self._thinks, self._held = False, ""
            return before, after
        kept = 0 if is_last else self._ends.kept(self._held)
        certain, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return certain, ""

    def _open(self, is_last: bool) -> bool:
        """Whether it is known by now if the text begins with thinking."""
        rest = self._held.lstrip()
        for begin in self._begins:
            if rest.startswith(begin):
                self._thinks, self._held = True, rest[len(begin) :]
                return True
            if not is_last and begin.startswith(rest):
                return False
        self._thinks = False
        return True


def is_open_after(form: ReasoningForm, prompt_end: str) -> bool:
    """Whether a prompt that ends like this leaves the thinking open."""
    begin, end = (max(prompt_end.rfind(each) for each in spelled(marks)) for marks in (form.begin, form.end))
    return begin > end
