"""Calls at the end of a thought that was never closed.

Models forget the end of thinking before they call. A call that anything else follows was a musing, and so was one in a
thought that is closed later: both stay reasoning. So a thought is held from a call's mark on until that is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ferrum_jax.inputs.params.message import ToolCall
from ferrum_jax.inputs.params.tools import Tool
from ferrum_jax.text.structured.forms.tool_forms import ToolForm
from ferrum_jax.text.structured.reading.tool_parser import ReadPiece, ToolParser


class UnclosedThought:
    """A thought as it grows; what may be calls is held back."""

    def __init__(self, form: ToolForm, tools: Sequence[Tool]) -> None:
        self._parser = ToolParser(form, tools, is_thought=True)
        self._given = 0  # characters that are certainly thought
        self._calls: list[ToolCall] = []  # behind them

    def push(self, text: str) -> str:
        """The text that is certainly thought."""
        return self._take(self._parser.placed(text))

    def close(self) -> str:
        """The rest, since the thought has ended."""
        return self._up_to(len(self._parser.reader))

    def flush(self) -> tuple[str, list[ToolCall]]:
        """The rest of the thought, and the calls at its end, since no more text will come."""
        thought = self._take(self._parser.placed("", is_last=True))
        return (thought, self._calls) if self._calls else (thought + self.close(), [])

    def _take(self, pieces: Iterable[ReadPiece]) -> str:
        certain = self._given
        for piece, end in pieces:
            if isinstance(piece, ToolCall):
                self._calls.append(piece)
            elif not self._calls or not piece.isspace():
                self._calls, certain = [], end
        return self._up_to(certain)

    def _up_to(self, end: int) -> str:
        text, self._given = self._parser.reader.part(self._given, end), end
        return text
