"""Findings: what is wrong with an output, a report or an input, each a sentence that says where and what."""

from __future__ import annotations

import dataclasses
from collections import Counter

from ferrum_jax.io.error_text import bounded

_MOST_OF_A_KIND = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """code: its kind, for programs. custom_id: of the row that it is about, None where it is about none."""

    code: str
    message: str
    custom_id: str | None = None


class Findings:
    """The first few of each kind, and how many there are."""

    def __init__(self) -> None:
        self.kept: list[Finding] = []
        self.counts: Counter[str] = Counter()

    def add(self, code: str, message: str, custom_id: str | None = None) -> None:
        self.counts[code] += 1
        if self.counts[code] <= _MOST_OF_A_KIND:
            self.kept.append(Finding(code=code, message=bounded(message), custom_id=custom_id))

    @property
    def sentences(self) -> list[str]:
        """The sentences that were kept; after each kind a line that counts its others."""
        more = {code: count - _MOST_OF_A_KIND for code, count in self.counts.items() if count > _MOST_OF_A_KIND}
        last = {finding.code: finding for finding in self.kept}
        found: list[str] = []
        for finding in self.kept:
            found.append(finding.message)
            if last[finding.code] is finding and finding.code in more:
                found.append(f"and {more[finding.code]:,} more of this kind")
        return found
