"""Answers in OpenAI's forms, whatever the door: a body, to which a job adds an envelope and a server its id.

Which fields a body has decides its bytes, so they are made in one order: a field that a door does not tell is left out.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ferrum_jax.core.outputs import CompletionOutput, RequestOutput
from ferrum_jax.inputs.params.message import AssistantMessage, ToolCall
from ferrum_jax.openai.asked import PLAIN, AnswerOptions
from ferrum_jax.openai.logprob_forms import (
    by_token_id,
    chat_logprobs,
    choice_entries,
    completion_logprobs,
    echo_entries,
    number,
)

_ID_CHARACTERS = 9  # letters and digits, as some families' templates demand of the ids that they are given back


def call_id(call: ToolCall, request: str, choice: int, place: int) -> str:
    """The id of a call: the one that the model gave it, else the same for the same request.

    place: of the call among those of its choice.
    """
    return (
        call.id or hashlib.blake2b(f"{request} {choice} {place}".encode(), digest_size=16).hexdigest()[:_ID_CHARACTERS]
    )


def tool_call(call: ToolCall, call_id: str) -> dict[str, Any]:
    """One call of a message."""
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def assistant_message(
    said: AssistantMessage, *, request: str, choice: int, before: str = "", shows_reasoning: bool = True
) -> dict[str, Any]:
    """The message of a choice. before: what its content begins with, of a message that was continued."""
    content = None if said.tool_calls and not said.content else before + said.content
    found: dict[str, Any] = {"role": "assistant", "content": content}
    if shows_reasoning and said.reasoning is not None:
        found["reasoning"] = said.reasoning
    if said.tool_calls:
        calls = enumerate(said.tool_calls)
        found["tool_calls"] = [tool_call(call, call_id(call, request, choice, place)) for place, call in calls]
    return found


def finish_reason_of(finish_reason: str | None, *, has_calls: bool) -> str | None:
    """OpenAI's word for how a choice ended: a text that ended by itself and calls tools ended for them."""
    return "tool_calls" if has_calls and finish_reason == "stop" else finish_reason


class TextForm(NamedTuple):
    """How a completion or a chat's answer is written. id: of what is asked, which ids of calls follow from.

    before: what a chat's answer begins with. echo, generates: a completion has its prompt, and more than that.
    tells_run: what a run did is told too: cached tokens, what stopped a choice, the prompt's tokens.
    """

    id: str
    is_chat: bool
    options: AnswerOptions = PLAIN
    before: str = ""
    echo: bool = False
    generates: bool = True
    returns_token_ids: bool = False
    tells_run: bool = False

    @property
    def kind(self) -> str:
        """The beginning of the answer's id."""
        return "chatcmpl" if self.is_chat else "cmpl"

    @property
    def object(self) -> str:
        return "chat.completion" if self.is_chat else "text_completion"


