"""Scores of pairs by a model that generates: its logits of "yes" and "no" after a prompt that holds both texts.

Only two logits are made, on the host, from the final hidden state of the prompt's last token. The prompt is what the
folder's chat template makes of a message of the role "query" and one of the role "document", before them perhaps an
instruction as the message of the system.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.sentence import LogitScore, SentenceLayout
from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.models.spec import ModelSpec
from ferrum_jax.tasks.scorer import Pair, both_of, require_length, sigmoid
from ferrum_jax.tasks.task import ONE_TOKEN, EngineRequest
from ferrum_jax.text.chat import ChatTemplate
from ferrum_jax.text.tokenizer import Tokenizer, require_tokenizer

_FILLERS = "a", "0"  # texts that end in different tokens
# The prompt of Qwen3-Reranker, whose folders have a template of it only since they name a LogitScore.
_QWEN3_RERANKER = """\
{%- set said = messages | selectattr("role", "equalto", "system") | map(attribute="content") | list -%}
<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. \
Note that the answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {{ said[0] if said else "Given a web search query, retrieve relevant passages that answer the query" }}
<Query>: {{ messages | selectattr("role", "equalto", "query") | map(attribute="content") | first }}
<Document>: {{ messages | selectattr("role", "equalto", "document") | map(attribute="content") | first -}}
<|im_end|>
<|im_start|>assistant
<think>

