"""The table of forms in which models write tool calls and their reasoning.

One row says where a call begins and ends and how its name and arguments stand between. The grammar of calls that must
come (`tool_grammar.py`) and the parser of those that came (`tool_parser.py`) read the same row. Which row is a model's,
its chat template shows.

Source: the chat templates that the families publish.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Style = Literal["object", "named", "parameters", "pairs", "python"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolForm:
    """How a family writes calls: opening, then calls with `between` between them, then closing.

    begin, end: around each call. style: of what stands there:
      object      a JSON object with `name` and, under `arguments_key`, the arguments
      named       the name, `middle`, the arguments as JSON
      parameters  <function=NAME>, each argument in <parameter=KEY>, </function>
      pairs       the name, then each argument as <arg_key> and <arg_value>
      python      NAME(key=value, ..)
    leads: whether calls come only where the text begins. marks: texts that its chat template has, all of them.
    """

    name: str
    style: Style
    marks: tuple[str, ...]
    begin: str = ""
    end: str = ""
    middle: str = ""
    arguments_key: str = "arguments"
    opening: str = ""
    between: str = "\n"
    closing: str = ""
    leads: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReasoningForm:
    """Between which texts a model thinks. marks: as of a ToolForm."""

    begin: str
    end: str
    marks: tuple[str, ...]


# The first whose marks a template has: those that share a mark with others stand before them.
TOOL_FORMS = (
    ToolForm(
        name="harmony",
        style="named",
        marks=("<|channel|>", "<|constrain|>"),
        begin="<|channel|>commentary to=functions.",
        middle=" <|constrain|>json<|message|>",
        end="<|call|>",
        between="<|start|>assistant",
    ),
    ToolForm(
        name="deepseek_v31",
        style="named",
        marks=("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "</think>"),
        opening="<｜tool▁calls▁begin｜>",
        begin="<｜tool▁call▁begin｜>",
        middle="<｜tool▁sep｜>",
        end="<｜tool▁call▁end｜>",
        between="",
        closing="<｜tool▁calls▁end｜>",
    ),
    ToolForm(
        name="deepseek_v3",
        style="named",
        marks=("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "```json"),
        opening="<｜tool▁calls▁begin｜>",
        begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        middle="\n```json\n",
        end="\n```<｜tool▁call▁end｜>",
        closing="<｜tool▁calls▁end｜>",
    ),
    ToolForm(
        name="glm",
        style="pairs",
        marks=("<tool_call>", "<arg_key>"),
        begin="<tool_call>",
        end="</tool_call>",
    ),
    ToolForm(
        name="qwen3_coder",
        style="parameters",
        marks=("<tool_call>", "<function="),
        begin="<tool_call>\n",
        end="\n</tool_call>",
    ),
    ToolForm(
        name="hermes",
        style="object",
        marks=("<tool_call>",),
        begin="<tool_call>\n",
        end="\n</tool_call>",
    ),
    ToolForm(
        name="mistral",
        style="named",
        marks=("[TOOL_CALLS]", "[ARGS]"),
        begin="[TOOL_CALLS]",
        middle="[ARGS]",
        between="",
    ),
    ToolForm(
        name="mistral_list",
        style="object",
        marks=("[TOOL_CALLS]",),
        opening="[TOOL_CALLS] [",
        between=", ",
        closing="]",
    ),
    ToolForm(
        name="gemma",
        style="python",
        marks=("tool_code",),
        opening="```tool_code\n",
        between="\n",
        closing="\n```",
    ),
    ToolForm(
        name="pythonic",
        style="python",
        marks=("func_name1(params_name1",),
        opening="[",
        between=", ",
        closing="]",
        leads=True,
    ),
    ToolForm(
        name="llama3_json",
        style="object",
        marks=("<|python_tag|>",),
        arguments_key="parameters",
        between="; ",
        leads=True,
    ),
    ToolForm(
        name="llama3_json",
        style="object",
        marks=('"parameters": dictionary of argument name',),
        arguments_key="parameters",
        between="; ",
        leads=True,
    ),
)

REASONING_FORMS = (
    ReasoningForm(begin="<|channel|>analysis<|message|>", end="<|end|>", marks=("<|channel|>", "<|constrain|>")),
    ReasoningForm(begin="[THINK]", end="[/THINK]", marks=("[THINK]",)),
    ReasoningForm(begin="<think>", end="</think>", marks=("</think>",)),
)


def tool_form(template: str | None) -> ToolForm | None:
    """The form of a chat template's calls; None where it shows none."""
    return next((form for form in TOOL_FORMS if template and all(mark in template for mark in form.marks)), None)


def tool_form_named(name: str) -> ToolForm:
    """The form of that name. Raises ValueError naming those that there are."""
    found = next((form for form in TOOL_FORMS if form.name == name), None)
    if found is None:
        raise ValueError(f"no tool form is named {name!r}; there are {', '.join({f.name: 0 for f in TOOL_FORMS})}")
    return found


def reasoning_form(template: str | None) -> ReasoningForm | None:
    """The form of a chat template's reasoning; None where it shows none."""
    return next((form for form in REASONING_FORMS if template and all(mark in template for mark in form.marks)), None)