def text_answer(form: TextForm, outputs: Sequence[RequestOutput], head: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a completion or a chat. outputs: of its prompts, whose choices are numbered prompt by prompt."""
    pairs = [(output, choice) for output in outputs for choice in output.outputs]
    usage = usage_of(
        sum([len(output.prompt_token_ids) for output in outputs]),
        sum([len(choice.token_ids) for _, choice in pairs]) if form.generates else 0,
        sum([output.num_cached_tokens for output in outputs]) if form.tells_run else None,
    )
    choices = [_choice(form, index, output, choice) for index, (output, choice) in enumerate(pairs)]
    answer = {**head, "choices": choices, "usage": usage}
    return answer | _of_prompt(form, outputs[0]) if form.is_chat else answer


def usage_of(num_prompt: int, num_generated: int, num_cached: int | None) -> dict[str, Any]:
    """num_cached: None where it is not told."""
    found: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
    }
    return found if num_cached is None else found | {"prompt_tokens_details": {"cached_tokens": num_cached}}


def _choice(form: TextForm, index: int, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
    found: dict[str, Any] = {"index": index}
    if form.is_chat:
        found["message"] = _message(form, choice)
        found["logprobs"] = None if choice.logprobs is None else {"content": chat_logprobs(choice, form.options)}
    else:
        found["text"] = choice.text if form.generates else output.prompt or ""
        found["logprobs"] = None if choice.logprobs is None else _completion_logprobs(form, output, choice)
    has_calls = choice.message is not None and bool(choice.message.tool_calls)
    found["finish_reason"] = finish_reason_of(choice.finish_reason, has_calls=has_calls)
    if form.tells_run:
        found["stop_reason"] = choice.stop_reason
    if form.returns_token_ids:
        found["token_ids"] = list(choice.token_ids) if form.generates else []
    return found if form.is_chat else found | _of_prompt(form, output)


def _message(form: TextForm, choice: CompletionOutput) -> dict[str, Any]:
    """The assistant's message: its answer, and where the model's template shows them, reasoning and tool calls."""
    if choice.message is None:
        return {"role": "assistant", "content": form.before + choice.text}
    shows = form.options.shows_reasoning
    return assistant_message(
        choice.message, request=form.id, choice=choice.index, before=form.before, shows_reasoning=shows
    )


def _completion_logprobs(form: TextForm, output: RequestOutput, choice: CompletionOutput) -> dict[str, list[Any]]:
    """A choice's log-probabilities, an echo's first."""
    first, entries = echo_entries(output) if form.echo else (None, [])
    entries += choice_entries(choice) if form.generates else ()
    return completion_logprobs(entries, first=first, ids_as_names=form.options.ids_as_names)


def _of_prompt(form: TextForm, output: RequestOutput) -> dict[str, Any]:
    """Fields about a prompt: beside a chat's choices, and in each choice of a completion."""
    found: dict[str, Any] = {}
    if output.prompt_logprobs is not None:
        found["prompt_logprobs"] = [entry and by_token_id(entry) for entry in output.prompt_logprobs]
    if output.prompt_token_id_logprobs is not None:
        found["prompt_token_id_logprobs"] = [list(map(number, row)) for row in output.prompt_token_id_logprobs]
    if form.returns_token_ids and form.tells_run:
        found["prompt_token_ids"] = list(output.prompt_token_ids)
    return found


def vectors_answer(
    vectors: Sequence[np.ndarray], num_tokens: int, head: Mapping[str, Any], *, as_base64: bool
) -> dict[str, Any]:
    """The body of /v1/embeddings. vectors: [D] float32 each, of the texts in their order."""
    data = [
        {"object": "embedding", "index": index, "embedding": _plain(vector, as_base64=as_base64)}
        for index, vector in enumerate(vectors)
    ]
    return {"object": "list", "data": data, **head, "usage": read_usage(num_tokens)}


def classes_answer(found: Sequence[tuple[str, np.ndarray]], num_tokens: int, head: Mapping[str, Any]) -> dict[str, Any]:
    """The body of /classify, as vLLM has it. found: the label of each text, and the probabilities of all labels."""
    data = [
        {"index": index, "label": label, "probs": _plain(probs, as_base64=False), "num_classes": len(probs)}
        for index, (label, probs) in enumerate(found)
    ]
    return {"object": "list", "data": data, **head, "usage": read_usage(num_tokens)}


def rewards_answer(rewards: Sequence[float], num_tokens: int, head: Mapping[str, Any]) -> dict[str, Any]:
    """The body of /pooling of a reward model, as vLLM has it."""
    data = [{"object": "pooling", "index": index, "data": [number(each)]} for index, each in enumerate(rewards)]
    return {"object": "list", "data": data, **head, "usage": read_usage(num_tokens)}


def _plain(vector: np.ndarray, *, as_base64: bool) -> Any:
    if as_base64:
        return base64.b64encode(np.ascontiguousarray(vector, "<f4").tobytes()).decode()
    return [number(value) for value in vector.tolist()]


def read_usage(num_tokens: int) -> dict[str, int]:
    """The usage of texts that are only read."""
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def ranking(scores: Sequence[float], top_n: int | None, documents: Sequence[str] | None) -> list[dict[str, Any]]:
    """The results of /v1/rerank: documents by their scores, best first. documents: the texts, where they are shown."""
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:top_n]
    found: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in order]
    for result in found if documents is not None else ():
        result["document"] = {"text": documents[result["index"]]}  # type: ignore[index]
    return found
