"""Rules: which fields a body may have, and what is said of any other.

A field in `REFUSED` is taken where its value asks for nothing; of another value it says what to do instead.
"""

import functools
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from ferrum_jax.io.error_text import MAX_NAMED, named, quoted
from ferrum_jax.openai.body_fields import FIELDS, PAIRS, SOUNDS, fields_of
from ferrum_jax.openai.errors import FieldError, not_known
from ferrum_jax.sampling_params import SAMPLING_ELSEWHERE

_as_json = json.JSONEncoder(ensure_ascii=False).encode

Refused = Mapping[str, tuple[tuple[Any, ...], str]]  # field -> (values that ask for nothing, what to do instead)
_ONE_PIECE = "a batch row is answered in one piece; leave it out"
_WITH_MESSAGES = "it goes with messages; give those in place of a prompt"
_FOR_VECTORS = ((), "it is for /v1/embeddings; leave it out")
REFUSED: Refused = {
    "stream": ((False,), _ONE_PIECE),
    "stream_options": ((), _ONE_PIECE),
    "suffix": (("",), "infilling is not supported; put all text before the gap into prompt"),
    **{name: (elsewhere.harmless, elsewhere.instead) for name, elsewhere in SAMPLING_ELSEWHERE.items()},
    "tools": (([],), "tools are for messages"),
    "tool_choice": (("none",), "tools are for messages"),
    "parallel_tool_calls": ((), "tools are for messages"),
    "functions": (([],), "give them as tools"),
    "function_call": (("none",), "give tools with tool_choice"),
    "modalities": ((["text"],), "only text is generated; leave it out"),
    "audio": ((), "only text is generated; leave it out"),
    "prediction": ((), "leave it out"),
    "reasoning_effort": ((), _WITH_MESSAGES),
    "service_tier": (("auto", "default"), "leave it out"),
    "include_reasoning": ((True,), _WITH_MESSAGES),
    "request_id": ((), "a row's name is its custom_id; leave it out"),
    "store": ((False,), "nothing is stored but the output file; leave it out"),
    "chat_template": ((), "change the template in the checkpoint's folder"),
    "documents": (([],), "put them into a message, as the model's template would"),
    "logprob_token_ids": (([],), "read them out of logprobs, whose count may be 20"),
    "continue_final_message": ((False,), _WITH_MESSAGES),
    "chat_template_kwargs": (({},), _WITH_MESSAGES),
    "adapter": ((), "vectors are made without one; leave it out"),
    "input": ((), "it is for /v1/embeddings; give prompt or messages"),
    "encoding_format": _FOR_VECTORS,
    "dimensions": _FOR_VECTORS,
}
_HTTP_REFUSED: Refused = {
    **{name: said for name, said in REFUSED.items() if name not in FIELDS or FIELDS[name].door != "http"},
    "store": ((False,), "nothing is stored; leave it out"),
    "adapter": ((), "name the adapter as the model"),
    "stream": ((False,), "only texts come as a stream; leave it out"),
}
_PAIRS_REFUSED: Refused = {
    "truncate_prompt_tokens": ((), "set truncate to true, which cuts texts to the longest that the model takes"),
    "encoding_format": (("float",), "scores are numbers; leave it out"),
}
_NOT_STORED = "nothing is stored here; give the earlier items in input"
_RESPONSE_REFUSED: Refused = {
    "store": ((False,), "nothing is stored; set it to false"),
    "background": ((False,), "an answer comes to who asks for it; leave it out"),
    "previous_response_id": ((), _NOT_STORED),
    "conversation": ((), _NOT_STORED),
    "prompt": ((), "no prompts are stored here; give instructions and input"),
    "max_tool_calls": ((), "it counts calls of tools that a host runs, and none are run here; leave it out"),
    "n": ((1,), "a response is one answer; ask again, or ask /v1/chat/completions"),
    "messages": ((), "give them as input"),
    "max_tokens": ((), "its name is max_output_tokens here"),
    "response_format": ((), "its name is text.format here"),
    "logprobs": ((False,), "give top_logprobs, or include ['message.output_text.logprobs']"),
    "reasoning_effort": ((), "its name is reasoning.effort here"),
    "return_token_ids": ((False,), "ask /v1/chat/completions for token ids"),
    **dict.fromkeys(
        ("prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start"),
        ((), "ask /v1/chat/completions for them"),
    ),
}
_SOUND_REFUSED: Refused = {
    "stream": ((False,), _ONE_PIECE),
    "include": (([],), "response_format 'verbose_json' has the mean of log-probabilities of each segment"),
    "chunking_strategy": ((), "sounds are cut in windows of 30 s; leave it out"),
    "known_speaker_names": (([],), "who speaks is not found out; leave it out"),
    "known_speaker_references": (([],), "who speaks is not found out; leave it out"),
}


_GUIDED = [f"guided_{name}" for name in ("json", "regex", "choice", "grammar", "json_object", "whitespace_pattern")]


class Rules(NamedTuple):
    """Which fields one kind of body may have, and why not others. refused: see `REFUSED`."""

    known: frozenset[str]
    refused: Refused

    def problems(self, body: Mapping[str, Any]) -> list[str]:
        """The fields that are not known or not supported, in the body's order."""
        return [key for key in body if key not in self.known and not self._is_harmless(key, body[key])]

    def _is_harmless(self, key: str, given: Any) -> bool:
        harmless = self.refused[key][0] if key in self.refused else ()
        return given is None or any(given == value and type(given) is type(value) for value in harmless)

    def refuse(self, body: Mapping[str, Any]) -> None:
        """Raises FieldError that says of the first few problems what is wrong, and counts the others."""
        found = self.problems(body)
        if not found:
            return
        first = sorted(found[:MAX_NAMED])
        said = [self._why(key, body[key]) for key in first]
        if len(found) > len(first):
            said.append(f"{len(found) - len(first):,} more fields are not taken either")
        if any(key not in self.refused for key in first):
            said.append(f"known are {', '.join(sorted(self.known))}")
        raise FieldError("; ".join(said), first[0])

    def _why(self, key: str, given: Any) -> str:
        if key in self.refused:
            return f"{key} = {quoted(given, _as_json)} is not supported: {self.refused[key][1]}"
        if key in _GUIDED and "guided_decoding" in self.refused:
            return f"{key} is an older name of vLLM's: give it as {key[7:]} in structured_outputs"
        return not_known(key, self.known)


def require_known(given: Mapping[str, Any], body: str) -> None:
    """Raises FieldError for a field that a body of a server's other paths has not."""
    known = sorted(fields_of(body, "http"))
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise FieldError(f"{named(unknown[:1])} is not known; known are {', '.join(known)}", unknown[0])


@functools.cache
def rules_of(body: str, door: str) -> Rules:
    """The rules of a body, one of BODIES, that comes through a door."""
    known = frozenset(fields_of(body, door))
    if body in SOUNDS:
        return Rules(known, {name: said for name, said in _SOUND_REFUSED.items() if name not in known})
    refused = _RESPONSE_REFUSED if body == "response" else REFUSED if door == "row" else _HTTP_REFUSED
    return Rules(known, {**refused, **_PAIRS_REFUSED} if body in PAIRS else refused)
