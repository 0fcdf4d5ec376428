"""Bodies of /v1/completions. Each is one wish, so that what a door does with it is told by one row."""

from __future__ import annotations

from typing import Any

PROMPT = "def main(arguments):"
_SHORT = {"max_tokens": 4, "temperature": 0}
PLACES = {"type": "object", "properties": {"to": {"enum": ["Köln", "Rom"]}}, "required": ["to"]}
PLACES["additionalProperties"] = False
TOOLS = [
    {"type": "function", "function": {"name": "go", "parameters": PLACES}},
    {"type": "function", "function": {"name": "stop"}},
]
# What asks for nothing, and is taken wherever it is given.
HARMLESS: dict[str, Any] = {"stream": False, "suffix": "", "best_of": 1, "use_beam_search": False}
HARMLESS |= {"logits_processors": [], "spaces_between_special_tokens": True, "extra_args": {}, "tools": []}
HARMLESS |= {"tool_choice": "none", "store": False, "functions": [], "function_call": "none", "modalities": ["text"]}
HARMLESS |= {"include_reasoning": True, "logprob_token_ids": [], "continue_final_message": False}
HARMLESS |= {"chat_template_kwargs": {}}


def text(**fields: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, **_SHORT, **fields}


def form(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "p", "schema": schema}}


_ANSWERED = {
    "a text": text(),
    "a text by its defaults": {"prompt": PROMPT, "temperature": 0},
    "token ids": text(prompt=[7, 8, 9]),
    "token ids that come back": text(prompt=[7, 8, 9], return_token_ids=True),
    "token ids that do not": text(prompt=[7, 8, 9], return_token_ids=False),
    "several texts": text(prompt=[PROMPT, "class A:"]),
    "several lists of token ids": text(prompt=[[7, 8, 9], [20, 30]]),
    "several lists that come back": text(prompt=[[7, 8, 9], [20, 30]], return_token_ids=True, prompt_logprobs=0),
    "text that comes with its ids": text(return_token_ids=True),
    "several choices": text(n=2, temperature=0.9, seed=5),
    "several choices of several texts": text(prompt=[PROMPT, "x"], n=2, temperature=0.9, seed=5),
    "drawn": text(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=7),
    "penalties": text(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.5),
    "a bias": text(logit_bias={"50": 100}, max_tokens=2),
    "a token that is forbidden": text(logit_bias={"50": -100}),
    "only some tokens": text(allowed_token_ids=[50, 51, 52]),
    "bad words": text(bad_words=["zz"]),
    "log-probabilities": text(logprobs=2, max_tokens=2),
    "log-probabilities of what is chosen": text(logprobs=0, max_tokens=2),
    "log-probabilities by ids": text(logprobs=1, max_tokens=2, return_token_ids=True, return_tokens_as_token_ids=True),
    "log-probabilities of the prompt": text(prompt=[7, 8, 9], prompt_logprobs=1, max_tokens=1),
    "log-probabilities of tokens that are named": text(
        prompt=[[7, 8, 9], [7, 8, 10]], prompt_logprob_token_ids=[5, 6], prompt_logprob_start=1, max_tokens=1
    ),
    "log-probabilities of tokens that are named one by one": text(
        prompt=[7, 8, 9], prompt_logprob_token_ids=[[5], []], max_tokens=1
    ),
    "every log-probability of the prompt": text(prompt=[7, 8], prompt_logprobs=-1, max_tokens=1, logit_bias=None),
    "an echo": text(echo=True),
    "an echo alone": text(echo=True, max_tokens=0),
    "an echo with log-probabilities": text(prompt="x y", echo=True, logprobs=1, max_tokens=2),
    "an echo alone with log-probabilities": text(
        prompt="x y", echo=True, logprobs=1, max_tokens=0, return_token_ids=True
    ),
    "an echo of several": text(prompt=["x", "y"], echo=True, n=2),
    "a stop string": text(max_tokens=12, stop="k/"),
    "a stop string that is shown": text(max_tokens=12, stop=["k/", "\n\n"], include_stop_str_in_output=True),
    "a stop token": text(max_tokens=12, stop_token_ids=[17]),
    "at least some tokens": text(min_tokens=2, stop_token_ids=[50], ignore_eos=True),
    "special tokens": text(prompt=[7, 0, 8], skip_special_tokens=False, echo=True),
    "no special tokens": text(add_special_tokens=False),
    "no text": text(detokenize=False),
    "the end of a prompt": text(truncate_prompt_tokens=3),
    "a salt": text(cache_salt="mine"),
    "labels": text(model="small", user="u", metadata={"a": "b"}, prompt_cache_key="k", prompt_cache_retention="24h"),
    "labels of any kind": text(user=5, metadata=5, prompt_cache_key={}),
    "nulls": text(stop=None, logprobs=None, n=None, seed=None, suffix=None, unknown=None),
    "a choice": text(structured_outputs={"choice": ["yes", "no"]}, max_tokens=20),
    "a pattern": text(structured_outputs={"regex": "[a-c]{2}"}, max_tokens=20),
    "an object": text(response_format=form(PLACES), max_tokens=60),
    "an object of a word that is not known": text(structured_outputs={"json": {**PLACES, "hue": 1}}, max_tokens=60),
    "plain text": text(response_format={"type": "text"}),
    "all that is harmless": text(**HARMLESS, documents=[], priority=0, service_tier="auto"),
    "what streams say of their use": text(stream=True, stream_options={"include_usage": True}),
    "use in every chunk": text(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}),
    "when it is to run": text(priority=-1, timeout=60.0),
    "a name of its own": text(request_id="its-own"),
    "without drafts": text(speculative=False),
    "labels of a server": text(service_tier="flex", safety_identifier="s"),
}
_WRONG: dict[str, list[Any]] = {
    "adapter": ["poet", 5],
    "add_special_tokens": [1],
    "allowed_token_ids": [[], 5, [1.5]],
    "audio": [{}],
    "bad_words": ["a", [" "]],
    "best_of": [3],
    "cache_salt": [5, ""],
    "chat_template": ["{}"],
    "chat_template_kwargs": [{"a": 1}],
    "continue_final_message": [True],
    "detokenize": ["no"],
    "dimensions": [3],
    "documents": [["d"]],
    "echo": [1],
    "encoding_format": ["float"],
    "extra_args": [{"a": 1}],
    "frequency_penalty": [3],
    "function_call": ["auto"],
    "functions": [[{"name": "f"}]],
    "guided_decoding": [{"choice": ["a"]}],
    "ignore_eos": [1],
    "include_reasoning": [False],
    "include_stop_str_in_output": [1],
    "input": ["x"],
    "logit_bias": [[], {"x": 1}, {"5": 101}, {"5": "-inf"}, {"05": 1, "5": 1}],
    "logits_processors": [["p"]],
    "logprob_token_ids": [[5]],
    "logprobs": [21, True, -1],
    "max_tokens": [0, -1, 2.5, 10_000],
    "min_p": [2],
    "min_tokens": [9],
    "modalities": [["audio"]],
    "model": [5, "other"],
    "n": [0, 9, "2"],
    "output_kind": [1],
    "parallel_tool_calls": [True],
    "prediction": [{}],
    "presence_penalty": ["x"],
    "priority": [2, "high"],
    "prompt": [
        *("", [], [[]], ["x", 5], 5, {"a": 1}, [-1], [400], [2**31], "x " * 300, None),
        *(["x", ""], [["x"]], [[1], [2, -1]], [True]),
    ],
    "prompt_logprob_start": [1, -1],
    "prompt_logprob_token_ids": [5, [], [[5.5]], [[5]] * 99, [[5] * 129]],
    "prompt_logprobs": [21],
    "reasoning_effort": ["low"],
    "repetition_penalty": [0],
    "request_id": ["no spaces"],
    "response_format": [
        *({"type": "yaml"}, "json", {"type": "json_schema"}, form({"type": "objekt"})),
        *({"type": "json_schema", "json_schema": each} for each in ({"name": "a"}, {"schema": {}, "strict": "yes"})),
    ],
    "return_token_ids": ["yes"],
    "return_tokens_as_token_ids": ["yes"],
    "seed": [2.5, 2**64],
    "service_tier": [5],
    "skip_special_tokens": ["yes"],
    "spaces_between_special_tokens": [False],
    "speculative": ["yes"],
    "stop": [[""], 5],
    "stop_token_ids": [5, ["x"]],
    "store": [True],
    "stream": ["yes"],
    "stream_options": [{"include_usage": True}, {"more": 1}],
    "structured_outputs": [
        *({}, {"choice": []}, {"regex": "("}, {"regex": 5}, {"json": {"type": "x"}}, {"json": {"not": {}}}, "json")
    ],
    "suffix": ["end"],
    "temperature": [-1, "hot", 10**400],
    "timeout": [0],
    "tool_choice": ["auto"],
    "tools": [TOOLS],
    "top_k": [2.5],
    "top_p": [0],
    "truncate_prompt_tokens": [0],
    "use_beam_search": [True],
    "temprature": [1],
}


