"""Findings: what is wrong with an output, a report or an input, each a sentence that says where and what."""

import dataclasses
from collections import Counter

from ferrum_jax.io.error_text import bounded

MAX_OF_A_KIND = 5


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
        if self.counts[code] <= MAX_OF_A_KIND:
            self.kept.append(Finding(code=code, message=bounded(message), custom_id=custom_id))

    @property
    def sentences(self) -> list[str]:
        """The sentences that were kept, those of a kind together; after each kind a line that counts its others."""
        sentences: list[str] = []
        for code, count in self.counts.items():
            sentences += [finding.message for finding in self.kept if finding.code == code]
            if count > MAX_OF_A_KIND:
                sentences.append(f"and {count - MAX_OF_A_KIND:,} more of this kind")
        return sentences
