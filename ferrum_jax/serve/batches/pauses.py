"""Pauses between tries of something that fails: they grow, and the log has one line for each thing that is wrong."""

import logging

from ferrum_jax.io import system

_log = logging.getLogger("ferrum_jax.serve")


class Pauses:
    """Pauses of one thing that is tried again and again. num_begun: since it was made."""

    def __init__(self, what: str, *, first_s: float, most_s: float) -> None:
        """what: is tried, in words of the log. first_s: the first pause; each is twice the one before, up to most_s."""
        self._what, self._first_s, self._most_s = what, first_s, most_s
        self.num_begun = 0
        self._pause_s = 0.0
        self._until_s = 0.0  # of system.monotonic()
        self._said: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether it may be tried now."""
        return system.monotonic() >= self._until_s

    def begin(self, error: BaseException) -> None:
        """Pauses after a try that failed."""
        self.num_begun += 1
        said = repr(error)
        if said != self._said:
            _log.error("%s: %s; it is tried again after pauses of up to %.0f s", self._what, said, self._most_s)
            self._said = said
        self._pause_s = min(max(2 * self._pause_s, self._first_s), self._most_s)
        self._until_s = system.monotonic() + self._pause_s

    def end(self) -> None:
        """Pauses no more, after a try that went well."""
        if self._said is not None:
            _log.warning("%s: it works again", self._what)
        self._said, self._pause_s = None, 0.0
