"""Structure in OpenAI's requests: `response_format`, `tools`, `tool_choice`, `parallel_tool_calls`.

Checked here, with the place of what is wrong; nothing knows the model yet. A choice that leaves the model free (none,
auto) asks for no grammar; "required" or a name does, in the model's own form.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ferrum_jax.inputs.params.schema import check_schema
from ferrum_jax.io.error_text import quoted

_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
MAX_TOOLS, MAX_TOOL_CHARACTERS = 128, 1 << 20  # the latter of all parameters together


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that a model may call. parameters: the JSON schema of its arguments, an object, as text."""

    name: str
    parameters: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolsAsked:
    """The calls that must come: of one of these tools, and where `parallel`, of more of them after it."""

    tools: tuple[Tool, ...]
    parallel: bool = True


def tools_of(tools: object) -> tuple[Tool, ...]:
    """The tools of a request's `tools`. Raises ValueError naming the place."""
    if isinstance(tools, str) or not isinstance(tools, Sequence) or not tools:
        raise ValueError(f"tools is {quoted(tools)}; it must be a list with at least one tool")
    if len(tools) > MAX_TOOLS:
        raise ValueError(f"tools has {len(tools)} tools; at most {MAX_TOOLS} are allowed")
    found = tuple(_tool(f"tools[{index}]", tool) for index, tool in enumerate(tools))
    size = sum(len(tool.parameters) for tool in found)
    if size > MAX_TOOL_CHARACTERS:
        raise ValueError(f"tools has parameters of {size:,} characters; at most {MAX_TOOL_CHARACTERS:,} are allowed")
    names = [tool.name for tool in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"tools names {' and '.join(twice)} twice; give each tool a name of its own")
    return found


def shown_tools(tools: object) -> tuple[Tool, ...] | None:
    """The tools that a chat template is given, as far as they are OpenAI's; None without any."""
    if not tools:
        return None
    try:
        return tools_of(tools)
    except ValueError:  # of a form of their own: their calls are found, and their arguments have no types
        return ()


def _tool(place: str, tool: object) -> Tool:
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        raise ValueError(f'{place} is {quoted(tool)}; it must be {{"type": "function", "function": {{"name": ...}}}}')
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise ValueError(f"{place}.function is {quoted(function)}; it must be an object with a name and parameters")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{place}.function.name is {quoted(name)}; it must be 1 to 64 letters, digits or any of _ - .")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, Mapping):
        raise ValueError(f"{place}.function.parameters is {quoted(parameters)}; it must be a JSON schema of an object")
    if "type" not in parameters and ("properties" in parameters or not parameters):
        parameters = {"type": "object", **parameters}
    try:
        text = json.dumps(parameters, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{place}.function.parameters cannot be written as JSON: {error}") from error
    return Tool(name=name, parameters=text)


def tools_asked(tools: object, tool_choice: object, parallel: object) -> ToolsAsked | None:
    """The calls that a request demands; None where it leaves the model free. Raises ValueError naming the place."""
    if parallel is not None and not isinstance(parallel, bool):
        raise ValueError(f"parallel_tool_calls is {quoted(parallel)}; it must be true or false")
    if not tools:
        if tools is not None and (isinstance(tools, str) or not isinstance(tools, Sequence)):
            raise ValueError(f"tools is {quoted(tools)}; it must be a list of tools")
        if tool_choice not in (None, "none", "auto"):
            raise ValueError(f"tool_choice is {quoted(tool_choice)} without tools; give the tools it may choose")
        return None
    known = tools_of(tools)
    name = _chosen(tool_choice)
    if name is not None and name not in {tool.name for tool in known}:
        raise ValueError(f"tool_choice names {quoted(name)}, and tools has {', '.join(tool.name for tool in known)}")
    if name is None and tool_choice != "required":
        return None
    demanded = tuple(tool for tool in known if name in (None, tool.name))
    for tool in demanded:
        try:
            check_schema(json.loads(tool.parameters))
        except ValueError as error:
            raise ValueError(f"the parameters of the tool {tool.name}: {error}") from error
    return ToolsAsked(tools=demanded, parallel=name is None and parallel is not False)


def _chosen(choice: object) -> str | None:
    """The name that a tool_choice demands; None if the tool_choice demands no tool."""
    if choice in (None, "none", "auto", "required"):
        return None
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise ValueError(
            f'tool_choice is {quoted(choice)}; it must be "none", "auto", "required" or '
            '{"type": "function", "function": {"name": ...}}'
        )
    return name


def format_of(response_format: object) -> dict[str, Any] | None:
    """The fields of StructuredOutputsParams that a `response_format` asks for; None for plain text.

    Raises ValueError naming the place. `strict` that is false, OpenAI's best effort, is enforced like true.
    """
    if not isinstance(response_format, Mapping):
        raise ValueError(
            f'response_format is {quoted(response_format)}; it must be an object such as {{"type": "json_object"}}'
        )
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "structural_tag":
        return {"structural_tag": dict(response_format)}
    if kind != "json_schema":
        raise ValueError(f'response_format.type is {quoted(kind)}; it must be "text", "json_object" or "json_schema"')
    named = response_format.get("json_schema")
    if not isinstance(named, Mapping):
        raise ValueError(f"response_format.json_schema is {quoted(named)}; it must be an object with name and schema")
    unknown = sorted(set(named) - {"name", "description", "schema", "strict"})
    if unknown:
        raise ValueError(
            f"response_format.json_schema has {quoted(unknown)}; known are name, description, schema and strict"
        )
    strict = named.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise ValueError(f"response_format.json_schema.strict is {quoted(strict)}; it must be true or false")
    if named.get("schema") is None:
        raise ValueError("response_format.json_schema has no schema; give the JSON schema of the answer")
    return {"json": named["schema"]}
