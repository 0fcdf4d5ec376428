"""Tool calls out of a text in a model's form, whole or as it grows; what cannot be parsed stays text.

`ToolParser` is fed pieces of text and gives pieces back: text that is certainly no call, and calls that are whole. How
the text is cut into pieces changes nothing of what comes out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from ferrum_jax.structured.asked.message import ToolCall
from ferrum_jax.structured.asked.tools import Tool
from ferrum_jax.structured.call_syntax import MORE, Found, Unfinished, after_space, call_at, literal
from ferrum_jax.structured.reasoning_parser import overlap
from ferrum_jax.structured.tool_forms import ToolForm

_ENDINGS = frozenset("}>)]|;\n`")  # without one of them no call becomes whole
_TAG = "<|python_tag|>"


class ToolParser:
    """Takes a text apart into text and calls."""

    def __init__(self, form: ToolForm, tools: Sequence[Tool] = ()) -> None:
        """tools: that the model was given; they say which arguments are texts in forms without quotes."""
        self._form = form
        self._properties = {tool.name: json.loads(tool.parameters).get("properties", {}) for tool in tools}
        self._mark = (form.opening.strip() or form.begin.strip() or "{").split()[0]
        self._held = ""  # text that may become a call
        self._in_group = False  # a call came, and others may follow it
        self._has_text = False  # text that is no white space came
        self._waits = False  # nothing of what is held is certain
        self._in_call = False  # what is held begins like a call

    def push(self, text: str) -> list[str | ToolCall]:
        """What has become certain with this piece: texts and calls, in order."""
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
            piece = self._next_in_group(is_last) if self._in_group else self._next(is_last)
            if piece:
                pieces.append(piece)
        return _joined(pieces)

    def _next(self, is_last: bool) -> str | ToolCall | None:
        """The next piece where no call came before; None where nothing is certain."""
        start = self._start(is_last)
        if start:
            return self._text(start)
        if not self._held or self._waits:
            return None
        opened = literal(self._held, after_space(self._held, 0), self._form.opening)
        found = self._call(opened, is_last) if isinstance(opened, int) else opened
        return self._taken(found, is_last) or (None if self._waits else self._text(1))

    def _start(self, is_last: bool) -> int:
        """How much of what is held is text for certain; it waits where that is nothing and no call begins here."""
        if self._form.leads:
            return self._start_of_leading(is_last)
        start = self._held.find(self._mark)
        if start >= 0:
            return start
        kept = 0 if is_last else overlap(self._held, self._mark)
        self._waits = kept == len(self._held)
        return len(self._held) - kept

    def _start_of_leading(self, is_last: bool) -> int:
        """The same for a form whose calls come only where the text begins."""
        if self._has_text:
            return len(self._held)
        rest = self._held.lstrip()
        if self._form.style == "object" and rest.startswith(_TAG):
            self._held = rest = rest[len(_TAG) :].lstrip()
        if rest.startswith(self._mark):
            return 0
        may_come = not rest or (self._form.style == "object" and _TAG.startswith(rest))
        self._waits = may_come and not is_last
        return 0 if self._waits else len(self._held)

    def _next_in_group(self, is_last: bool) -> str | ToolCall | None:
        """The next piece after a call: another one, or the end of the group."""
        form, held = self._form, self._held
        place = after_space(held, 0)
        closed = literal(held, place, form.closing.strip()) if form.closing else None
        if isinstance(closed, int):
            self._in_group, self._held = False, held[closed:]
            return None
        parted = literal(held, place, form.between.strip()) if form.between.strip() else place
        found = self._call(after_space(held, parted), is_last) if isinstance(parted, int) else parted
        if closed is MORE and found is None:
            found = MORE
        self._in_group = isinstance(found, Found) or (found is MORE and not is_last)
        return self._taken(found, is_last)

    def _call(self, at: int, is_last: bool) -> Found | Unfinished | None:
        return call_at(self._held, at, self._form, self._properties, is_last=is_last)

    def _taken(self, found: Found | Unfinished | None, is_last: bool) -> ToolCall | None:
        """The call, taken out of what is held; it waits where more text is needed."""
        if isinstance(found, Found):
            self._held, self._in_group, self._has_text = self._held[found.end :], True, True
            return found.call
        self._waits = self._in_call = found is MORE and not is_last
        return None

    def _text(self, count: int) -> str:
        """The first characters of what is held, as text."""
        text, self._held = self._held[:count], self._held[count:]
        self._has_text = self._has_text or not text.isspace()
        return text


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
