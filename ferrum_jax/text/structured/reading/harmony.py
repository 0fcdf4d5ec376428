"""Messages in the channels of harmony, as gpt-oss writes them, taken apart while they grow.

    <|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>
    └───────────────────────── header ──────────────────────────┘└ content ┘└ end ┘

Role and start mark may be missing, since the prompt ends with them. A recipient stands before the channel or after it.
What is for `functions` or for a tool that the user gave is a call; what is for the model itself, for a tool that is
built into it, or from anybody else, is thought, as what is on the channel `analysis`. All else is answer.

Source: OpenAI, "harmony response format"; the chat template of gpt-oss.
"""

import json
import re
from collections.abc import Callable, Sequence

from ferrum_jax.inputs.params.message import ToolCall
from ferrum_jax.inputs.params.tools import Tool
from ferrum_jax.text.structured.reading.text_reader import Marks, NoCall, Reading, TextReader, loads
from ferrum_jax.text.structured.reading.tool_parser import MAX_CALLS

_START, _CHANNEL, _MESSAGE, _TO = "<|start|>", "<|channel|>", "<|message|>", "to="
_BEGINS = Marks((_START, _CHANNEL))
_ENDS = Marks(("<|end|>", "<|call|>", "<|return|>", _START))  # of a content; the last begins what comes next
_LONGEST_HEADER = 256
_LINE = r"(?:(?!<\|(?:%s)\|>)[^\n]){0,256}"  # what a header may have, up to where it must have ended
_LINES = {_CHANNEL: re.compile(_LINE % "message|start|channel"), _START: re.compile(_LINE % "message|start")}
_HEADER = re.compile(
    r"(?:<\|start\|>[\w.\-]*)?"
    r"(?:\s*+(?:to=[^\s<]++|<\|channel\|>(?:\s*+(?!to=)\w++)?|<\|constrain\|>))*\s*+\w*+[ \t]*+"
)
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
        self._reader = TextReader()
        self._at = 0  # up to here the text was said or thought
        self._num_calls = 0
        self._is_begin = not is_open  # of the text: its header may have no start mark
        self._within: str | None = "thought" if is_open else None  # what the content is; None outside of messages
        self._header = ""  # of a message that is a call, which is read whole
        self._num_thoughts = int(is_open)
        self._reading = self._read()

    def feed(self, text: str) -> None:
        self._reader.grow(text)
        next(self._reading, None)

    def flush(self) -> None:
        self._reader.is_last = True
        next(self._reading, None)

    def _read(self) -> Reading[None]:
        while not (self._reader.is_last and self._at == len(self._reader) and self._within != "call"):
            if self._within is None:
                yield from self._outside()
            elif self._within == "call":
                yield from self._inside_call()
            else:
                yield from self._inside(self._think if self._within == "thought" else self._say)

    def _outside(self) -> Reading[None]:
        """Text up to the next header, and that header."""
        reader = self._reader
        if not (self._is_begin and (yield from self._stands_bare())):
            start, is_there = reader.up_to(_BEGINS, self._at)
            self._emit(start)
            if is_there is None:
                yield  # at the end of the last text nothing follows
                return
        head = reader.part(self._at, self._at + len(_CHANNEL))
        mark = next((mark for mark in (_START, _CHANNEL) if head.startswith(mark)), "")
        end = yield from self._header_end(_LINES[mark or _START])
        header = reader.part(self._at, end)
        is_header = len(header) <= _LONGEST_HEADER and _HEADER.fullmatch(header) is not None
        if end == len(reader) and mark and is_header:  # one that is cut off is no text
            self._at = end
        elif not is_header or reader.part(end, end + len(_MESSAGE)) != _MESSAGE:
            self._emit(self._at + len(mark or _TO))
        else:
            self._at, self._is_begin = end + len(_MESSAGE), False
            self._begin(header)

    def _header_end(self, line: re.Pattern[str]) -> Reading[int]:
        first = end = self._at + 1
        while (end := self._reader.match(line, max(first, end - len(_MESSAGE)))) == len(self._reader):
            if self._reader.is_last or end - self._at > _LONGEST_HEADER:
                break
            yield
        return end

    def _stands_bare(self) -> Reading[bool]:
        """Whether the text begins with the recipient of a header whose start the prompt has."""
        place = yield from self._reader.after_space(self._at)
        try:
            return (yield from self._reader.after(place, _TO)) > place
        except NoCall:
            return False

    def _begin(self, header: str) -> None:
        """The content that follows this header begins."""
        role = re.match(r"<\|start\|>([\w.\-]+)", header)
        channels, recipients = re.findall(r"<\|channel\|>\s*(\w+)", header), re.findall(r"to=([^\s<]+)", header)
        is_ours = role is None or role[1] == "assistant"
        if not is_ours or (recipients and not self._is_call(recipients[-1])):
            self._within = "thought"
        elif recipients:
            is_read = self._names is not None and self._num_calls < MAX_CALLS
            self._within = "call" if is_read else "answer"
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

    def _inside(self, give: Callable[[str], None]) -> Reading[None]:
        end, after = self._reader.up_to(_ENDS, self._at)
        if end > self._at:
            give(self._reader.part(self._at, end))
        self._at = end
        if after is None:
            yield
        else:
            self._close(after)

    def _inside_call(self) -> Reading[None]:
        try:
            end, after = yield from self._reader.find(_ENDS, self._at)
        except NoCall:
            end = after = len(self._reader)
        self._call(self._reader.part(self._at, end), self._reader.part(end, after))
        self._at = end
        self._close(after)

    def _close(self, after: int) -> None:
        """The content has ended with the mark that stands here; one that begins a message is left."""
        self._at = self._at if self._reader.part(self._at, after) == _START else after
        self._within = None

    def _call(self, content: str, end: str) -> None:
        """A message to a tool; one without arguments that can be read stays text."""
        try:
            arguments = loads(content.strip() or "{}")
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            self._say(self._header + content + end)
            return
        self._num_calls += 1
        name = re.findall(r"to=(?:functions\.)?([^\s<]+)", self._header)[-1]
        self._say(ToolCall(name=name, arguments=json.dumps(arguments, ensure_ascii=False)))

    def _emit(self, end: int) -> None:
        """Text outside of messages, up to here."""
        if end > self._at:
            text, self._at = self._reader.part(self._at, end), end
            self._is_begin = self._is_begin and text.isspace()
            self._say(text)