</think>{{ "\\n\\n" }}"""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenLogits:
    """The logits of a few tokens. rows: their vectors in the head, [n, D] float32; bias: [n] float32, or none."""

    rows: np.ndarray
    scale: float
    cap: float | None
    bias: np.ndarray | None = None

    @classmethod
    def of(cls, spec: ModelSpec, weights: Mapping[str, jax.Array], token_ids: Sequence[int]) -> TokenLogits:
        """Raises ValueError for a head whose weights are quantised."""
        name = "embed.weight" if spec.tie_word_embeddings else "head.weight"
        if name not in weights:
            raise ValueError(
                f"{spec.architecture} has a quantised head, and scores are made of dense vectors of tokens; name a "
                "checkpoint whose lm_head is dense"
            )
        ids = np.asarray(token_ids, np.int32)
        bias = None if spec.tie_word_embeddings else weights.get("head.bias")
        return cls(
            rows=np.asarray(_rows(weights[name], ids), np.float32),
            scale=spec.logit_scale,
            cap=spec.final_logit_softcapping,
            bias=None if bias is None else np.asarray(_rows(bias, ids), np.float32),
        )

    def __call__(self, state: np.ndarray) -> np.ndarray:  # [D] -> [n] float64
        logits = self.rows.astype(np.float64) @ state.astype(np.float64)
        logits = self.scale * (logits if self.bias is None else logits + self.bias)
        return logits if self.cap is None else self.cap * np.tanh(logits / self.cap)


@jax.jit
def _rows(weight: jax.Array, ids: jax.Array) -> jax.Array:  # [V, ...], [n] -> [n, ...]
    return jnp.take(weight, ids, axis=0)


class PairTemplate:
    """A chat template that writes a query and a document, and their token ids.

    instruction: the message of the system where a call gives none.
    """

    def __init__(
        self, chat: ChatTemplate, tokenizer: Tokenizer, arguments: Mapping[str, Any], instruction: str | None
    ) -> None:
        """arguments: of the template. Raises ValueError for one that does not write both texts."""
        self._chat, self._tokenizer, self._instruction = chat, tokenizer, instruction
        own = {key: value for key, value in arguments.items() if key != "restore_suffix"}
        self._arguments: dict[str, Any] = {"add_generation_prompt": False} | own
        if not writes_pairs(chat):
            raise ValueError(
                "the chat template does not write messages of the roles 'query' and 'document', of which pairs are "
                "made; put one that does into the folder's chat_template.jinja"
            )
        self._tail = functools.cache(self._find_tail)

    def ids(self, query: str, document: str, instruction: str | None, *, max_tokens: int, truncate: bool) -> list[int]:
        """max_tokens: a longer pair is cut before what the template writes behind it, which stays, or refused."""
        instruction = self._instruction if instruction is None else instruction
        text = self._written(query, document, instruction)
        if not truncate:
            return self._tokenizer.encode(text, add_special_tokens=False, at_most=max_tokens)
        ids = self._tokenizer.encode(text, add_special_tokens=False, max_tokens=max_tokens + 1)
        if len(ids) <= max_tokens:
            return ids
        tail = self._tail(instruction)[-max_tokens:]
        return [*ids[: max_tokens - len(tail)], *tail]

    def _written(self, query: str, document: str, instruction: str | None) -> str:
        said = [] if instruction is None else [{"role": "system", "content": instruction}]
        pair = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        return self._chat.render([*said, *pair], **self._arguments)

    def _find_tail(self, instruction: str | None) -> list[int]:
        """The tokens that stand behind every pair."""
        texts = (self._written(filler, filler, instruction) for filler in _FILLERS)
        one, other = (self._tokenizer.encode(text, add_special_tokens=False) for text in texts)
        same = [a == b for a, b in zip(reversed(one), reversed(other), strict=False)]
        length = same.index(False) if False in same else len(same)
        return one[len(one) - length :]


def writes_pairs(chat: ChatTemplate) -> bool:
    """Whether a template writes what messages of the roles "query" and "document" say."""
    marks = {"query": "a query 7f3c", "document": "a document 7f3c"}
    try:
        text = chat.render([{"role": role, "content": mark} for role, mark in marks.items()])
    except ValueError:
        return False
    return all(mark in text for mark in marks.values())


class LogitScorer:
    """score: which tokens' logits, and what is made of them. logits: of these tokens."""

    def __init__(self, template: PairTemplate, logits: TokenLogits, score: LogitScore, max_tokens: int) -> None:
        self._template, self._logits, self._score, self._max_tokens = template, logits, score, max_tokens

    @classmethod
    def of(
        cls,
        score: LogitScore,
        sentence: SentenceLayout,
        tokenizer: Tokenizer | None,
        chat: ChatTemplate | None,
        logits: TokenLogits,
        max_tokens: int,
    ) -> LogitScorer:
        """Raises ValueError without a tokenizer, and for a folder that names a score and has no template for pairs."""
        default, tokenizer = sentence.default_prompt, require_tokenizer(tokenizer, "the model")
        instruction = None if default is None else sentence.prompts.get(default)
        if chat is None or (sentence.logit_score is None and not writes_pairs(chat)):
            chat = ChatTemplate(_QWEN3_RERANKER)
        return cls(PairTemplate(chat, tokenizer, score.template, instruction), logits, score, max_tokens)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens whose logits it reads."""
        return ids_of(self._score)

    def request(self, pair: Pair, *, truncate: bool, instruction: str | None = None) -> EngineRequest:
        query, document = both_of(pair)
        ids = self._template.ids(query, document, instruction, max_tokens=self._max_tokens, truncate=truncate)
        require_length(len(ids), self._max_tokens)
        return EngineRequest(ids, ONE_TOKEN, RequestOptions(embeds=True))

    def score(self, state: np.ndarray) -> float:  # [D]
        logits = self._logits(state)
        score = float(logits[0] - logits[1:].sum())
        return sigmoid(score) if self._score.activation == "sigmoid" else score


def ids_of(score: LogitScore) -> tuple[int, ...]:
    """The one or two tokens whose logits a score is made of."""
    return (score.true_id,) if score.false_id is None else (score.true_id, score.false_id)


def score_of_tokens(texts: str, tokenizer: Tokenizer | None) -> LogitScore:
    """The score that `EngineConfig.score_tokens` asks for. Raises ValueError for texts that are not one token each."""
    tokenizer = require_tokenizer(tokenizer, "the model")
    encoded = [tokenizer.encode(text.strip(), add_special_tokens=False) for text in texts.split(",")]
    if any(len(ids) != 1 for ids in encoded):
        raise ValueError(
            f"score_tokens is {texts!r}, whose texts have {[len(ids) for ids in encoded]} tokens; each must be one "
            "token of the model, such as 'yes,no'"
        )
    ids = [ids[0] for ids in encoded]
    return LogitScore(true_id=ids[0], false_id=ids[1] if len(ids) > 1 else None)
