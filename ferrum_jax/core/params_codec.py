"""SamplingParams as JSON and back: for the wire to an engine, and for what a job says of rows that say nothing."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from ferrum_jax.inputs.params.structured_outputs import StructuredOutputsParams
from ferrum_jax.inputs.params.tools import Tool, ToolsAsked
from ferrum_jax.inputs.params.transcript import Transcript
from ferrum_jax.sampling_params import SamplingParams

_DEFAULTS = SamplingParams()
_NAMES = tuple(field.name for field in dataclasses.fields(SamplingParams))


def params_to_json(params: SamplingParams, names: Iterable[str] | None = None) -> dict[str, Any]:
    """Values of JSON by field. names: of the fields; None gives those that are not as by default."""
    if names is None:
        names = [name for name in _NAMES if getattr(params, name) != getattr(_DEFAULTS, name)]
    found = {name: getattr(params, name) for name in names}
    if (bias := found.get("logit_bias")) is not None:
        found["logit_bias"] = {str(token): each for token, each in bias.items()}
    if found.get("structured_outputs") is not None:
        asked = dataclasses.asdict(found["structured_outputs"])
        found["structured_outputs"] = {name: value for name, value in asked.items() if value not in (None, False)}
    if found.get("transcript") is not None:
        found["transcript"] = dataclasses.asdict(found["transcript"])
    return found


def params_of_json(values: Mapping[str, Any]) -> SamplingParams:
    """The parameters that `params_to_json` wrote. Raises ValueError for what is none."""
    found = dict(values)
    if (bias := found.get("logit_bias")) is not None:
        found["logit_bias"] = {int(token): each for token, each in bias.items()}
    structure = found.get("structured_outputs") or {}
    if (asked := structure.get("tools")) is not None:  # which no user can give
        tools = ToolsAsked(tools=tuple(Tool(**tool) for tool in asked["tools"]), parallel=asked["parallel"])
        found["structured_outputs"] = StructuredOutputsParams(**{**structure, "tools": tools})
    if (transcript := found.get("transcript")) is not None:  # likewise
        found["transcript"] = Transcript.from_dict(transcript)
    return SamplingParams.from_dict(found)
