"""The table of forms in which models write tool calls.

One row says where a call begins and ends and how its name and arguments stand between. The grammar of calls that must
come (`tool_grammar.py`) and the parser of those that came (`tool_parser.py`) read the same row. Which row is a model's,
its chat template shows, or the user says.

Source: the chat templates that the families publish, and what their models are known to write.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

Style = Literal["object", "named", "spelled", "python"]
Spellings = str | tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolForm:
    """How a family writes calls: opening, then calls with `between` between them, then closing.

    begin, end: around each call. style: of what stands there:
      object   a JSON object with `name_key` and `arguments_key`; `id_key`, where there is one, numbers the call
      named    the name, `middle`, the arguments as JSON, or with `quote` as an object whose texts stand between quotes
      spelled  the name, `middle`, each argument as `argument` says: before its key, before its value, after its value
      python   NAME(key=value, ..)
    A grammar writes the first of several spellings, and the parser reads all; "" is one that may be missing. White
    space in them stands for any, or none. Neither of `between` and `closing` may begin as the other
    does and go on: the lexer of a grammar takes the longer one and does not go back.
    id_mark: what stands between the name and an id that the model gives its call. call_id: the id that users see, of
    {name} and {id}; a form that has one numbers its calls. also: forms in which the family's calls stand at times.
    leads: whether calls come only where the text begins. has_channels: whether `harmony.py` reads its messages.
    marks: texts that its chat template has, all of one set. vllm: names of vLLM's parsers for it.
    """

    name: str
    style: Style
    marks: tuple[tuple[str, ...], ...]
    begin: Spellings = ""
    end: Spellings = ""
    middle: Spellings = ""
    argument: tuple[str, str, str] = ("", "", "")
    quote: str = ""
    name_key: str = "name"
    arguments_key: str = "arguments"
    id_key: str = ""
    id_mark: str = ""
    call_id: str = ""
    opening: Spellings = ""
    between: Spellings = "\n"
    closing: Spellings = ""
    leads: bool = False
    has_channels: bool = False
    also: tuple[str, ...] = ()
    vllm: tuple[str, ...] = ()

    @property
    def starts(self) -> tuple[str, ...]:
        """The first words of its calls: one stands wherever a call begins."""
        heads = [(first + then).strip() or "{" for first in spelled(self.opening) for then in spelled(self.begin)]
        words = [head.split()[0] for head in heads]
        return tuple(dict.fromkeys(word.removesuffix("[") or word for word in words))

    @property
    def stop_lines(self) -> tuple[str, str]:
        """Beginnings that no line of an argument without quotes has: of the next argument, of the call's end."""
        return self.argument[0], written(self.end).split()[0]


def spelled(spellings: Spellings) -> tuple[str, ...]:
    return (spellings,) if isinstance(spellings, str) else spellings


def written(spellings: Spellings) -> str:
    """The one that a grammar writes."""
    return spelled(spellings)[0]


