"""Outputs for users: the choices of a prompt, log-probabilities, vectors and scores. Names are vLLM's."""

import dataclasses
import math

import numpy as np

from ferrum_jax.inputs.params.message import AssistantMessage

NOT_FINITE = -1  # in place of a token: the row's logits hold NaN or infinity

NO_STRUCTURE = "structured output needs llguidance, which is not installed"  # then how to install it

ABORTED = "the request was ended by who owns the engine, as a pause does; ask again"

ADAPTER_FAILED = "the adapter could not be brought to the devices"  # then its name and why

NOT_FINITE_REASON = (
    "the model's own logits hold NaN or infinity where finite numbers are expected, so no token can be drawn; what was "
    "cached of this request is forgotten: send it again, and if it ends so once more, check the weights and run "
    "`ferrum-jax check`"
)

_SMALLEST_NORM = 1e-12  # of a vector


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logprob:
    """One token's log-probability (natural log, float32) and rank (1 is the most likely; 0 is unknown)."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One choice of one request. `logprobs[i]` maps token id to Logprob for the i-th generated token.

    image_digests: of its prompt's images, in hexadecimal; a choice is continued only where they are the same.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None
    logprobs: tuple[dict[int, Logprob], ...] | None
    finish_reason: str | None  # "stop", "length", "abort", "error"; None while it runs
    # The entry of stop_token_ids or stop that ended it, or what the error was; None if another cause did.
    stop_reason: int | str | None
    message: AssistantMessage | None = None  # the text taken apart, of a chat's answer that has ended or is streamed
    weights_versions: tuple[int, ...] | None = None  # of each token, where the weights changed while it ran
    image_digests: tuple[str, ...] = ()
    # [n, layers with experts, X] uint8, uint16 of more than 256 experts; best first, n = prompt + generated tokens - 1.
    routed_experts: np.ndarray | None = dataclasses.field(default=None, compare=False)
    # [generated tokens, 4 ceil(V / 32)] uint8: bit i of byte b says whether token 8 b + i could have been drawn there.
    sampling_mask: np.ndarray | None = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SequenceLogprobs:
    """Log-probabilities of n tokens of a sequence, each given all tokens before it; from `LLM.compute_logprobs`.

    k: the alternatives that were asked for, most likely first, the lowest id first among equals.
    """

    token_ids: tuple[int, ...]
    logprobs: np.ndarray  # [n] float32
    ranks: np.ndarray  # [n] int32, 1 is the most likely
    top_ids: np.ndarray  # [n, k] int32
    top_logprobs: np.ndarray  # [n, k] float32
    all_logprobs: np.ndarray | None = None  # [n, V] float32 by token id, where the whole vocabulary was asked for
    num_cached_tokens: int = 0  # tokens before them whose KV came from the prefix cache
    weights_version: int = 0  # updates of the weights before them

    @property
    def cumulative_logprob(self) -> float:
        """The log-probability of all n tokens together."""
        return math.fsum(self.logprobs.tolist())


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """All choices of one prompt. `text`, `token_ids`, `finish_reason` are those of the first choice."""

    request_id: int
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    num_cached_tokens: int  # prompt tokens whose KV came from the prefix cache (first choice)
    num_cached_media: int = 0  # media items that lie wholly within them
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None  # the first entry is None
    # one entry for each prompt token behind prompt_logprob_start: those of the tokens in prompt_logprob_token_ids
    prompt_token_id_logprobs: tuple[tuple[float, ...], ...] | None = None
    finished: bool = True
    weights_version: int = 0  # updates of the weights before its last token
    embedding: np.ndarray | None = dataclasses.field(default=None, compare=False)  # [D], from `LLM.embed` only
    scores: SequenceLogprobs | None = dataclasses.field(default=None, compare=False)  # `LLM.compute_logprobs` only

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[0].finish_reason


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EmbeddingOutput:
    """The vector of one text."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    embedding: np.ndarray  # [D] float32
    num_cached_tokens: int = 0  # of prompt_token_ids, those whose KV came from the prefix cache
    normalized: bool = False  # it has length 1

    def cut(self, dimensions: int | None) -> np.ndarray:
        """[dimensions] float32: the vector's beginning, made longer to length 1 where the whole has that; None: all.

        Raises ValueError for more than it has.
        """
        if dimensions is None:
            return self.embedding
        if dimensions > len(self.embedding):
            raise ValueError(f"dimensions is {dimensions}; the model's vectors have {len(self.embedding)}")
        return unit_length(self.embedding[:dimensions]) if self.normalized else self.embedding[:dimensions]


def unit_length(vector: np.ndarray) -> np.ndarray:  # [D] -> [D] float32
    """The vector with length 1; one shorter than 1e-12 is not made longer than that allows."""
    norm = np.linalg.norm(vector.astype(np.float64))
    return (vector / max(norm, _SMALLEST_NORM)).astype(np.float32)


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    """The cosine of the angle between two vectors [D]; 0 where one has no length."""
    one, other = one.astype(np.float64), other.astype(np.float64)
    return float(one @ other / max(np.linalg.norm(one) * np.linalg.norm(other), _SMALLEST_NORM))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ClassOutput:
    """The class of one text. probs, logits: [labels] float32, in the order of the config's labels.

    label: the likeliest one. Probabilities of a regression are its logits.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    label: str
    probs: np.ndarray
    logits: np.ndarray
    num_cached_tokens: int = 0  # of prompt_token_ids, those whose KV came from the prefix cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardOutput:
    """How good a text is, as a reward model says it: its logit, of no scale."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    reward: float
    num_cached_tokens: int = 0  # of prompt_token_ids, those whose KV came from the prefix cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreOutput:
    """How well the two texts of a pair fit, as the model says it."""

    prompt_token_ids: tuple[int, ...]
    score: float
    num_cached_tokens: int = 0  # of prompt_token_ids, those whose KV came from the prefix cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class TranscriptionSegment:
    """A part of what is said. token_ids: of its text, with its times. avg_logprob: the mean of these tokens."""

    id: int
    start_s: float
    end_s: float
    text: str
    token_ids: tuple[int, ...]
    avg_logprob: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transcription:
    """The text of a sound.

    language: its code: as it was given, or that of most windows; None where neither says it. segments: where times were
    asked for. token_ids: of all windows, without those that say language and task. avg_logprob: the mean of these.
    is_cut: a window ended at its most tokens, so that text may be missing.
    """

    text: str
    language: str | None
    task: str
    duration_s: float
    segments: tuple[TranscriptionSegment, ...] = ()
    token_ids: tuple[int, ...] = ()
    avg_logprob: float | None = None
    is_cut: bool = False
