"""Bodies of /v1/chat/completions and /v1/responses, each of one wish."""

from __future__ import annotations

from typing import Any

from tests.openai.text_bodies import HARMLESS, PLACES, TOOLS, form, wrong

CALL = '<tool_call>{"name":"go","arguments":{"to":"Rom"}}</tool_call>'
CALLS = f'{CALL}\n<tool_call>{{"name":"stop","arguments":{{}}}}</tool_call>'
SAID = f"<think>\nhm\n</think>\n\nSure.\n{CALLS}"
ASKS = [{"role": "user", "content": "Go?"}]
GOES_ON = [*ASKS, {"role": "assistant", "content": "Sure, "}]
WENT = [
    *ASKS,
    {"role": "assistant", "reasoning": "hm", "content": None, "tool_calls": [{"id": "c", "type": "function"}]},
    {"role": "tool", "tool_call_id": "c", "content": "gone"},
]
WENT[1]["tool_calls"][0]["function"] = {"name": "go", "arguments": '{"to": "Rom"}'}
_SHORT = {"max_tokens": 4, "temperature": 0}
_PARTS = [{"type": "text", "text": "Go"}, {"type": "text", "text": "?"}]
_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
_NAMED = {"type": "function", "function": {"name": "go"}}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": ASKS, **_SHORT, **fields}


def says(text: str, **fields: Any) -> dict[str, Any]:
    """A body under which the model says just this."""
    return chat(max_tokens=220, structured_outputs={"choice": [text]}, **fields)


