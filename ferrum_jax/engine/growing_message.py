"""GrowingMessage: an assistant's message so far, of a chat that is streamed.

Marks of calls and of reasoning may be special tokens, so its text is not the one that the user sees: it has those too,
where no stop string may cut it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ferrum_jax.asked.options import RequestOptions
from ferrum_jax.asked.sampling import SamplingParams
from ferrum_jax.structured.reading.message_parser import NO_FORMS, PROMPT_END_TOKENS, MessageForms
from ferrum_jax.structured.reading.message_stream import MessageStream
from ferrum_jax.text.stream import TextStream
from ferrum_jax.text.tokenizer import Tokenizer


class GrowingMessage:
    """What is certain of the message of one choice."""

    def __init__(self, text: TextStream, stream: MessageStream, forms: MessageForms) -> None:
        self._text, self._stream, self._forms = text, stream, forms
        self.so_far = forms.joined(())

    def push(self, token_id: int) -> None:
        self._text.push(token_id)
        self.so_far = self._forms.joined([self.so_far, *self._stream.feed(self._text.take())])


def message_stream(
    options: RequestOptions,
    sampling: SamplingParams,
    prompt_token_ids: Sequence[int],
    tokenizer: Tokenizer | None,
    forms: MessageForms,
) -> MessageStream | None:
    """What takes an answer's text apart; None where it is no chat's, has no text, or its model has no forms."""
    if tokenizer is None or not sampling.detokenize or not options.is_chat or forms == NO_FORMS:
        return None
    prompt_end = tokenizer.decode(prompt_token_ids[-PROMPT_END_TOKENS:], skip_special_tokens=False)
    return forms.stream(
        tools=options.tools,
        is_open=forms.is_open_after(prompt_end),
        specials=tokenizer.special_texts() if sampling.skip_special_tokens else (),
    )


def growing_message(
    options: RequestOptions,
    sampling: SamplingParams,
    prompt_token_ids: Sequence[int],
    tokenizer: Tokenizer | None,
    forms: MessageForms,
) -> GrowingMessage | None:
    """The message of a choice that is streamed; None as in `message_stream`."""
    stream = message_stream(options, sampling, prompt_token_ids, tokenizer, forms) if options.streams else None
    if stream is None or tokenizer is None:
        return None
    text = TextStream(
        tokenizer,
        stop=tuple(sampling.stop),
        include_stop=sampling.include_stop_str_in_output,
        min_tokens=sampling.min_tokens,
        skip_special_tokens=bool(sampling.stop) and sampling.skip_special_tokens,
        after=prompt_token_ids,
    )
    return GrowingMessage(text, stream, forms)
