"""Calls at the end of a thought that was never closed.

Models forget the end of thinking before they call. A call that anything else follows was a musing, and so was one in a
thought that is closed later: both stay reasoning. So a thought is held from a call's mark on until that is known.
"""

from __future__ import annotations

from collections.abc import Sequence

from ferrum_jax.asked.message import ToolCall
from ferrum_jax.asked.tools import Tool
from ferrum_jax.structured.forms.tool_forms import ToolForm
from ferrum_jax.structured.reading.text_reader import overlap
from ferrum_jax.structured.reading.tool_parser import ToolParser


class UnclosedThought:
    """A thought as it grows; what may be calls is held back."""

    def __init__(self, form: ToolForm, tools: Sequence[Tool]) -> None:
        self._form, self._tools = form, tools
        self._marks = ToolParser(form).marks
        self._held = ""
        self._parser: ToolParser | None = None  # reads what is held, which begins with a mark
        self._calls: list[ToolCall] = []

    def push(self, text: str) -> str:
        """The text that is certainly thought."""
        self._held += text
        if self._parser is None or not self._reads_calls(self._parser.push(text)):
            return self._advance(is_last=False)
        return ""

    def close(self) -> str:
        """The rest, since the thought has ended."""
        thought, self._held, self._parser = self._held, "", None
        return thought

    def flush(self) -> tuple[str, list[ToolCall]]:
        """The rest of the thought, and the calls at its end, since no more text will come."""
        thought = ""
        if self._parser is None or not self._reads_calls(self._parser.flush()):
            thought = self._advance(is_last=True)
        return (thought, self._calls) if self._parser is not None else (thought + self.close(), [])

    def _advance(self, *, is_last: bool) -> str:
        """What is thought up to the next mark from which on nothing but calls stands."""
        thought = "" if self._parser is None else self._without_mark()
        while True:
            places = [place for mark in self._marks if (place := self._held.find(mark)) >= 0]
            kept = max((overlap(self._held, mark) for mark in self._marks), default=0)
            place = min(places) if places else len(self._held) - (0 if is_last else kept)
            thought, self._held = thought + self._held[:place], self._held[place:]
            if not places:
                return thought
            self._parser, self._calls = ToolParser(self._form, self._tools), []
            pieces = self._parser.push(self._held) + (self._parser.flush() if is_last else [])
            if self._reads_calls(pieces):
                return thought
            thought += self._without_mark()

    def _reads_calls(self, pieces: Sequence[str | ToolCall]) -> bool:
        """Whether these are calls, and white space between them."""
        self._calls += [piece for piece in pieces if isinstance(piece, ToolCall)]
        return not any(isinstance(piece, str) and not piece.isspace() for piece in pieces)

    def _without_mark(self) -> str:
        """The first character of what is held, where no call begins."""
        self._parser = None
        first, self._held = self._held[:1], self._held[1:]
        return first
