"""A stand-in for the engine: answers are a function of prompt and parameters, in shuffled order of completion."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Hashable, Iterable, Iterator

from ferrum_jax.request import CompletionOutput, Logprob, RequestOutput, SamplingParams


class FakeLLM:
    """Holds up to `width` requests at once; prompts longer than `limit` are refused."""

    def __init__(self, *, order: int = 0, width: int = 4, limit: int = 1000, interrupt_after: int | None = None):
        self.random, self.width, self.limit = random.Random(order), width, limit
        self.interrupt_after = interrupt_after
        self.num_pulled = self.num_answered = self.most_ahead = 0
        self.is_closed = False

    def as_completed(
        self, requests: Iterable[tuple[Hashable, object, SamplingParams]]
    ) -> Iterator[tuple[Hashable, RequestOutput | ValueError]]:
        running = []
        try:
            for request in requests:
                self.num_pulled += 1
                running.append(request)
                self.most_ahead = max(self.most_ahead, len(running))
                if len(running) == self.width:
                    yield self._finish(running)
            while running:
                yield self._finish(running)
        finally:
            self.is_closed = True

    def _finish(self, running: list) -> tuple[Hashable, RequestOutput | ValueError]:
        if self.num_answered == self.interrupt_after:
            raise KeyboardInterrupt
        self.num_answered += 1
        key, prompt, params = running.pop(self.random.randrange(len(running)))
        if len(prompt) > self.limit:
            return key, ValueError(f"the prompt has {len(prompt)} tokens, more than {self.limit}")
        return key, answer(prompt, params)


def answer(prompt: object, params: SamplingParams) -> RequestOutput:
    """Tokens that differ by prompt, seed and choice, with logprobs where they are asked for."""
    prompt_ids = (
        tuple(prompt) if isinstance(prompt, list) and isinstance(prompt[0], int) else tuple(str(prompt).encode())
    )
    choices = tuple(_choice(prompt_ids, params, index) for index in range(params.n))
    tops = None
    if params.prompt_logprobs is not None:
        tops = (None, *({token: Logprob(logprob=-1.5, rank=1)} for token in prompt_ids[1:]))
    return RequestOutput(
        request_id=0,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=prompt_ids,
        outputs=choices,
        num_cached_tokens=len(prompt_ids) // 2,
        prompt_logprobs=tops,
    )


def _choice(prompt_ids: tuple[int, ...], params: SamplingParams, index: int) -> CompletionOutput:
    seed = repr((prompt_ids, params.seed, index)).encode()
    digest = hashlib.blake2b(seed, digest_size=min(params.max_tokens or 8, 64)).digest()
    token_ids = tuple(97 + byte % 26 for byte in digest)
    logprobs = None
    if params.logprobs is not None:
        logprobs = tuple(
            {token: Logprob(logprob=-0.1 - byte / 3, rank=1, decoded_token=chr(token))}
            for token, byte in zip(token_ids, digest, strict=True)
        )
    return CompletionOutput(
        index=index,
        text="".join(map(chr, token_ids)),
        token_ids=token_ids,
        cumulative_logprob=None,
        logprobs=logprobs,
        finish_reason="length",
        stop_reason=None,
    )
