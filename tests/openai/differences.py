"""Where the doors differ about one body: why, by section. The answers themselves are in answers/."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

BySection = Mapping[str, Sequence[str]]

ANSWERED_ELSEWHERE: Mapping[str, BySection] = {
    "only streams have their options": {
        "completions": ("what streams say of their use", "use in every chunk"),
        "completions_refused": ("stream = yes", "stream_options = {'include_usage': True}"),
        "chats": ("what streams say of their use", "use in every chunk"),
        "responses_refused": ("stream = 1",),
    },
    "no stream has log-probabilities of the prompt": {
        "completions": (
            "log-probabilities of the prompt",
            "log-probabilities of tokens that are named",
            "log-probabilities of tokens that are named one by one",
            "an echo with log-probabilities",
            "an echo alone with log-probabilities",
            "several lists that come back",
        ),
        "chats": ("log-probabilities of the prompt", "log-probabilities of tokens that are named"),
    },
    "every log-probability of a prompt is too much for HTTP": {"completions": ("every log-probability of the prompt",)},
    "a row has no id, no timeout and no server of its own": {
        "completions": ("when it is to run", "a name of its own", "labels of a server"),
        "completions_refused": ("service_tier = 5",),
        "chats": ("when it is to run",),
        "chats_refused": ("service_tier = flex",),
        **dict.fromkeys(("embeddings", "scores", "rankings"), ("urgent",)),
    },
    "a server has limits": {
        "completions_refused": ("n = 9", "more choices than are made", "more prompts than are taken"),
    },
    "a call draws a token at least": {"completions": ("an echo alone",)},
    "AsyncLLM says so in its output where a structure does not compile": {
        "completions_refused": ("structured_outputs = {'regex': '('}", "a pattern that is none for several"),
    },
    "a call is given texts themselves": {"scores": ("texts in objects",)},
    "a call takes what Python can read": {
        "completions_refused": ("logit_bias = {'05': 1, '5': 1}", "prompt = 5"),
        "chats_refused": (
            "messages = []",
            "messages = [{'role': 'assistant', 'content': '', 'reasoning': 5}]",
            "messages = [{'role': 'user', 'content': 'x', 'more': 1}]",
            "tools = [{'type': 'function', 'function': {'name': 'a b'}}]",
            "tools = [{'type': 'function', 'function': {'name': 'go', 'parameters': {'type'",
        ),
        "embeddings_refused": (
            "input = []",
            "normalize = 1",
            "prompt_name = {}",
            "truncate = yes",
        ),
        "scores_refused": ("text_1 = ", "text_2 = ", "text_2 = []", "truncate = yes"),
    },
}

# Refused by a row and over HTTP, in other words: a limit, a name or advice that is of one of them.
OTHER_WORDS: BySection = {
    "completions_refused": (
        *("adapter = poet", "adapter = 5", "model = other", "prompt = None", "store = True"),
        *(
            "max_tokens = 10000",
            "prompt = " + "x " * 35,
            "request_id = no spaces",
            "stream = yes",
            "stream_options = {'more': 1}",
        ),
        *("stream_options = {'include_usage': True}", "timeout = 0", "temprature = 1", "many problems"),
    ),
    "chats_refused": (
        *("adapter = poet", "messages = None", "prompt = x", "request_id = ", "store = True", "unknown = 1"),
        *("messages = [{'role': 'user', 'content': '" + "x " * 20, "stream_options = {'include_usage': 'yes'}"),
    ),
    "embeddings_refused": (
        *("input = None", "prompt = x", "model = other", "timeout = 0", "unknown = 1"),
        *(
            "adapter = poet",
            "request_id = r",
            "store = True",
            "stream = True",
            "stream_options = {}",
            "temperature = 1",
        ),
    ),
}

# A call gives another answer: the echo of a chat is not that of its last message.
OTHER_ANSWERS: BySection = {"chats": ("an echo of what goes on",)}
