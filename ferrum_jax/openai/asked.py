"""What is asked for: a text, vectors, or scores of pairs, as `bodies.py` reads it and servers and jobs answer it.

Rows of a job that ask alike share one of these, and have their prompts beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from ferrum_jax.core.request import FLEX
from ferrum_jax.inputs.params.transcription_params import TranscriptionParams
from ferrum_jax.inputs.prompt import side_prompts
from ferrum_jax.openai.answer_options import PLAIN, AnswerOptions, ReadingForm
from ferrum_jax.sampling_params import SamplingParams

_READ = SamplingParams(max_tokens=1)  # for texts that are read


class BodyLimits(NamedTuple):
    """What one request may ask for at most. ignores_unknown: unknown fields become a warning and no error."""

    max_n: int = 128
    max_prompts: int = 2048
    ignores_unknown: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What bodies of all kinds ask for. options: what belongs to each prompt, as mappings of `ferrum_jax.inputs.prompt`
    have it. prompts: one or several; rows of a job have theirs beside this."""

    prompts: tuple[Any, ...] = ()
    params: SamplingParams = _READ
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    model: str | None = None
    priority: int = 0
    timeout_s: float | None = None
    warnings: tuple[str, ...] = ()

    @property
    def is_flex(self) -> bool:
        """Whether it takes only what other requests leave."""
        return self.priority >= FLEX


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskedText(Asked):
    """A completion or a chat's answer.

    returns_token_ids: as the body says it; None where it does not. echoed: what a chat's answer begins with.
    generates: False for an echo alone, which leaves out the one token that is drawn.
    """

    is_chat: bool
    form: AnswerOptions = PLAIN
    returns_token_ids: bool | None = None
    echo: bool = False
    echoed: str = ""
    generates: bool = True
    streams: bool = False
    includes_usage: bool = False
    usage_in_every_chunk: bool = False
    request_id: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskedSound(Asked):
    """What is said in a sound, the only one of `prompts`. params: of its windows, but for the rules of a transcript.

    heard: the HeardSound, once a job has read it.
    """

    how: TranscriptionParams
    response_format: str = "json"
    heard: Any = None
    streams: bool = False
    request_id: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskedVectors(Asked):
    """Vectors of texts. options: how they are made, and the salt."""

    form: ReadingForm


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskedClasses(Asked):
    """Classes of texts. options: whether they are cut, and the salt."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskedRewards(Asked):
    """Rewards of texts. options: as of classes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskedScores(Asked):
    """Scores of pairs of texts. left: one text, or as many as right. ranks: documents are put in an order by them."""

    left: tuple[str, ...] = ()
    right: tuple[str, ...] = ()
    form: ReadingForm
    ranks: bool

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Each on the right with its own on the left, or with the only one."""
        left = self.left * len(self.right) if len(self.left) == 1 else self.left
        return list(zip(left, self.right, strict=True))

    def sides(self, known: Collection[str]) -> list[AskedVectors]:
        """Both sides as texts whose vectors are compared; a ranking's with the checkpoint's prompts for them.

        known: names of the checkpoint's prompts.
        """
        found = []
        for texts, name in zip((self.left, self.right), side_prompts(known if self.ranks else ()), strict=True):
            options = self.options if name is None else {**self.options, "prompt_name": name}
            found.append(
                AskedVectors(
                    prompts=texts,
                    options=options,
                    form=self.form,
                    priority=self.priority,
                    timeout_s=self.timeout_s,
                )
            )
        return found
