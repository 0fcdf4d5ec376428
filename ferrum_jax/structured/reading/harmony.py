"""Messages in the channels of harmony, as gpt-oss writes them, taken apart while they grow.

    <|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>
    └───────────────────────── header ──────────────────────────┘└ content ┘└ end ┘

Role and start mark may be missing, since the prompt ends with them. A recipient stands before the channel or after it.
What is for `functions` or for a tool that the user gave is a call; what is for the model itself, for a tool that is
built into it, or from anybody else, is thought, as what is on the channel `analysis`. All else is answer.

Source: OpenAI, "harmony response format"; the chat template of gpt-oss.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from ferrum_jax.asked.message import ToolCall
from ferrum_jax.asked.tools import Tool
from ferrum_jax.structured.reading.text_reader import overlap

_START, _CHANNEL, _MESSAGE, _TO = "<|start|>", "<|channel|>", "<|message|>", "to="
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START)  # of a content; the last begins what comes next
_HEADER = re.compile(r"(?:<\|start\|>[\w.\-]*)?(?:\s*(?:to=[^\s<]+|<\|channel\|>\s*\w*|<\|constrain\|>))*\s*\w*[ \t]*")
_BUILT_IN = frozenset(("assistant", "python", "browser", "container"))


class HarmonyMessages:
    """Fed pieces of a text, says what is thought and what is said of it, calls among that."""

    def __init__(
        self,
        tools: Sequence[Tool] | None,
        think: Callable[[str], None],
        say: Callable[[str | ToolCall], None],
        *,
        is_open: bool = False,
    ) -> None:
        """tools: that the model was given; None leaves calls in the text. is_open: the prompt ends within a thought."""
        self._names = None if tools is None else frozenset(tool.name for tool in tools)
        self._think, self._say = think, say
        self._held = ""
        self._is_begin = not is_open  # of the text: its header may have no start mark
        self._within: str | None = "thought" if is_open else None  # what the content is; None outside of messages
        self._header = ""  # of a message that is a call, which is read whole
        self._num_thoughts = int(is_open)

    def feed(self, text: str) -> None:
        self._held += text
        while self._advance(is_last=False):
            pass

    def flush(self) -> None:
        while self._held and self._advance(is_last=True):
            pass
        if self._within == "call":  # without an end and without arguments
            self._call("", "")

    def _advance(self, *, is_last: bool) -> bool:
        """Whether more of what is held may be certain."""
        return self._outside(is_last) if self._within is None else self._inside(self._within, is_last)

    def _outside(self, is_last: bool) -> bool:
        start = self._start(is_last)
        if start is None:
            return False
        self._emit(start)
        found = re.search(r"\n|<\|message\|>", self._held)
        if found is None and not is_last:
            return False
        header = self._held if found is None else self._held[: found.start()]
        mark = next((mark for mark in (_START, _CHANNEL) if header.startswith(mark)), "")
        is_header = _HEADER.fullmatch(header) is not None
        if found is None and mark and is_header:  # one that is cut off is no text
            self._held = ""
            return False
        if found is None or found.group() != _MESSAGE or not is_header:
            self._emit(len(mark or _TO))
            return True
        self._held, self._is_begin = self._held[found.end() :], False
        self._begin(header)
        return True

    def _start(self, is_last: bool) -> int | None:
        """Where the next header begins; None where nothing more is certain."""
        rest = self._held.lstrip()
        if self._is_begin and not is_last and _TO.startswith(rest):
            return None
        if self._is_begin and rest.startswith(_TO):
            return 0
        places = [place for mark in (_START, _CHANNEL) if (place := self._held.find(mark)) >= 0]
        if places:
            return min(places)
        kept = 0 if is_last else max(overlap(self._held, mark) for mark in (_START, _CHANNEL))
        self._emit(len(self._held) - kept)
        return None

    def _begin(self, header: str) -> None:
        """The content that follows this header begins."""
        role = re.match(r"<\|start\|>([\w.\-]+)", header)
        channels, recipients = re.findall(r"<\|channel\|>\s*(\w+)", header), re.findall(r"to=([^\s<]+)", header)
        is_ours = role is None or role[1] == "assistant"
        if not is_ours or (recipients and not self._is_call(recipients[-1])):
            self._within = "thought"
        elif recipients:
            self._within = "call" if self._names is not None else "answer"
        else:
            self._within = "thought" if channels[-1:] == ["analysis"] else "answer"
        self._header = header + _MESSAGE if is_ours and recipients and self._within != "thought" else ""
        if self._within == "answer" and self._header:  # a call that nobody may make
            self._say(self._header)
        if self._within == "thought":
            self._think("\n" if self._num_thoughts else "")
            self._num_thoughts += 1

    def _is_call(self, recipient: str) -> bool:
        is_known = self._names is not None and recipient in self._names
        return is_known or recipient.split(".")[0] not in _BUILT_IN

    def _inside(self, within: str, is_last: bool) -> bool:
        ends = [(place, end) for end in _ENDS if (place := self._held.find(end)) >= 0]
        place, end = min(ends) if ends else (len(self._held), "")
        if within == "call":
            if not (ends or is_last):
                return False
            self._call(self._held[:place], end)
            self._within = None
        else:
            kept = 0 if ends or is_last else max(overlap(self._held, each) for each in _ENDS)
            content = self._held[: place - kept]
            if content:
                (self._think if within == "thought" else self._say)(content)
            if not ends:
                self._held = self._held[place - kept :]
                return False
        self._held = self._held[place + (0 if end == _START else len(end)) :]
        self._within = None
        return bool(ends)

    def _call(self, content: str, end: str) -> None:
        """A message to a tool; one without arguments that can be read stays text."""
        try:
            arguments = json.loads(content.strip() or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            self._say(self._header + content + end)
            return
        name = re.findall(r"to=(?:functions\.)?([^\s<]+)", self._header)[-1]
        self._say(ToolCall(name=name, arguments=json.dumps(arguments, ensure_ascii=False)))

    def _emit(self, count: int) -> None:
        if count:
            self._is_begin = self._is_begin and self._held[:count].isspace()
            self._say(self._held[:count])
            self._held = self._held[count:]
