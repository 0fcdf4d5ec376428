"""An answer without the marks that some models put around it, as it grows."""

from __future__ import annotations

from ferrum_jax.text.structured.reading.text_reader import Marks


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