CHATS = {
    "a message": chat(),
    "several messages": chat(messages=[{"role": "system", "content": "Be brief."}, *ASKS]),
    "parts of a text": chat(messages=[{"role": "user", "content": _PARTS, "name": "me"}]),
    "what was thought and called": chat(messages=WENT),
    "OpenAI's name for the tokens": chat(max_tokens=None, max_completion_tokens=3),
    "both names for the tokens": chat(max_tokens=3, max_completion_tokens=3),
    "up to a stop token": {"messages": ASKS, "temperature": 0, "stop_token_ids": [*range(80, 96)]},
    "several choices": chat(n=2, temperature=0.9, seed=5),
    "log-probabilities": chat(logprobs=True, max_tokens=2),
    "likely tokens": chat(logprobs=True, top_logprobs=2, max_tokens=2),
    "a count of likely tokens": chat(logprobs=2, max_tokens=1),
    "no log-probabilities": chat(logprobs=False),
    "log-probabilities by ids": chat(
        logprobs=True, top_logprobs=1, max_tokens=1, return_token_ids=True, return_tokens_as_token_ids=True
    ),
    "log-probabilities of the prompt": chat(messages=[{"role": "u", "content": ""}], prompt_logprobs=0, max_tokens=1),
    "log-probabilities of tokens that are named": chat(
        messages=[{"role": "u", "content": ""}], prompt_logprob_token_ids=[5], prompt_logprob_start=2, max_tokens=1
    ),
    "what changes nothing": chat(verbosity="low", prompt_cache_retention="in_memory"),
    "token ids": chat(return_token_ids=True),
    "no text": chat(detokenize=False),
    "a stop string": chat(max_tokens=12, stop=["e", "\x10"]),
    "a message that goes on": chat(messages=GOES_ON, continue_final_message=True, add_generation_prompt=False),
    "an echo of what goes on": chat(
        messages=GOES_ON, continue_final_message=True, add_generation_prompt=False, echo=True
    ),
    "an echo of nothing": chat(echo=True),
    "a question that goes on": chat(continue_final_message=True),
    "no beginning of an answer": chat(add_generation_prompt=False),
    "special tokens": chat(add_special_tokens=True),
    "variables of the template": chat(chat_template_kwargs={"reasoning_effort": "high"}),
    "an effort": chat(reasoning_effort="low"),
    "a salt": chat(cache_salt="mine"),
    "labels": chat(model="small", user="u", metadata={}, prompt_cache_key="k"),
    "a thought, an answer and calls": says(SAID, tools=TOOLS),
    "a thought that is left out": says(SAID, tools=TOOLS, include_reasoning=False),
    "calls without an answer": says(CALLS, tools=TOOLS, tool_choice="auto"),
    "calls with log-probabilities": says(CALL, tools=TOOLS, logprobs=True),
    "calls that must not come": says(CALL, tools=TOOLS, tool_choice="none"),
    "calls without tools": says(CALL),
    "a thought alone": says("<think>\nhm\n</think>\n\n"),
    "a call that is demanded": chat(tools=TOOLS[:1], tool_choice="required", parallel_tool_calls=False, max_tokens=80),
    "a call that is named": chat(tools=TOOLS, tool_choice=_NAMED, max_tokens=80),
    "an object": chat(response_format=form(PLACES), max_tokens=60),
    "an object of a word that is not known": chat(response_format=form({**PLACES, "hue": 1}), max_tokens=60),
    "plain text": chat(response_format={"type": "text"}),
    "without drafts": chat(speculative=False),
    "drawn": chat(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=7, min_tokens=1),
    "penalties": chat(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.5, bad_words=["zz"]),
    "only some tokens": chat(allowed_token_ids=[50, 51], logit_bias={"50": -5}, ignore_eos=True),
    "as tokens are written": chat(skip_special_tokens=False, include_stop_str_in_output=True, truncate_prompt_tokens=9),
    "all that is harmless": chat(**HARMLESS, documents=[], priority=0, service_tier="default"),
    "what streams say of their use": chat(stream=True, stream_options={"include_usage": True}),
    "use in every chunk": chat(stream=True, stream_options={"continuous_usage_stats": True}),
    "when it is to run": chat(priority=1, timeout=60.0, request_id="its-own", safety_identifier="s"),
}
_WRONG: dict[str, list[Any]] = {
    "adapter": ["poet"],
    "audio": [{}],
    "best_of": [3],
    "documents": [["d"]],
    "echo": ["x"],
    "extra_args": [{"a": 1}],
    "function_call": ["auto"],
    "functions": [[{"name": "f"}]],
    "guided_decoding": [{"choice": ["a"]}],
    "logits_processors": [["p"]],
    "logprob_token_ids": [[5]],
    "modalities": [["audio"]],
    "output_kind": [1],
    "spaces_between_special_tokens": [False],
    "suffix": ["end"],
    "use_beam_search": [True],
    "add_generation_prompt": ["yes"],
    "add_special_tokens": [1],
    "chat_template": ["{}"],
    "chat_template_kwargs": [5, {"enable_thinking": False}],
    "continue_final_message": [1],
    "dimensions": [3],
    "encoding_format": ["float"],
    "include_reasoning": ["no"],
    "input": ["x"],
    "logprobs": [21, "yes"],
    "max_completion_tokens": [5, 0],
    "max_tokens": [0],
    "messages": [
        *("Go?", [], ["Go?"], [{"content": "x"}], [{"role": "user"}], [{"role": "user", "content": 5}]),
        [{"role": "user", "content": "x", "more": 1}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": [_IMAGE]}],
        [{"role": "user", "content": [{"type": "image", "image": "/a.png"}]}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
        [{"role": "assistant", "content": "", "tool_calls": [{}]}],
        [{"role": "assistant", "tool_calls": [5]}],
        [{"role": "assistant", "content": "", "reasoning": 5}],
        [{"role": "user", "content": "x " * 300}],
        None,
    ],
    "parallel_tool_calls": ["no"],
    "prediction": [{}],
    "prompt": ["x"],
    "reasoning_effort": [5],
    "request_id": [""],
    "response_format": [
        *({"type": "yaml"}, {"type": "json_schema"}, form({**PLACES, "oneOf": [{"pattern": "a"}, {"pattern": "b"}]}))
    ],
    "service_tier": ["flex"],
    "stop": [5],
    "store": [True],
    "stream_options": [{"include_usage": "yes"}],
    "tool_choice": ["required", "any", _NAMED],
    "tools": ["go", [{}], [5], [{"type": "x"}], [{"type": "function", "function": {"name": "a b"}}], [*TOOLS, *TOOLS]],
    "top_logprobs": [2],
    "unknown": [1],
}
WRONG_CHATS = wrong(_WRONG, chat()) | {
    "efforts that differ": chat(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"}),
    "a count beside likely tokens": chat(logprobs=2, top_logprobs=2),
    "too many likely tokens": chat(logprobs=True, top_logprobs=21),
    "a call of no tool": chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "fly"}}),
    "a choice that is not known": chat(tools=TOOLS, tool_choice="sometimes"),
    "a call at a time in a word": chat(tools=TOOLS, parallel_tool_calls=1),
    "a demanded call beside a form": chat(tools=TOOLS, tool_choice="required", response_format={"type": "json_object"}),
    "a demanded call beside a structure": says("x", tools=TOOLS, tool_choice="required"),
}

_CALL = {"type": "function_call", "call_id": "c", "name": "go", "arguments": "{}"}
_RESPONDS = {"input": "Go?", "max_output_tokens": 4, "temperature": 0}
_CALLED = [{**TOOLS[0]["function"], "type": "function"}]


def response(**fields: Any) -> dict[str, Any]:
    return {**_RESPONDS, **fields}


def _format(schema: object) -> dict[str, Any]:
    return {"format": {"type": "json_schema", "name": "p", "schema": schema}}


