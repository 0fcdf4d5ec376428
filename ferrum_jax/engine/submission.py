"""Submissions: what a user asked for in one call, checked, with one Request for each of its n choices."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import struct
from array import array
from collections.abc import Callable, Collection, Sequence

import numpy as np

from ferrum_jax.core.delta import Entry, entry_of
from ferrum_jax.core.outputs import CompletionOutput
from ferrum_jax.core.plan import Draw
from ferrum_jax.core.request import Request
from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.engine.adapters import LoadedAdapter
from ferrum_jax.engine.image_intake import NO_IMAGES, ImageLimits, placed_media
from ferrum_jax.engine.of_tokens.kept_experts import KeptExperts
from ferrum_jax.engine.of_tokens.prompt_scores import PromptScores, prompt_scores
from ferrum_jax.engine.of_tokens.routed_experts import RoutedExperts
from ferrum_jax.engine.prefixes.kv_tier import Fetch
from ferrum_jax.inputs.prompt import EncodableImage, MediaSpan, PlacedImage
from ferrum_jax.runtime import sampling as device_sampling
from ferrum_jax.runtime.compile.deferred import DeferredExecutable
from ferrum_jax.sampling_params import SamplingParams
from ferrum_jax.text.output_processor.choice_text import text_stream
from ferrum_jax.text.stream import TextStream
from ferrum_jax.text.structured.grammars import Grammar
from ferrum_jax.text.structured.token_rules import TokenRules
from ferrum_jax.text.tokenizer import Tokenizer


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class Choice:
    """One choice of a submission and what has been made of its tokens."""

    request: Request
    submission: Submission
    seed: int
    stops: TextStream | None  # the search for stop strings, where there are some
    logprobs: list[Entry] | None
    updates: list[tuple[int, int]] = dataclasses.field(
        default_factory=list
    )  # its tokens before each, the version after
    num_given: int = 0  # of its tokens
    experts: RoutedExperts | None = None  # of its tokens, where they are asked for
    masks: list[np.ndarray] | None = None  # of its drawn tokens, [ceil(V / 32)] int32 each, where they are asked for


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class Submission:
    """One call's request, complete when no choice is left."""

    id: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    options: RequestOptions
    choices: list[Choice] = dataclasses.field(default_factory=list)
    scores: PromptScores | None = None  # log-probabilities of its prompt's tokens, or of some
    num_left: int = 0
    weights_version: int = 0  # updates of the weights before its next token
    grammar: Grammar | None = None  # under which its choices draw
    rules: TokenRules | None = None  # of one that needs masks
    adapter: LoadedAdapter | None = None
    images: Sequence[EncodableImage] = ()  # of its prompt as it runs
    part: DeferredExecutable | None = None  # that it needs and that is being compiled
    fetch: Fetch | None = None  # of its first tokens' KV, from a tier
    adapter_slot: int = 0  # that it holds from when it is queued, 0 for none
    arrival: int = 0  # calls of `Engine.step` before it was queued
    embedding: np.ndarray | None = None  # [D] float32, the final hidden state of its prompt's last token

    @property
    def image_digests(self) -> tuple[str, ...]:
        """Digests of the prompt's images as they were given, in hexadecimal."""
        return tuple(image.digest.hex() for image in self.options.images)

    @property
    def waits(self) -> bool:
        """Whether something has to be ready before it is queued."""
        return any(each is not None for each in (self.grammar, self.adapter, self.part, self.fetch))

    @property
    def open_choices(self) -> list[Choice]:
        return [choice for choice in self.choices if choice.request.finish_reason is None]


