"""Collected: one request's deltas so far, and the output that they are."""

from __future__ import annotations

import contextlib
import functools
from array import array
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, TypeVar

from ferrum_jax.core.delta import Delta, Entry
from ferrum_jax.core.outputs import Logprob, RequestOutput
from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.sampling_params import SamplingParams
from ferrum_jax.text.output_processor.choice_text import ChoiceText, NewText, TokenTexts

Output = TypeVar("Output")


class Collector(NamedTuple):
    """The makers of outputs of a model's requests."""

    texts: TokenTexts
    max_model_len: int

    def collected(self, token_ids: Sequence[int], sampling: SamplingParams, options: RequestOptions) -> Collected:
        """A request that is about to run, whose deltas come one by one. token_ids: of its prompt as it is given."""
        return Collected(self, token_ids, sampling, options)


class Collected:
    """Takes the deltas of one request. num_cached_tokens: of its prompt, from the prefix cache."""

    def __init__(
        self, by: Collector, token_ids: Sequence[int], sampling: SamplingParams, options: RequestOptions
    ) -> None:
        most = sampling.most_prompt_tokens(by.max_model_len)
        kept = token_ids if most is None or options.scores is not None else token_ids[-most:]
        self._kept, self._num_cut = kept, len(token_ids) - len(kept)
        self.streams = options.streams
        self.num_cached_tokens = 0
        self.has_ended = False
        self._texts, self._sampling, self._options = by.texts, sampling, options
        self._prompt_logprobs: Sequence[Entry | None] | None = None
        self._named: Sequence[Sequence[float]] | None = None
        self._id = 0

    @functools.cached_property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt's token ids that run."""
        return tuple(array("i", self._kept))

    @functools.cached_property
    def prompt(self) -> str | None:
        """Its text: as it was given, or where it is echoed and was not, or not all of it runs, its tokens'."""
        given, tokenizer = self._options.prompt, self._texts.tokenizer
        if not self._sampling.echo or tokenizer is None or (given is not None and not self._num_cut):
            return given
        return tokenizer.decode(self.prompt_token_ids, skip_special_tokens=self._sampling.skip_special_tokens)

    @functools.cached_property
    def choices(self) -> Sequence[ChoiceText]:
        """Its choices; made when their first token comes, for the engine checks the prompt before."""
        sampling, options, texts = self._sampling, self._options, self._texts
        return [
            ChoiceText(
                index,
                sampling,
                self.prompt_token_ids,
                texts,
                echoed=(self.prompt or "") if sampling.echo else "",
                message=texts.message(sampling, self.prompt_token_ids, options.tools) if options.is_chat else None,
                grows=self.streams,
            )
            for index in range(sampling.n)
        ]

    def take(self, delta: Delta) -> None:
        """Keeps what is new; no text is made."""
        self._note(delta)
        self.choices[delta.choice].take(delta)

    def push(self, delta: Delta) -> list[NewText]:
        """The delta's new texts."""
        self._note(delta)
        return self.choices[delta.choice].push(delta)

    def _note(self, delta: Delta) -> None:
        self._id, self.num_cached_tokens = delta.id, delta.num_cached_tokens
        self.has_ended = delta.is_last
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = delta.prompt_logprobs
        if delta.named_logprobs is not None:
            self._named = delta.named_logprobs

    def output(self) -> RequestOutput:
        """All of it so far."""
        options, cached = self._options, self.num_cached_tokens
        ends = [span.end - self._num_cut for span in options.media if span.start >= self._num_cut]
        digests = tuple([image.digest.hex() for image in options.images])
        besides = [choice.beside for choice in self.choices]
        return RequestOutput(
            request_id=self._id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=tuple([choice.whole(digests) for choice in self.choices]),
            num_cached_tokens=cached,
            num_cached_media=sum(end <= cached for end in ends),
            prompt_logprobs=self._of_prompt(),
            prompt_token_id_logprobs=None if self._named is None else tuple(map(tuple, self._named)),
            finished=self.has_ended,
            weights_version=max(each.weights_version for each in besides),
            embedding=besides[0].embedding,
            scores=next((each.scores for each in besides if each.scores is not None), None),
        )

    def _of_prompt(self) -> tuple[dict[int, Logprob] | None, ...] | None:
        if self._prompt_logprobs is None:
            return None
        texts, sampling = self._texts, self._sampling
        start = 1 if texts.starts(self.prompt_token_ids[:1], sampling) else None  # the first token has no entry
        return tuple(texts.entries(self._prompt_logprobs, named=sampling.detokenize, start=start))


def failure_of(output: RequestOutput) -> ValueError | None:
    """Why one of its choices could not go on; None where all could."""
    failed = next((choice for choice in output.outputs if choice.finish_reason == "error"), None)
    return None if failed is None else ValueError(failed.stop_reason)


def in_order(
    outputs: Generator[tuple[int, Output | ValueError], None, None],
    advance: Callable[[Output], None],
    *,
    what: str = "prompt",
) -> list[Output]:
    """The outputs of prompts in the order of their numbers. advance: is given each as it comes. what: they are of.

    Raises ValueError naming the prompt that is refused; the rest is not computed then.
    """
    found: dict[int, Output] = {}
    with contextlib.closing(outputs):
        for number, output in outputs:
            if isinstance(output, ValueError):
                raise ValueError(f"{what} {number}: {output}") from output
            found[number] = output
            advance(output)
    return [found[number] for number in sorted(found)]