# What a response takes as a chat does.
_CHATS_OWN: dict[str, Any] = {"seed": 5, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "stop": ["zz"]}
_CHATS_OWN |= {"cache_salt": "mine", "min_tokens": 1, "priority": 1, "timeout": 60.0}
_CHATS_OWN |= {"chat_template_kwargs": {"reasoning_effort": "low"}, "add_special_tokens": False}
_CHATS_OWN |= {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "logit_bias": {"5": 1}}
_CHATS_OWN |= {"stop_token_ids": [5], "include_stop_str_in_output": True, "skip_special_tokens": True}
_CHATS_OWN |= {"ignore_eos": False, "truncate_prompt_tokens": 9, "allowed_token_ids": [50, 51, 52]}
_CHATS_OWN |= {"bad_words": ["zz"], "prompt_cache_key": "k", "safety_identifier": "s", "service_tier": "auto"}
_CHATS_OWN |= {"speculative": False}
_AGENTS = {"reasoning": {"effort": "low", "summary": "auto"}, "prompt_cache_retention": "24h"}
RESPONSES = {
    "a text": response(),
    "instructions": response(instructions="Be brief.", metadata={"a": "b"}, user="u", store=False, model="small"),
    "a thought, an answer and a call": response(
        tools=_CALLED, structured_outputs={"choice": [f"<think>\nhm\n</think>\n\nSure.\n{CALL}"]}, max_output_tokens=220
    ),
    "items": response(
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "Go?"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
            _CALL,
            {"type": "function_call_output", "call_id": "c", "output": "gone"},
        ]
    ),
    "a call that is named": response(
        tools=_CALLED, tool_choice={"type": "function", "name": "go"}, parallel_tool_calls=True, max_output_tokens=60
    ),
    "log-probabilities": response(include=["message.output_text.logprobs"], max_output_tokens=2),
    "likely tokens": response(top_logprobs=2, max_output_tokens=1),
    "an object": response(text=_format(PLACES), max_output_tokens=60),
    "an object of a word that is not known": response(text=_format({**PLACES, "hue": 1}), max_output_tokens=60),
    "an effort": response(reasoning={"effort": "low"}, text={"format": {"type": "text"}, "verbosity": "medium"}),
    "all of a chat's": response(**_CHATS_OWN),
    "all that is harmless": response(
        background=False, truncation="disabled", n=1, logprobs=False, return_token_ids=False
    ),
    "what agents ask for": response(
        **_AGENTS, include=["reasoning.encrypted_content"], text={"verbosity": "low"}, truncation="auto"
    ),
    "a stream without padding": response(stream=True, stream_options={"include_obfuscation": False}),
}
_WRONG_RESPONSES: dict[str, list[Any]] = {
    "background": [True],
    "conversation": ["c"],
    "include": ["x", ["more"]],
    "input": [
        5,
        [],
        [5],
        [{"role": 5}],
        [{"type": "file"}],
        [{"role": "user", "content": [{"type": "input_image"}]}],
        None,
        "x " * 300,
        [_CALL | {"arguments": "{"}],
        [_CALL | {"call_id": 5}],
        [{"type": ["message"]}],
        [{"type": "reasoning", "summary": [], "encrypted_content": "x"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": {}}]}],
        [{"role": "user", "content": [{"type": "input_text", "text": 5}]}],
    ],
    "instructions": [5],
    "logprobs": [True],
    "max_output_tokens": [0],
    "max_tokens": [5],
    "max_tool_calls": [5],
    "messages": [ASKS],
    "n": [2],
    "previous_response_id": ["r"],
    "prompt": [{"id": "p"}],
    "prompt_logprob_start": [1],
    "prompt_logprob_token_ids": [[5]],
    "prompt_logprobs": [1],
    "reasoning": ["low", {"effort": 5}, {"summary": "long"}],
    "reasoning_effort": ["low"],
    "response_format": [{"type": "text"}],
    "return_token_ids": [True],
    "store": [True],
    "stream": [1],
    "stream_options": [{"include_obfuscation": True}],
    "temperature": ["hot"],
    "text": [
        *("x", {"format": {"type": "yaml"}}, {"verbosity": "x"}, {"format": {"type": "json_schema"}}),
        {"format": {"type": "json_schema", "name": "x"}},
    ],
    "tool_choice": ["any", {"type": "web_search"}, "required"],
    "tools": ["go", [5], [{"type": "web_search"}], [{"type": "function"}], [{"type": "function", "name": "a b"}]],
    "top_logprobs": [21, ""],
    "truncation": ["left"],
    "unknown": [1],
}
WRONG_RESPONSES = wrong(_WRONG_RESPONSES, response()) | {
    "arguments that are too deep": response(input=[_CALL | {"arguments": "[" * 100_000}]),
    "a stream of an option of chats": response(stream=True, stream_options={"include_usage": True}),
}
