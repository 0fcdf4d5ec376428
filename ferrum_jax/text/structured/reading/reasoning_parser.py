"""Reasoning out of a text, whole or as it grows: what a model thinks goes apart from what it answers."""

from collections.abc import Iterable, Sequence

from ferrum_jax.inputs.params.message import ToolCall
from ferrum_jax.inputs.params.tools import Tool
from ferrum_jax.text.structured.forms.reasoning_forms import ReasoningForm
from ferrum_jax.text.structured.forms.tool_forms import ToolForm, spelled
from ferrum_jax.text.structured.reading.text_reader import Marks
from ferrum_jax.text.structured.reading.tool_parser import ReadPiece, ToolParser


class UnclosedThought:
    """A thought as it grows, held from a call's mark on: models forget the end of thinking before they call.

    A call with text behind it was a musing, and so was one in a thought that is closed later: both stay reasoning.
    """

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


class FramedAnswer:
    """Drops the first mark where the answer begins with it, then the first end mark, and a new line inside each."""

    def __init__(self, begin: str, end: str) -> None:
        self._begin, self._end = begin, end
        self._ends = Marks(("\n" + end, end))
        self._held = ""
        self._is_within: bool | None = None  # None: the answer has not said so yet
        self._begins = False  # nothing came after the first mark

    def push(self, text: str) -> str:
        """The part of the answer that has become certain."""
        return self._advance(text, is_last=False)

    def flush(self) -> str:
        """The rest, since no more text will come."""
        return self._advance("", is_last=True)

    def _advance(self, text: str, *, is_last: bool) -> str:
        self._held += text
        if self._is_within is None:
            rest = self._held.lstrip()
            if not is_last and self._begin != rest and self._begin.startswith(rest):
                return ""
            if rest.startswith(self._begin):
                self._is_within, self._begins, self._held = True, True, rest[len(self._begin) :]
            else:
                self._is_within = False
        if self._begins and self._held:
            self._begins, self._held = False, self._held.removeprefix("\n")
        found = self._ends.pattern.search(self._held) if self._is_within else None
        if found is not None:
            self._is_within = False
            before, self._held = self._held[: found.start()], self._held[found.end() :]
            return before + self._advance("", is_last=is_last)
        kept = 0 if is_last or not self._is_within else self._ends.kept(self._held)
        certain, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return certain


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
