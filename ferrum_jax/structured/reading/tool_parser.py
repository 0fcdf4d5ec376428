"""Tool calls out of a text in a model's form, whole or as it grows; what cannot be parsed stays text.

`ToolParser` is fed pieces of text and gives pieces back: text that is certainly no call, and calls that are whole. How
the text is cut into pieces changes nothing of what comes out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from ferrum_jax.asked.message import ToolCall
from ferrum_jax.asked.tools import Tool
from ferrum_jax.structured.forms.tool_forms import ToolForm, spelled, tool_form_named
from ferrum_jax.structured.reading.call_syntax import Found, call_at
from ferrum_jax.structured.reading.text_reader import More, NoCall, TextReader, overlap

_ENDINGS = frozenset("}>)]|;\n`")  # without one of them no call becomes whole


class ToolParser:
    """Takes a text apart into text and calls."""

    def __init__(self, form: ToolForm, tools: Sequence[Tool] = ()) -> None:
        """tools: that the model was given; they say which arguments are texts in forms without quotes."""
        self._forms = (form, *map(tool_form_named, form.also))
        self._properties = {tool.name: json.loads(tool.parameters).get("properties", {}) for tool in tools}
        self._leading_marks = tuple(mark for each in self._forms if each.leads for mark in each.starts)
        self.marks = tuple(mark for each in self._forms if not each.leads for mark in each.starts)  # anywhere in a text
        self._held = ""  # text that may become a call
        self._group: ToolForm | None = None  # of the call that came, which others may follow
        self._has_text = False  # text that is no white space, or a call, came
        self._waits = False  # nothing of what is held is certain
        self._in_call = False  # what is held begins like a call

    def push(self, text: str) -> list[str | ToolCall]:
        """Texts and calls that this piece has made certain, in order."""
        self._held += text
        if self._in_call and not _ENDINGS & set(text):
            return []
        return self._advance(is_last=False)

    def flush(self) -> list[str | ToolCall]:
        """The rest, since no more text will come."""
        return self._advance(is_last=True)

    def _advance(self, *, is_last: bool) -> list[str | ToolCall]:
        pieces: list[str | ToolCall] = []
        self._waits = self._in_call = False
        while self._held and not self._waits:
            reader = TextReader(self._held, is_last)
            try:
                piece = self._next(reader) if self._group is None else self._next_in_group(reader, self._group)
            except More:
                self._waits = self._in_call = True
                break
            if piece:
                pieces.append(piece)
        return _joined(pieces)

    def _next(self, reader: TextReader) -> str | ToolCall | None:
        """The next piece where no call came before; None where nothing is certain. Raises More."""
        start = self._start(reader.is_last)
        if start:
            return self._text(start)
        if self._waits:
            return None
        for form in self._forms:
            if form.leads and self._has_text:
                continue
            try:
                found = call_at(reader, reader.after(reader.after_space(0), form.opening), form, self._properties)
                return self._taken(found, form)
            except NoCall:
                continue
        return self._text(1)

    def _start(self, is_last: bool) -> int:
        """How much of what is held is text for certain; it waits where that is nothing and no call begins here."""
        if self._may_lead(is_last):
            return 0
        found = [place for mark in self.marks if (place := self._held.find(mark)) >= 0]
        if found:
            return min(found)
        kept = 0 if is_last else max((overlap(self._held, mark) for mark in self.marks), default=0)
        self._waits = kept == len(self._held)
        return len(self._held) - kept

    def _may_lead(self, is_last: bool) -> bool:
        """Whether a call that comes only where the text begins stands here, or may, for which it waits."""
        if self._has_text or not self._leading_marks:
            return False
        rest = self._held.lstrip()
        if rest.startswith(self._leading_marks):
            return True
        self._waits = not is_last and any(mark.startswith(rest) for mark in self._leading_marks)
        return self._waits

    def _next_in_group(self, reader: TextReader, form: ToolForm) -> str | ToolCall | None:
        """The next piece after a call: another one, or the end of the group. Raises More."""
        place = reader.after_space(0)
        closing = tuple(each for each in spelled(form.closing) if each)
        closed = _read(reader, place, closing) if closing else None
        if closed is not None:
            self._group, self._held = None, self._held[closed:]
            return None
        try:
            parted = reader.after_space(reader.after(place, form.between))
            return self._taken(call_at(reader, parted, form, self._properties), form)
        except NoCall:
            self._group = None
            return None

    def _taken(self, found: Found, form: ToolForm) -> ToolCall:
        """The call, taken out of what is held."""
        self._held, self._group, self._has_text = self._held[found.end :], form, True
        return found.call

    def _text(self, count: int) -> str:
        """The first characters of what is held, as text."""
        text, self._held = self._held[:count], self._held[count:]
        self._has_text = self._has_text or not text.isspace()
        return text


def _read(reader: TextReader, at: int, spellings: tuple[str, ...]) -> int | None:
    try:
        return reader.after(at, spellings)
    except NoCall:
        return None


def parsed(form: ToolForm, text: str, tools: Sequence[Tool] = ()) -> tuple[str, list[ToolCall]]:
    """The text without its calls, and the calls."""
    parser = ToolParser(form, tools)
    pieces = [*parser.push(text), *parser.flush()]
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    return content, [piece for piece in pieces if isinstance(piece, ToolCall)]


def _joined(pieces: Iterable[str | ToolCall]) -> list[str | ToolCall]:
    """Neighbouring texts as one."""
    found: list[str | ToolCall] = []
    for piece in pieces:
        if isinstance(piece, str) and found and isinstance(found[-1], str):
            found[-1] += piece
        else:
            found.append(piece)
    return found
