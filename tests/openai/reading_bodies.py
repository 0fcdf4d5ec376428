"""Bodies of /v1/embeddings, /v1/score and /v1/rerank, each of one wish, and bodies for a server that ignores fields."""

from __future__ import annotations

from typing import Any

from tests.openai.chat_bodies import chat, response
from tests.openai.text_bodies import HARMLESS, text, wrong

TEXTS = ["a block holds keys", "tokens of a row", "another text"]
QUERY, DOCUMENTS = "the quick fox", ["a lazy dog", "a fox jumps over the dog", "keys and values"]
_LABELS = {"model": "small", "user": "u", "metadata": {}, "prompt_cache_key": "k", "prompt_cache_retention": "24h"}
_URGENT = {"priority": 1, "timeout": 60.0, "service_tier": "flex", "safety_identifier": "s"}
_SALTED: dict[str, list[Any]] = {"cache_salt": [5, ""]}
_UNTRUE: dict[str, list[Any]] = {"model": [5, "other"], "priority": ["high"], "timeout": [0], "unknown": [1]}
# What rows refuse as fields of other paths; harmless values beside them.
_ELSEWHERE: dict[str, list[Any]] = {
    "adapter": ["poet"],
    "audio": [{}],
    "best_of": [3],
    "chat_template": ["x"],
    "chat_template_kwargs": [{"a": 1}],
    "continue_final_message": [True],
    "function_call": ["auto"],
    "functions": [["f"]],
    "include_reasoning": [False],
    "guided_decoding": [{"choice": ["a"]}],
    "logits_processors": [["p"]],
    "logprob_token_ids": [[5]],
    "tools": [[5]],
    "modalities": [["audio"]],
    "output_kind": [1],
    "parallel_tool_calls": [True],
    "prediction": [{}],
    "reasoning_effort": ["low"],
    "request_id": ["r"],
    "spaces_between_special_tokens": [False],
    "store": [True],
    "stream": [True],
    "stream_options": [{}],
    "suffix": ["x"],
    "tool_choice": ["auto"],
    "use_beam_search": [True],
    "extra_args": [{"a": 1}],
}


def vectors(**fields: Any) -> dict[str, Any]:
    return {"input": TEXTS[0], "encoding_format": "float", **fields}


EMBEDDINGS = {
    "a text": {"input": TEXTS[0]},
    "numbers": vectors(),
    "base64": vectors(encoding_format="base64"),
    "several texts": vectors(input=TEXTS),
    "token ids": vectors(input=[5, 6, 7]),
    "several lists of token ids": vectors(input=[[5, 6, 7], [8]]),
    "dimensions": vectors(dimensions=3),
    "dimensions in base64": vectors(dimensions=3, encoding_format="base64"),
    "a salt": vectors(cache_salt="mine"),
    "labels": vectors(**_LABELS),
    "nulls": vectors(dimensions=None, pooling=None, unknown=None),
    "all that is harmless": vectors(**{**HARMLESS, "stream": None}, documents=[]),
    "no stream": vectors(stream=False),
    "when it is to run": vectors(priority=0),
    "urgent": vectors(**_URGENT),
    "not truncated": {"input": TEXTS[0], "truncate": False},
    "truncated": {"input": "x " * 100, "truncate": True},
    "another pooling": {"input": TEXTS[0], "pooling": "cls"},
    "not normalised": {"input": TEXTS[0], "normalize": False},
    "a prompt of the checkpoint": {"input": TEXTS[0], "prompt_name": "query"},
}
_WRONG_VECTORS: dict[str, list[Any]] = {
    "dimensions": [0, True, 4096],
    "documents": [["d"]],
    "encoding_format": ["hex"],
    "input": ["", [], [["x"]], ["x", 5], {"text": "x"}, [-1], [10**6], "x " * 100, None],
    "normalize": [1],
    "pooling": ["median", 5],
    "prompt": ["x"],
    "prompt_name": ["poem", {}],
    "temperature": [1],
    "truncate": ["yes"],
}
WRONG_EMBEDDINGS = wrong(_WRONG_VECTORS | _SALTED | _UNTRUE | _ELSEWHERE, vectors())


