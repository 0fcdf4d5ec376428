"""Requests for a text, vectors, or scores of pairs, as `bodies.py` reads them and servers and jobs answer them.

A job's rows with equal parameters share one request and have their prompts beside it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from ferrum_jax.core.request import FLEX
from ferrum_jax.inputs.params.transcription_params import TranscriptionParams
from ferrum_jax.sampling_params import SamplingParams

GENERATES, EMBEDS, SCORES, TRANSCRIBES, CLASSIFIES, REWARDS = range(6)  # what an engine is asked for


class AnswerOptions(NamedTuple):
    """ids_as_names: log-probabilities name a token as "token_id:5". shows_reasoning: the message has what it thought.

    num_tops: alternatives at each token of a chat, None where no log-probabilities are asked for.
    """

    ids_as_names: bool = False
    shows_reasoning: bool = True
    num_tops: int | None = None


PLAIN = AnswerOptions()


class ReadingForm(NamedTuple):
    """How vectors and scores are written. dimensions: of vectors, None for all. top_n: of a ranking."""

    dimensions: int | None = None
    as_base64: bool = False
    top_n: int | None = None
    shows_documents: bool = True


_READ = SamplingParams(max_tokens=1)  # for texts that are read


class BodyLimits(NamedTuple):
    """Limits of one request. ignores_unknown: unknown fields become a warning and no error."""

    max_n: int = 128
    max_prompts: int = 2048
    ignores_unknown: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """A request of any kind. options: of each prompt, as in mappings of `ferrum_jax.inputs.prompt`. prompts: one or
    several; empty where a job's rows have them. kind: GENERATES or another of what an engine is asked for."""

    kind: ClassVar[int]
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

    kind = GENERATES
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
    """A transcript of a sound, the only one of `prompts`. params: of its windows, without a transcript's rules.

    heard: the HeardSound, once a job has read it.
    """

    kind = TRANSCRIBES
    how: TranscriptionParams
    response_format: str = "json"
    heard: Any = None
    streams: bool = False
    request_id: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskedVectors(Asked):
    """Vectors of texts. options: how they are made, and the salt."""

    kind = EMBEDS
    form: ReadingForm


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskedClasses(Asked):
    """Classes of texts. options: whether they are cut, and the salt."""

    kind = CLASSIFIES


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskedRewards(Asked):
    """Rewards of texts. options: as of classes."""

    kind = REWARDS


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskedScores(Asked):
    """Scores of pairs of texts. left: one text, or as many as right. ranks: documents are put in an order by them."""

    kind = SCORES
    left: tuple[str, ...] = ()
    right: tuple[str, ...] = ()
    form: ReadingForm
    ranks: bool

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Each on the right with its own on the left, or with the only one."""
        left = self.left * len(self.right) if len(self.left) == 1 else self.left
        return list(zip(left, self.right, strict=True))
