"""Arguments that stand without quotes between marks: the value of one, whose end mark may be missing.

A value ends at its end mark, or where a line begins like the next argument or like the end of the call. So such a line
is no part of a text that a grammar allows.
"""

from __future__ import annotations

import functools
import re

from ferrum_jax.structured.forms.tool_forms import ToolForm
from ferrum_jax.structured.reading.text_reader import More, NoCall, TextReader


def spelled_value(reader: TextReader, at: int, form: ToolForm) -> tuple[str, str, int]:
    """The key that stands here, its value and where they end. Raises More and NoCall."""
    _, after_key, after_value = form.argument
    stop = reader.find(after_key.split()[0], at)
    start = reader.after(stop, after_key.rstrip())
    end = _stop(form).search(reader.text, start)
    if end is None:
        raise NoCall if reader.is_last else More
    value, place = reader.text[start : end.start()], end.start()
    if end.group() == after_value.strip():
        place = end.end()
    if after_key.endswith("\n"):
        value = value.removeprefix("\n")
    if after_value.startswith("\n"):
        value = value.removesuffix("\n")
    return reader.text[at:stop].strip(), value, place


@functools.cache
def _stop(form: ToolForm) -> re.Pattern[str]:
    lines = "|".join(map(re.escape, form.stop_lines))
    return re.compile(rf"{re.escape(form.argument[2].strip())}|\n[ \t]*(?={lines})")
