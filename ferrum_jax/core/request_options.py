"""RequestOptions: what is asked of a request besides its tokens and how they are drawn."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ferrum_jax.core.outputs import CompletionOutput
from ferrum_jax.inputs.params.tools import Tool, shown_tools
from ferrum_jax.inputs.prompt import EncodableImage, MediaSpan, Prompt, is_messages, take_apart


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoresAsked:
    """Log-probabilities of a sequence's tokens from position `start` on.

    processed: of what a token would be drawn from, after bias, penalties, temperature and filters, with the tokens
    before `start` as the prompt; else of the model's own distribution.
    """

    start: int
    processed: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """A request's options beside its tokens and sampling parameters.

    adapter: the name of a loaded adapter, "" for none. prompt: the text that its token ids were made of. key: tells
    equal prompts apart where no seed is given.
    priority: lower runs first. streams: what is new is given with each token, else when a choice ends. cache_salt,
    media: see `ferrum_jax.inputs.prompt`; spans count tokens of the prompt as it is given. images: those of the media
    spans of kind "image", in their order. embeds: the output has the prompt's embedding.
    pooling: how an encoder pools its states: "mean", "cls" or "last"; a decoder always gives its last token's state.
    second: where the second text of a pair begins, for an encoder that tells the two apart.
    resume: choices that `Engine.peek` gave in an earlier process; they continue after their tokens, to the same end as
    if they had never stopped. With prompt_logprobs they begin anew, and where the prompt's images are others.
    pooling: "mean", "cls" or "last", which of the states of an embedded text its vector is made of. second: where the
    second text of an embedded pair begins, in models that tell them apart.
    scores: which of the prompt's tokens are scored; what is drawn beside them is of no use.
    is_chat: the text is a whole message of an assistant, and is taken apart by the forms of the model's chat template.
    tools: that the template was given; None leaves calls in the text.
    """

    prompt: str | None = None
    adapter: str = ""
    key: str = ""
    priority: int = 0
    streams: bool = False
    cache_salt: str = ""
    media: Sequence[MediaSpan] = ()
    images: Sequence[EncodableImage] = ()
    resume: Sequence[CompletionOutput] = ()
    embeds: bool = False
    pooling: str = "last"
    second: int | None = None
    scores: ScoresAsked | None = None
    is_chat: bool = False
    tools: Sequence[Tool] | None = None

    def told_by(self, prompt: Prompt) -> RequestOptions:
        """These options with the prompt's own fields, but for its media."""
        parts = take_apart(prompt)
        return dataclasses.replace(
            self,
            prompt=parts.content if isinstance(parts.content, str) else None,
            adapter=parts.adapter or self.adapter,
            cache_salt=parts.cache_salt,
            is_chat=is_messages(parts.content) and not parts.template.get("continue_final_message"),
            tools=shown_tools(tools) if (tools := parts.template.get("tools")) else None,
        )


NO_OPTIONS = RequestOptions()