def score(**fields: Any) -> dict[str, Any]:
    return {"text_1": QUERY, "text_2": DOCUMENTS[1], **fields}


def ranking(**fields: Any) -> dict[str, Any]:
    return {"query": QUERY, "documents": DOCUMENTS, **fields}


SCORES = {
    "a pair": score(),
    "one beside several": score(text_2=DOCUMENTS),
    "pairs": score(text_1=[QUERY, "a row"], text_2=DOCUMENTS[:2]),
    "texts in objects": score(text_2=[{"text": DOCUMENTS[0]}]),
    "truncated": score(text_2="keys " * 60, truncate=True),
    "a salt": score(cache_salt="mine"),
    "labels": score(**_LABELS),
    "urgent": score(**_URGENT),
    "all that is harmless": score(**HARMLESS, documents=[], priority=0),
    "numbers": score(encoding_format="float"),
}
_WRONG_TEXTS: dict[str, list[Any]] = {
    "truncate": ["yes"],
    "instruction": [5, "which fox"],
    "encoding_format": ["base64"],
    "truncate_prompt_tokens": [5],
    "dimensions": [3],
    "input": ["x"],
    "prompt": ["x"],
}
_WRONG_SCORES: dict[str, list[Any]] = {
    "text_1": ["", [], ["x", "y"], {"text": "x"}, None],
    "text_2": ["", [], ["x", 5], "keys " * 60, None],
    "documents": [["d"]],
}
WRONG_SCORES = wrong(_WRONG_SCORES | _WRONG_TEXTS | _SALTED | _UNTRUE | _ELSEWHERE, score())
RANKINGS = {
    "documents": ranking(),
    "the best": ranking(top_n=1),
    "more than there are": ranking(top_n=9),
    "without the documents": ranking(return_documents=False),
    "documents in objects": ranking(documents=[DOCUMENTS[0], {"text": DOCUMENTS[1]}]),
    "truncated": ranking(documents=["keys " * 60], truncate=True),
    "a salt": ranking(cache_salt="mine"),
    "labels": ranking(**_LABELS),
    "urgent": ranking(**_URGENT),
    "all that is harmless": ranking(**HARMLESS, priority=0),
}
_WRONG_RANKINGS: dict[str, list[Any]] = {
    "query": ["", ["x"], {"text": "x"}, None],
    "documents": ["x", [], [{"title": "x"}], ["x", ""], ["keys " * 60], None],
    "top_n": [0, "2"],
    "return_documents": [1],
}
WRONG_RANKINGS = wrong(_WRONG_RANKINGS | _WRONG_TEXTS | _SALTED | _UNTRUE | _ELSEWHERE, ranking())
SOME_SCORES = {name: SCORES[name] for name in ("a pair", "one beside several", "pairs", "truncated", "a salt")}
SOME_RANKINGS = {name: RANKINGS[name] for name in ("documents", "the best", "without the documents")}

TOLD_SCORES = {"a pair": score(), "an instruction": score(instruction="which fox"), "a salt": score(cache_salt="mine")}
TOLD_RANKINGS = {"documents": ranking(), "an instruction": ranking(instruction="which fox", top_n=2)}
STATES = {
    "token ids": vectors(input=[7, 8, 9]),
    "a text": vectors(dimensions=3),
    "another pooling": vectors(pooling="mean"),
    "normalised": vectors(input=[7, 8, 9], normalize=True),
}

# A server that is told to ignores unknown and unsupported fields, and says so.
IGNORED = {
    "unknown": text(unknown=1, more={"a": 1}),
    "not supported": text(suffix="end", best_of=3),
    "many": text(**{f"unknown_{i}": i for i in range(12)}),
}
IGNORED_CHATS = {"unknown": chat(unknown=1), "not supported": chat(functions=[{"name": "f"}])}
IGNORED_RESPONSES = {"unknown": response(unknown=1), "not supported": response(store=True)}
IGNORED_VECTORS = {"unknown": vectors(unknown=1), "not supported": vectors(stream=True)}
IGNORED_SCORES = {"unknown": score(unknown=1), "not supported": score(truncate_prompt_tokens=5)}