class InputProcessor:
    """Makes submissions of what is asked, for one model and one engine's limits; refuses what cannot be served."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        end_ids: frozenset[int],
        max_model_len: int,
        max_request_tokens: int,
        seed: int,
        grammar: Callable[[SamplingParams], Grammar | None],
        adapter: Callable[[str], LoadedAdapter],
        images: Sequence[ImageLimits] = (NO_IMAGES,),
        num_routed_layers: int = 0,
        keeps_masks: bool = False,
        kept_experts: KeptExperts | None = None,
    ) -> None:
        """end_ids: the model's end tokens. max_request_tokens: for which the executables' block tables have room.
        seed: the engine's, from which those of requests without one follow. grammar: that a request asks for.
        adapter: by its name. images: what there is room for. num_routed_layers: those whose experts steps give, 0 where
        none does. keeps_masks: steps give those of what could be drawn. kept_experts: with which hits come.
        """
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = end_ids
        self._max_model_len = max_model_len
        self._max_request_tokens = max_request_tokens
        self._seed = seed
        self._grammar = grammar
        self._adapter = adapter
        self._images = images
        self._num_routed_layers, self._keeps_masks = num_routed_layers, keeps_masks
        self.kept_experts = kept_experts
        self._ids = itertools.count(1)

    def take(self, prompt_token_ids: Sequence[int], sampling: SamplingParams, options: RequestOptions) -> Submission:
        """A submission whose choices are not queued yet.

        Raises ValueError for a prompt or parameters that cannot be served.
        """
        whole = prompt_token_ids
        if options.scores is not None:
            _check_types(whole)
            self._check_vocabulary("the sequence", whole)
            prompt_token_ids = _all_but_last(whole, options.scores.start)
        token_ids = self._check(prompt_token_ids, sampling, embeds=options.embeds)
        spans = _check_media(options.media, len(prompt_token_ids), len(prompt_token_ids) - len(token_ids))
        placed, images = placed_media(options.images, spans, self._images)
        submission = Submission(
            id=next(self._ids),
            prompt_token_ids=tuple(token_ids if options.scores is None else whole),
            sampling=sampling,
            options=options,
            grammar=self._grammar(sampling),
            rules=TokenRules(sampling, self._stop_ids(sampling), self.tokenizer) if sampling.needs_mask else None,
            adapter=self._adapter(options.adapter) if options.adapter else None,
            images=images,
        )
        if sampling.scores_prompt:
            for ids in sampling.named_rows:
                self._check_vocabulary("prompt_logprob_token_ids", ids)
            submission.scores = prompt_scores(submission.prompt_token_ids, sampling, options.scores)
        seed = sampling.seed if sampling.seed is not None else self._derive_seed(token_ids, options.key)
        for choice in range(sampling.n):
            made = self._make_choice(submission, token_ids, spans, placed, choice, seed)
            submission.choices.append(made)
        if not sampling.scores_prompt:
            for made, before in zip(submission.choices, options.resume, strict=False):
                if before.image_digests == submission.image_digests:
                    _resume(made, before)
        submission.num_left = len(submission.open_choices)
        return submission

    def _make_choice(
        self,
        submission: Submission,
        token_ids: array[int],
        media: tuple[MediaSpan, ...],
        images: tuple[PlacedImage, ...],
        choice: int,
        seed: int,
    ) -> Choice:
        sampling, options = submission.sampling, submission.options
        draws = options.scores is None and not options.embeds
        routed = self._num_routed_layers > 0 and draws
        room = self._max_model_len - len(token_ids)
        room = min(room, sampling.max_new_tokens or room)
        # every choice but the first may hit: the prompt's logprobs come from the first one
        scores = submission.scores if choice == 0 else None
        hits_before = scores is not None and (scores.first > 1 or options.scores is not None)
        stops = (
            text_stream(self.tokenizer, sampling, submission.prompt_token_ids)
            if sampling.stop and self.tokenizer
            else None
        )
        request = Request(
            id=next(self._ids),
            token_ids=token_ids[:],
            num_prompt_tokens=len(token_ids),
            max_total_tokens=len(token_ids) + (room if sampling.max_tokens is None else sampling.max_tokens),
            min_tokens=0 if sampling.needs_mask else sampling.min_tokens,  # of one with masks these see to it
            takes_drafts=sampling.speculative,
            is_constrained=sampling.needs_mask,
            draw=Draw.FULL if options.embeds or scores is not None else device_sampling.draw_of(sampling),
            needs_host=stops is not None,
            stop_ids=self._stop_ids(sampling),
            end_ids=self._ends(sampling),
            priority=options.priority,
            choice=choice,
            num_choices=sampling.n,
            takes_hits=(self.kept_experts is not None or not routed) and (scores is None or hits_before),
            most_hit_tokens=scores.first - 1 if scores is not None and hits_before else None,
            adapter="" if submission.adapter is None else submission.adapter.digest,
            cache_salt=options.cache_salt.encode(),
            media=media,
            images=images,
        )
        return Choice(
            request=request,
            submission=submission,
            seed=seed,
            stops=stops,
            logprobs=None if sampling.logprobs is None else [],
            experts=RoutedExperts(self._num_routed_layers) if routed else None,
            masks=[] if self._keeps_masks and draws else None,
        )

    def _check(self, token_ids: Sequence[int], sampling: SamplingParams, *, embeds: bool) -> array[int]:
        """The prompt as it will run. Raises ValueError with the value and the repair."""
        most = sampling.most_prompt_tokens(self._max_model_len)
        if most is not None:
            token_ids = token_ids[-most:]
        _check_types(token_ids)
        named = (
            ("the prompt", token_ids),
            ("logit_bias", sampling.logit_bias or ()),
            ("allowed_token_ids", sampling.allowed_token_ids or ()),
            ("stop_token_ids", sampling.stop_token_ids),
        )
        for what, ids in named:
            self._check_vocabulary(what, ids)
        total = len(token_ids) + (1 if sampling.max_tokens is None else sampling.max_tokens) - embeds
        if total > self._max_model_len:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens and max_tokens is {sampling.max_tokens}: together {total}, "
                f"more than max_model_len, {self._max_model_len}; shorten one of them or set truncate_prompt_tokens"
            )
        most = self._max_model_len if sampling.max_tokens is None else total
        if most > self._max_request_tokens:
            raise ValueError(
                f"the request may have {most} tokens, and this engine's reach is requests of at most "
                f"{self._max_request_tokens}; lower max_tokens, or make the engine without a reach"
            )
        num_stops = len(self._stop_ids(sampling))
        if num_stops > device_sampling.STOP_ROOM:
            raise ValueError(
                f"the model's end tokens and stop_token_ids are {num_stops} ids together; at most "
                f"{device_sampling.STOP_ROOM} fit, give fewer stop_token_ids or set ignore_eos"
            )
        self._check_text(sampling)
        return array("i", token_ids)

    def _check_vocabulary(self, what: str, ids: Collection[int]) -> None:
        """Raises ValueError for a token id that the model does not have."""
        if len(ids) and not 0 <= min(ids) <= max(ids) < self._vocab_size:
            wrong = next(t for t in ids if not 0 <= t < self._vocab_size)
            raise ValueError(f"{what} holds token id {wrong}; the model's ids are 0 to {self._vocab_size - 1}")

    def _check_text(self, sampling: SamplingParams) -> None:
        """Raises ValueError for what needs a tokenizer where there is none, and where no token may be drawn."""
        if sampling.echo and self.tokenizer is None:
            raise ValueError("echo is True, and there is no tokenizer; leave it out, or give LLM(tokenizer=...)")
        if sampling.stop and self.tokenizer is None:
            raise ValueError(
                f"stop is {sampling.stop!r}, and there is no tokenizer; use stop_token_ids, or give LLM(tokenizer=...)"
            )
        never = {token for token, bias in (sampling.logit_bias or {}).items() if bias == -math.inf}
        if sampling.min_tokens:
            never |= self._stop_ids(sampling)
        if len(never) >= self._vocab_size:
            raise ValueError(f"logit_bias forbids all {self._vocab_size} tokens of the model; leave one that may come")

    def _stop_ids(self, sampling: SamplingParams) -> frozenset[int]:
        return self._ends(sampling) | frozenset(sampling.stop_token_ids)

    def _ends(self, sampling: SamplingParams) -> frozenset[int]:
        return frozenset() if sampling.ignore_eos else self._end_ids

    def _derive_seed(self, token_ids: array[int], key: str) -> int:
        """64 bits from the engine's seed, the prompt and the key; the same in every process."""
        state = hashlib.blake2b(digest_size=8)
        state.update(struct.pack("<Q", self._seed & (2**64 - 1)))
        state.update(token_ids.tobytes())
        state.update(key.encode())
        return int.from_bytes(state.digest(), "little")

    def slot_record(self, choice: Choice) -> np.ndarray:
        """The record of a choice that is about to run, as its row slot holds it."""
        request, sampling, scores = choice.request, choice.submission.sampling, choice.submission.options.scores
        return device_sampling.slot_record(
            sampling.without_min_tokens() if request.is_constrained else sampling,
            seed=choice.seed,
            choice=request.choice,
            num_prompt_tokens=request.num_prompt_tokens if scores is None else scores.start,
            stop_ids=request.stop_ids,
            token_ids=request.token_ids,
            max_model_len=self._max_model_len,
            processed=scores is not None and scores.processed,
            adapter_id=request.adapter_id,
        )


