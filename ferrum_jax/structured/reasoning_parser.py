"""Reasoning out of a text, whole or as it grows: what a model thinks goes apart from what it answers."""

from __future__ import annotations

from ferrum_jax.structured.tool_forms import ReasoningForm


class ReasoningParser:
    """Takes a text apart into reasoning and answer; the answer of harmony is the text of its last channel as well.

    A text thinks where its prompt opened the thinking, or where it begins with the mark that does.
    """

    def __init__(self, form: ReasoningForm, *, is_open: bool = False) -> None:
        """is_open: whether the prompt ends within the thinking."""
        self._form = form
        self._held = ""
        self._thinks: bool | None = True if is_open else None  # None: the text has not said so yet

    def push(self, text: str) -> tuple[str, str]:
        """What has become certain with this piece: of the reasoning, and of the answer."""
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
        before, end, after = self._held.partition(self._form.end)
        if end:
            self._thinks, self._held = False, ""
            return before, after
        kept = 0 if is_last else overlap(self._held, self._form.end)
        certain, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return certain, ""

    def _open(self, is_last: bool) -> bool:
        """Whether it is known by now if the text begins with thinking."""
        rest = self._held.lstrip()
        if rest.startswith(self._form.begin):
            self._thinks, self._held = True, rest[len(self._form.begin) :]
        elif is_last or not self._form.begin.startswith(rest):
            self._thinks = False
        return self._thinks is not None


def without_reasoning(form: ReasoningForm, text: str, *, is_open: bool = False) -> tuple[str, str]:
    """The reasoning of a whole text, and its answer."""
    parser = ReasoningParser(form, is_open=is_open)
    pieces = (parser.push(text), parser.flush())
    return "".join(reasoning for reasoning, _ in pieces), "".join(answer for _, answer in pieces)


def is_open_after(form: ReasoningForm, prompt_end: str) -> bool:
    """Whether a prompt, of which this is the end, leaves the thinking open."""
    return prompt_end.rfind(form.begin) > prompt_end.rfind(form.end)


def overlap(text: str, mark: str) -> int:
    """The length of the longest end of text that is a beginning of the mark and not all of it."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