# The first that a template shows: those that share a mark with others stand before them.
TOOL_FORMS = (
    ToolForm(
        name="harmony",
        style="named",
        marks=(("<|channel|>", "<|constrain|>"), ("<|channel|>", "<|message|>")),
        begin="<|channel|>commentary to=functions.",
        middle=" <|constrain|>json<|message|>",
        between="<|start|>assistant",
        has_channels=True,
        vllm=("openai", "gpt-oss", "gpt_oss"),
    ),
    ToolForm(
        name="deepseek_v3",  # and R1
        style="named",
        marks=(("<｜tool▁calls▁begin｜>", "```json"),),
        opening="<｜tool▁calls▁begin｜>",
        begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        middle="\n```json\n",
        end="\n```<｜tool▁call▁end｜>",
        closing="<｜tool▁calls▁end｜>",
    ),
    ToolForm(
        name="deepseek_v31",
        style="named",
        marks=(("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"),),
        opening="<｜tool▁calls▁begin｜>",
        begin="<｜tool▁call▁begin｜>",
        middle="<｜tool▁sep｜>",
        end="<｜tool▁call▁end｜>",
        between="",
        closing="<｜tool▁calls▁end｜>",
    ),
    ToolForm(
        name="kimi_k2",
        style="named",
        marks=(("<|tool_calls_section_begin|>",),),
        opening=("<|tool_calls_section_begin|>", ""),
        begin=("<|tool_call_begin|>functions.", "<|tool_call_begin|>"),
        id_mark=":",
        call_id="functions.{name}:{id}",
        middle="<|tool_call_argument_begin|>",
        end="<|tool_call_end|>",
        between="",
        closing="<|tool_calls_section_end|>",
    ),
    ToolForm(
        name="minimax_m2",
        style="spelled",
        marks=(("<minimax:tool_call>",),),
        opening="<minimax:tool_call>\n",
        begin='<invoke name="',
        middle='">\n',
        argument=('<parameter name="', '">', "</parameter>\n"),
        end="</invoke>\n",
        between="",
        closing="</minimax:tool_call>",
    ),
    ToolForm(
        name="seed_oss",
        style="spelled",
        marks=(("<seed:tool_call>",),),
        begin="<seed:tool_call>\n<function=",
        middle=">\n",
        argument=("<parameter=", ">", "</parameter>\n"),
        end="</function>\n</seed:tool_call>",
    ),
    ToolForm(
        name="glm",
        style="spelled",
        marks=(("<tool_call>", "<arg_key>"),),
        begin="<tool_call>",
        middle="\n",
        argument=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
        end="</tool_call>",
        vllm=("glm45", "glm47"),
    ),
    ToolForm(
        name="qwen3_coder",
        style="spelled",
        marks=(("<tool_call>", "<function="),),
        begin=("<tool_call>\n<function=", "<function="),
        middle=">\n",
        argument=("<parameter=", ">\n", "\n</parameter>\n"),
        end=("</function>\n</tool_call>", "</function>"),
        vllm=("qwen3_xml", "mimo"),
    ),
    ToolForm(
        name="gemma4",
        style="named",
        marks=(("<|tool_call>",),),
        begin="<|tool_call>call:",
        quote='<|"|>',
        end="<tool_call|>",
        between="",
    ),
    ToolForm(
        name="functiongemma",
        style="named",
        marks=(("<start_function_call>",),),
        begin="<start_function_call>call:",
        quote="<escape>",
        end="<end_function_call>",
        between="",
    ),
    ToolForm(
        name="command",
        style="object",
        marks=(("<|START_ACTION|>",),),
        opening="<|START_ACTION|>[\n    ",
        id_key="tool_call_id",
        name_key="tool_name",
        arguments_key="parameters",
        between=",\n    ",
        closing="\n]<|END_ACTION|>",
        vllm=("cohere_command3", "cohere_command4", "cohere"),
    ),
    ToolForm(
        name="hunyuan_a13b",
        style="object",
        marks=(("<tool_calls>",),),
        opening="<tool_calls>[",
        between=", ",
        closing="]</tool_calls>",
        vllm=("jamba",),
    ),
    ToolForm(
        name="nemotron_json",
        style="object",
        marks=(("<TOOLCALL>",),),
        opening=("<TOOLCALL>[", "<TOOLCALL>"),
        between=", ",
        closing=("]</TOOLCALL>", "</TOOLCALL>"),
    ),
    ToolForm(
        name="olmo3",
        style="python",
        marks=(("<function_calls>",),),
        opening="<function_calls>",
        between="\n",
        closing="</function_calls>",
    ),
    ToolForm(
        name="lfm2",
        style="python",
        marks=(("<|tool_call_start|>",), ("<|tool_list_start|>",)),
        opening="<|tool_call_start|>[",
        between=", ",
        closing="]<|tool_call_end|>",
    ),
    ToolForm(
        name="granite",
        style="object",
        marks=(("<|tool_call|>", "<|start_of_role|>"),),
        opening=("<|tool_call|>[", "<tool_call>["),
        between=", ",
        closing="]",
    ),
    ToolForm(
        name="phi4_mini_json",
        style="object",
        marks=(("functools",),),
        opening=("functools[", "<|tool_call|>["),
        between=", ",
        closing=("]", "]<|/tool_call|>"),
    ),
    ToolForm(
        name="phi4_mini",
        style="object",
        marks=(("<|tool|>", "<|/tool|>"),),
        opening=("<|tool_call|>[", "functools["),
        between=", ",
        closing=("]<|/tool_call|>", "]"),
    ),
    ToolForm(
        name="granite-20b-fc",
        style="object",
        marks=(("<function_call>",),),
        begin="<function_call> ",
    ),
    ToolForm(
        name="internlm",
        style="object",
        marks=(("<|action_start|>",),),
        begin="<|action_start|><|plugin|>\n",
        arguments_key="parameters",
        end="<|action_end|>",
    ),
    ToolForm(
        name="longcat",
        style="object",
        marks=(("<longcat_tool_call>",),),
        begin="<longcat_tool_call>\n",
        end="\n</longcat_tool_call>",
    ),
    ToolForm(
        name="hermes",
        style="object",
        marks=(("<tool_call>",),),
        begin="<tool_call>\n",
        end="\n</tool_call>",
        vllm=("granite4", "ernie45"),
    ),
    ToolForm(
        name="mistral",
        style="named",
        marks=(("[TOOL_CALLS]", "[ARGS]"),),
        begin=("[TOOL_CALLS]", "[TOOL_CALLS][TOOL_CALLS]"),
        id_mark="[CALL_ID]",
        middle=("[ARGS]", ""),
        between="",
        also=("mistral_list",),
    ),
    ToolForm(
        name="mistral_list",
        style="object",
        marks=(("[TOOL_CALLS]",),),
        opening=("[TOOL_CALLS] [", "[TOOL_CALLS]", "[TOOL_CALLS][TOOL_CALLS] [", "[TOOL_CALLS][TOOL_CALLS]"),
        between=", ",
        closing="]",
        also=("mistral",),
    ),
    ToolForm(
        name="gemma",
        style="python",
        marks=(("tool_code",),),
        opening="```tool_code\n",
        between="\n",
        closing="\n```",
    ),
    ToolForm(
        name="llama4_pythonic",
        style="python",
        marks=(("<|python_start|>", "func_name1("),),
        opening="<|python_start|>[",
        between=", ",
        closing=("]<|python_end|>", "]"),
        also=("pythonic", "llama4_json"),
    ),
    ToolForm(
        name="pythonic",
        style="python",
        marks=(("func_name1(params_name1",), ("func_name1(param1",)),
        opening="[",
        between=", ",
        closing="]",
        leads=True,
        also=("llama4_pythonic",),
    ),
    ToolForm(
        name="llama4_json",
        style="object",
        marks=(("<|python_start|>",), ("<|header_start|>", '"parameters": dictionary of argument name')),
        arguments_key="parameters",
        opening=("", "<|python_start|>"),
        between=("\n", "; "),
        closing=("", "<|python_end|>"),
        leads=True,
        also=("llama4_pythonic", "pythonic"),
    ),
    ToolForm(
        name="llama3_json",
        style="object",
        marks=(("<|python_tag|>",), ('"parameters": dictionary of argument name',)),
        arguments_key="parameters",
        opening=("", "<|python_tag|>"),
        between=("; ", ""),
        leads=True,
    ),
)


def tool_form(template: str | None) -> ToolForm | None:
    """The form of a chat template's calls, or None."""
    return next((form for form in TOOL_FORMS if template and shows(template, form.marks)), None)


def shows(template: str, marks: Sequence[Sequence[str]]) -> bool:
    """Whether a template has all texts of one of these sets."""
    return any(all(mark in template for mark in each) for each in marks)


def tool_form_named(name: str) -> ToolForm:
    """The form of that name, ours or vLLM's. Raises ValueError naming those that there are."""
    found = next((form for form in TOOL_FORMS if name in (form.name, *form.vllm)), None)
    if found is None:
        known = ", ".join(each for form in TOOL_FORMS for each in (form.name, *form.vllm))
        raise ValueError(f"no form of tool calls is named {name[:80]!r}; there are {known}")
    return found
