"""Tool calls out of a text in a model's form, whole or as it grows; what cannot be parsed stays text.

`ToolParser` is fed pieces of text and gives pieces back: text that is certainly no call, and calls that are whole. How
the text is cut into pieces changes nothing of what comes out, and each character is read a few times at most.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ferrum_jax.inputs.params.message import ToolCall
from ferrum_jax.inputs.params.tools import Tool
from ferrum_jax.text.structured.forms.tool_forms import ToolForm, spelled, tool_form_named
from ferrum_jax.text.structured.reading.call_syntax import CallSyntax
from ferrum_jax.text.structured.reading.text_reader import Marks, NoCall, Reading, TextReader

MAX_CALLS = 1024  # of a text; what follows them is text
_NO_MARKS = Marks(())


class ReadPiece(NamedTuple):
    """A text or a call, and where the text that was fed goes on after it."""

    what: str | ToolCall
    end: int


class ToolParser:
    """Takes a text apart into text and calls."""

    def __init__(self, form: ToolForm, tools: Sequence[Tool] = (), *, is_thought: bool = False) -> None:
        """tools: that the model was given; they say which arguments are texts in forms without quotes.

        is_thought: the text does not begin where an answer does, which calls of some forms do.
        """
        forms = (form, *map(tool_form_named, form.also))
        properties = {tool.name: json.loads(tool.parameters).get("properties", {}) for tool in tools}
        self.reader = TextReader()
        self._syntaxes = [CallSyntax(each, self.reader, properties) for each in forms]
        self._leading = () if is_thought else tuple(mark for each in forms if each.leads for mark in each.starts)
        self._marks = Marks(mark for each in forms if not each.leads for mark in each.starts)  # anywhere in a text
        self._may_lead = True  # no call and no text but white space came
        self._is_thought = is_thought
        self._at = 0  # up to here the text was given
        self._num_calls = 0
        self._pieces = self._read()

    def push(self, text: str) -> list[str | ToolCall]:
        """Texts and calls that this piece has made certain, in order."""
        return _joined(self.placed(text))

    def flush(self) -> list[str | ToolCall]:
        """The rest, since no more text will come."""
        return _joined(self.placed("", is_last=True))

    def placed(self, text: str, *, is_last: bool = False) -> list[ReadPiece]:
        """The pieces that have become certain, with their places. is_last: no more text will come."""
        self.reader.grow(text)
        self.reader.is_last = is_last
        return list(itertools.takewhile(lambda piece: piece is not None, self._pieces))  # type: ignore[arg-type]

    def _read(self) -> Iterator[ReadPiece | None]:
        """The pieces; None where more text must come first."""
        while (yield from self._text_before()):
            at = self.reader.space_end(self._at)
            for syntax in self._syntaxes:
                if syntax.form.leads and not (self._may_lead or self._is_thought):
                    continue
                try:
                    opened = yield from self.reader.after(at, syntax.form.opening)
                    call = yield from self._call(syntax, opened)
                except NoCall:
                    continue
                yield call
                yield from self._group(syntax)
                break
            else:
                yield self._text(at + 1)

    def _text_before(self) -> Iterator[ReadPiece | None]:
        """The text up to where a call may begin. Whether there is such a place."""
        reader = self.reader
        while not (self._may_lead and (yield from self._leads())):
            marks = self._marks if self._num_calls < MAX_CALLS else _NO_MARKS
            end, mark_end = reader.up_to(marks, self._at)
            if end > self._at:
                yield self._text(end)
            if mark_end is not None:
                return True
            if reader.is_last:
                return False
            yield None
        return True

    def _leads(self) -> Reading[bool]:
        """Whether a call that comes only where the text begins stands here."""
        if not self._leading:
            return False
        begin = yield from self.reader.after_space(self._at)
        return (yield from self.reader.stands(begin, self._leading)) and begin < len(self.reader)

    def _group(self, syntax: CallSyntax) -> Iterator[ReadPiece | None]:
        """The calls that follow one, and the end of their group."""
        closing = tuple(each for each in spelled(syntax.form.closing) if each)
        try:
            while self._num_calls < MAX_CALLS:
                place = yield from self.reader.after_space(self._at)
                if closing:
                    try:
                        self._at = yield from self.reader.after(place, closing)
                        return
                    except NoCall:
                        pass
                parted = yield from self.reader.after(place, syntax.form.between)
                yield (yield from self._call(syntax, (yield from self.reader.after_space(parted))))
        except NoCall:
            return

    def _call(self, syntax: CallSyntax, at: int) -> Reading[ReadPiece]:
        found = yield from syntax.call_at(at)
        self._at, self._may_lead, self._num_calls = found.end, False, self._num_calls + 1
        return ReadPiece(found.call, found.end)

    def _text(self, end: int) -> ReadPiece:
        """The text up to here."""
        text, self._at = self.reader.part(self._at, end), end
        self._may_lead = self._may_lead and text.isspace()
        return ReadPiece(text, end)


def _joined(pieces: Iterable[ReadPiece]) -> list[str | ToolCall]:
    """The texts and calls, neighbouring texts as one."""
    found: list[str | ToolCall] = []
    for is_text, group in itertools.groupby((piece.what for piece in pieces), lambda what: isinstance(what, str)):
        run = list(group)
        found += ["".join(run)] if is_text else run  # type: ignore[arg-type]
    return found