def wrong(known: dict[str, list[Any]], body: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A body for each wrong value, named after it."""
    each = [(name, value) for name, values in known.items() for value in values]
    found = {f"{name} = {str(value)[:70]}": {**body, name: value} for name, value in each}
    assert len(found) == len(each), "two values begin alike"
    return found


COMPLETIONS = _ANSWERED
WRONG_COMPLETIONS = wrong(_WRONG, text()) | {
    "many problems": text(**{f"unknown_{i}": i for i in range(12)}),
    "two structures": text(response_format={"type": "json_object"}, structured_outputs={"choice": ["a"]}),
    "more choices than are made": text(prompt=["x"] * 3, n=6, max_tokens=1),
    "more prompts than are taken": text(prompt=["x"] * 17, max_tokens=1),
    "no structure beside ignore_eos": text(ignore_eos=True, structured_outputs={"choice": ["a"]}),
    "a stop string without text": text(stop="e", detokenize=False),
    "fewer tokens than at least": text(min_tokens=5, max_tokens=4),
    "an echo alone without text": text(echo=True, max_tokens=0, detokenize=False),
    "a pattern that is none for several": text(structured_outputs={"regex": "("}, n=2),
    "a stream of an unknown option": text(stream=True, stream_options={"more": 1}),
    "a stream of a wrong option": text(stream=True, stream_options={"include_usage": 1}),
    "a stream of tokens that are named": text(prompt_logprob_token_ids=[5], stream=True),
    "a stream of the prompt's log-probabilities": text(prompt_logprobs=1, stream=True),
}