def _resume(choice: Choice, before: CompletionOutput) -> None:
    """Gives a new choice the tokens that it had; the next one is drawn as if it had never stopped."""
    request = choice.request
    request.token_ids.extend(before.token_ids)
    if choice.logprobs is not None:
        choice.logprobs.extend(map(entry_of, before.logprobs or ()))
    if before.finish_reason is not None:
        request.finish_reason, request.stop_reason = before.finish_reason, before.stop_reason
        return
    assert len(request.token_ids) < request.max_total_tokens, "a choice to resume has all its tokens"
    if choice.stops is not None:
        for token in before.token_ids:
            choice.stops.push(token)


def _all_but_last(token_ids: Sequence[int], scores_from: int) -> Sequence[int]:
    """The tokens of a scored sequence that are computed: all but the last, which no other looks back at.

    Raises ValueError where nothing is left to score or to score it by.
    """
    if not 1 <= scores_from < len(token_ids):
        raise ValueError(
            f"scores_from is {scores_from} of a sequence of {len(token_ids)} tokens; it must be from 1, as nothing is "
            f"before the first token, to {len(token_ids) - 1}"
        )
    return token_ids[:-1]


def _check_types(token_ids: Sequence[int]) -> None:
    """Raises ValueError for a prompt that is not token ids."""
    if not len(token_ids):
        raise ValueError("the prompt is empty (0 tokens); give at least one token")
    if set(map(type, token_ids)) != {int}:
        bad = next((t for t in token_ids if isinstance(t, bool) or not isinstance(t, int | np.integer)), None)
        if bad is not None:
            raise ValueError(f"the prompt holds {bad!r}, which is not a token id")


def _check_media(media: Sequence[MediaSpan], num_tokens: int, num_cut: int) -> tuple[MediaSpan, ...]:
    """The spans of a prompt of `num_tokens`, counted after its first `num_cut` are cut off.

    Raises ValueError for a span that does not fit.
    """
    for span in media:
        what = f"the {span.kind} at tokens {span.start} to {span.end - 1}"
        if span.end > num_tokens:
            raise ValueError(f"{what} ends beyond the prompt of {num_tokens} tokens")
        if span.start < num_cut < span.end:
            raise ValueError(f"truncate_prompt_tokens cuts {what} in two; leave it whole or out")
    return tuple(dataclasses.replace(span, start=span.start - num_cut) for span in media if span.start >= num_cut)
