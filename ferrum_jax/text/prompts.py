"""Prompts to token ids: text through the tokenizer, chat messages through the checkpoint's template first."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ferrum_jax.prompt import Content, Message
from ferrum_jax.text.chat import ChatTemplate
from ferrum_jax.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptEncoder:
    """What a checkpoint has for text; either may be missing."""

    tokenizer: Tokenizer | None
    chat: ChatTemplate | None

    def token_ids(self, prompt: Content) -> Sequence[int]:
        """The ids of a prompt. Raises ValueError for what is no prompt, or what the checkpoint has no means for."""
        if isinstance(prompt, str):
            return self._encode(prompt, add_special_tokens=True)
        if isinstance(prompt, bytes) or not isinstance(prompt, Sequence | np.ndarray):
            raise ValueError(f"the prompt is {prompt!r}; it must be a string, a list of token ids, or chat messages")
        if len(prompt) and isinstance(prompt[0], Mapping):
            return self.chat_ids(prompt)  # type: ignore[arg-type]
        return prompt  # type: ignore[return-value]

    def chat_ids(self, messages: Sequence[Message], **arguments: Any) -> list[int]:
        """The ids of a conversation; special tokens are those that the template writes."""
        return self._encode(self.render_chat(messages, **arguments), add_special_tokens=False)

    def render_chat(self, messages: Sequence[Message], **arguments: Any) -> str:
        """The text that the checkpoint's chat template makes of messages.

        Raises ValueError for an argument that the template never reads, so that none is dropped in silence.
        """
        if self.chat is None:
            raise ValueError("the checkpoint has no chat template; give a plain prompt, or LLM(tokenizer=...) with one")
        given = {name for name, value in arguments.items() if name != "tools" or value}
        unread = sorted(given - self.chat.variables - {"add_generation_prompt"})
        if unread:
            raise ValueError(
                f"the chat template reads no {' and no '.join(unread)}; leave it out, or put it into a message"
            )
        return self.chat.render(messages, **arguments)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if self.tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer; give token ids, or LLM(tokenizer=...)")
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
