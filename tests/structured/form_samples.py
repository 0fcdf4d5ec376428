"""What models are known to write, by hand, and the message that each text is. No code of this project made them."""

import dataclasses
from typing import Any

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "zip": {"type": "string"},
                    "exact": {"type": "boolean"},
                    "filter": {"type": "object"},
                    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "level": {"enum": ["1", "2"]},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


@dataclasses.dataclass(frozen=True)
class Sample:
    """forms: of calls and of reasoning. calls: name and arguments of each, and its id where the model gives one."""

    forms: tuple[str | None, str | None]
    text: str
    content: str = ""
    reasoning: str | None = None
    calls: tuple[tuple[Any, ...], ...] = ()
    is_open: bool = False


def weather(**arguments: Any) -> tuple[str, dict[str, Any]]:
    return "weather", arguments


OSLO = weather(city="Oslo")
NOW = ("now", {})
_DS, _CALL, _SEP, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_DS_END = "<｜tool▁calls▁end｜>"
_THOUGHT = "<|channel|>analysis<|message|>Look it up.<|end|>"

HARMONY = {
    "its own template's recipient": (
        _THOUGHT + "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>"
        '{"city": "Oslo"}<|call|>', "", "Look it up.", [OSLO]),
    "a call that comes at once, recipient first": (
        ' to=functions.weather<|channel|>commentary json<|message|>{"city":"Oslo"}<|call|>', "", "", [OSLO]),
    "constrained": (
        '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}', "", "", [OSLO]),
    "no type of content": (
        '<|channel|>commentary to=functions.weather<|message|>{\n"city": "Oslo"\n}<|call|>', "", "", [OSLO]),
    "on analysis": (
        '<|channel|>analysis to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|end|>', "", "", [OSLO]),
    "a bare recipient": ('<|channel|>commentary to=weather json<|message|>{"city": "Oslo"}<|call|>', "", "", [OSLO]),
    "no arguments": ("<|channel|>commentary to=functions.now json<|message|><|call|>", "", "", [NOW]),
    "no arguments and no end": ("<|channel|>commentary to=functions.now json<|message|>", "", "", [NOW]),
    "two calls after end": (
        '<|channel|>commentary to=functions.weather json<|message|>{"city": "Oslo"}<|end|>'
        "<|start|>assistant<|channel|>commentary to=functions.now json<|message|>{}<|end|>", "", "", [OSLO, NOW]),
    "a preamble is answer": (
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.now<|channel|>commentary"
        " json<|message|>{}<|call|>", "I look.", "", [NOW]),
    "what is for itself, and an invented result": (
        "<|channel|>commentary to=assistant<|message|>hm<|end|><|start|>functions.now to=assistant<|channel|>commentary"
        '<|message|>"12:00"<|end|><|start|>assistant<|channel|>final<|message|>It is noon.<|return|>',
        "It is noon.", 'hm\n"12:00"', []),
    "built-in tools": (
        "<|channel|>analysis to=python code<|message|>1+1<|call|><|start|>assistant to=browser.search<|channel|>"
        'commentary<|message|>{"q": 1}<|call|><|start|>assistant<|channel|>final<|message|>2',
        "2", '1+1\n{"q": 1}', []),
    "arguments that are none stay text": (
        "<|channel|>commentary to=functions.now json<|message|>soon<|call|>",
        "<|channel|>commentary to=functions.now json<|message|>soon<|call|>", "", []),
}  # fmt: skip

SAMPLES: dict[str, Sample] = {
    f"harmony, {name}": Sample(("harmony", "harmony"), text, content=content, reasoning=reasoning, calls=tuple(calls))
    for name, (text, content, reasoning, calls) in HARMONY.items()
} | {
    "R1": Sample(
        ("deepseek_v3", "deepseek_r1"),
        f'<think>\nWhere?\n</think>\n\nI look.\n{_DS}{_CALL}function{_SEP}weather\n```json\n{{"city": "Oslo"}}\n'
        f"```{_END}\n{_CALL}function{_SEP}now\n```json\n{{}}\n```{_END}{_DS_END}",
        content="I look.",
        reasoning="Where?",
        calls=(OSLO, NOW),
    ),
    "DeepSeek V3.1": Sample(
        ("deepseek_v31", None),
        f'Well.{_DS}{_CALL}weather{_SEP}{{"city": "Oslo"}}{_END}{_CALL}now{_SEP}{{}}{_END}{_DS_END}',
        content="Well.",
        calls=(OSLO, NOW),
    ),
    "Hermes, null and nothing for arguments": Sample(
        ("hermes", "qwen3"),
        '<tool_call>\n{"name": "now", "arguments": null}\n</tool_call>\n<tool_call>{"name": "now"}</tool_call>'
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}',
        reasoning="",
        calls=(NOW, NOW, OSLO),
    ),
    "Hermes, within an unclosed thought": Sample(
        ("hermes", "qwen3"),
        '<think>\nI use <tool_call> now.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        reasoning="I use <tool_call> now.",
        calls=(NOW,),
    ),
    "Hermes, two calls at once in a thought that the prompt opened": Sample(
        ("hermes", "qwen3"),
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n<tool_call>{"name": "now"}</tool_call>\n',
        reasoning="",
        calls=(NOW, NOW),
        is_open=True,
    ),
    "Hermes, a call that is only thought of": Sample(
        ("hermes", "qwen3"),
        'Say <tool_call>{"name": "now"}</tool_call>? No.\n</think>\n\nHi.',
        content="Hi.",
        reasoning='Say <tool_call>{"name": "now"}</tool_call>? No.',
        is_open=True,
    ),
    "Hermes, a thought that goes on after a call": Sample(
        ("hermes", "qwen3"),
        '<think>a <tool_call>{"name": "now"}</tool_call> b',
        reasoning='a <tool_call>{"name": "now"}</tool_call> b',
    ),
    "Qwen3-Coder": Sample(
        ("qwen3_coder", None),
        "I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n<parameter=zip>\n0150\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n<parameter=filter>\n"
        '{"wind": [1, 2]}\n</parameter>\n<parameter=note>\nnull\n</parameter>\n<parameter=level>\n1\n</parameter>\n'
        "</function>\n</tool_call>",
        content="I look.",
        calls=(weather(city="Oslo", days=3, zip="0150", exact=True, filter={"wind": [1, 2]}, note=None, level="1"),),
    ),
    "Qwen3-Coder without the first mark": Sample(
        ("qwen3_coder", None),
        "<function=weather>\n<parameter=city>\n  Oslo\n    am Fjord\n</parameter>\n</function>\n</tool_call>",
        calls=(weather(city="  Oslo\n    am Fjord"),),
    ),
    "Qwen3-Coder without the ends of values": Sample(
        ("qwen3_coder", None),
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n<parameter=days>\n3\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        calls=(weather(city="Oslo", days=3), NOW),
    ),
    "Qwen3-Coder, marks within a line of code": Sample(
        ("qwen3_coder", None),
        '<tool_call>\n<function=weather>\n<parameter=city>\nprint("</function><parameter=x>")\n</parameter>\n'
        "</function>\n</tool_call>",
        calls=(weather(city='print("</function><parameter=x>")'),),
    ),
    "GLM": Sample(
        ("glm45", "glm45"),
        "<think>x</think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days"
        "</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now</tool_call>",
        reasoning="x",
        calls=(weather(city="Oslo", days=3), NOW),
    ),
    "GLM 4.7, all on a line": Sample(
        ("glm47", None),
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>",
        calls=(OSLO,),
    ),
    "Llama 3, a new line between": Sample(
        ("llama3_json", None),
        '{"name": "weather", "parameters": {"city": "Oslo"}}\n{"name": "now", "parameters": {}}',
        calls=(OSLO, NOW),
    ),
    "Llama 3, nothing between": Sample(
        ("llama3_json", None),
        '<|python_tag|>{"name": "weather", "parameters": {"city": "Oslo"}}{"name": "now", "parameters": {}};'
        '{"name": "now", "arguments": {}}',
        calls=(OSLO, NOW, NOW),
    ),
    "Llama 3, an object that is no call": Sample(("llama3_json", None), '{"name": "Oslo"}', content='{"name": "Oslo"}'),
    "Mistral": Sample(
        ("mistral", "mistral"),
        '[THINK]so[/THINK]Well.[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]now[ARGS]{}',
        content="Well.",
        reasoning="so",
        calls=(OSLO, NOW),
    ),
    "Mistral with ids": Sample(
        ("mistral", None),
        '[TOOL_CALLS]weather[CALL_ID]aB3dE6fG9[ARGS]{"city": "Oslo"}',
        calls=((*OSLO, "aB3dE6fG9"),),
    ),
    "Mistral without the mark of arguments, doubled": Sample(
        ("mistral", None), '[TOOL_CALLS][TOOL_CALLS]weather{"city": "Oslo"}', calls=(OSLO,)
    ),
    "Mistral, a bare object": Sample(
        ("mistral_list", None),
        'Hi[TOOL_CALLS] {"name": "weather", "arguments": {"city": "Oslo"}}',
        content="Hi",
        calls=(OSLO,),
    ),
    "Mistral, a list, then another": Sample(
        ("mistral", None),
        '[TOOL_CALLS] [{"arguments": {"city": "Oslo"}, "name": "weather"}][TOOL_CALLS][{"name": "now"}]',
        calls=(OSLO, NOW),
    ),
    "Kimi-K2": Sample(
        ("kimi_k2", "kimi_k2"),
        "<think>a</think>I look. <|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        '<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|><|tool_call_begin|>functions.now:1 '
        "<|tool_call_argument_begin|> {} <|tool_call_end|><|tool_calls_section_end|>",
        content="I look.",
        reasoning="a",
        calls=((*OSLO, "functions.weather:0"), (*NOW, "functions.now:1")),
    ),
    "Kimi-K2 within an unclosed thought, one id twice": Sample(
        ("kimi_k2", "kimi_k2"),
        "<think>a<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_call_begin|>now:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        reasoning="a",
        calls=((*NOW, "functions.now:0"), NOW),
    ),
    "MiniMax-M2": Sample(
        ("minimax_m2", "minimax_m2"),
        'Hm.\n</think>\n\nSure.\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Köln "am" '
        'Rhein</parameter>\n<parameter name="filter">{"a": [true]}</parameter>\n</invoke>\n<invoke name="now">\n'
        "</invoke>\n</minimax:tool_call>",
        content="Sure.",
        reasoning="Hm.",
        calls=(("weather", {"city": 'Köln "am" Rhein', "filter": {"a": [True]}}), NOW),
        is_open=True,
    ),
    "Seed-OSS": Sample(
        ("seed_oss", "seed_oss"),
        "<seed:think>Format is <seed:tool_call>\n<function=weather>\n<parameter=city>X</parameter>\n</function>\n"
        "</seed:tool_call>. Wait.</seed:think><seed:tool_call>\n<function=weather>\n<parameter=city>Oslo, Norway"
        "</parameter>\n<parameter=days>2</parameter>\n</function>\n</seed:tool_call>",
        reasoning="Format is <seed:tool_call>\n<function=weather>\n<parameter=city>X</parameter>\n</function>\n"
        "</seed:tool_call>. Wait.",
        calls=(weather(city="Oslo, Norway", days=2),),
    ),
    "Gemma 4": Sample(
        ("gemma4", "gemma4"),
        '<|channel>thought\n  Which?\n<channel|>I look.<|tool_call>call:weather{city:<|"|>Oslo, {N}<|"|>,days:3,'
        'exact:true,filter:{wind:[1,2.5,<|"|>x<|"|>],<|"|>3<|"|>:null}}<tool_call|><|tool_call>call:now{}<tool_call|>',
        content="I look.",
        reasoning="  Which?",
        calls=(weather(city="Oslo, {N}", days=3, exact=True, filter={"wind": [1, 2.5, "x"], "3": None}), NOW),
    ),
    "Gemma 4, a thought without its name": Sample(
        ("gemma4", "gemma4"),
        "<|channel>thousand things<channel|>A",
        content="A",
        reasoning="thousand things",
    ),
    "FunctionGemma": Sample(
        ("functiongemma", None),
        "<start_function_call>call:weather{city:<escape>Oslo<escape>}<end_function_call>",
        calls=(OSLO,),
    ),
    "Command": Sample(
        ("command", "cohere_command3"),
        "<|START_THINKING|>I look.<|END_THINKING|><|START_ACTION|>[\n    "
        '{"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Oslo"}},\n    '
        '{"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]\n<|END_ACTION|>',
        reasoning="I look.",
        calls=(OSLO, NOW),
    ),
    "Command, an answer": Sample(
        ("command", "command"),
        "<|START_THINKING|>a<|END_THINKING|>\n<|START_RESPONSE|>Hi <b>you</b>.\n<|END_RESPONSE|>",
        content="Hi <b>you</b>.",
        reasoning="a",
    ),
    "Command, an answer without a thought": Sample(
        ("command", "command"), "<|START_RESPONSE|>Hi.<|END_RESPONSE|>", content="Hi.", reasoning=""
    ),
    "Hunyuan": Sample(
        ("hunyuan_a13b", "hunyuan_a13b"),
        "<think>\nLook.\n</think>\n<answer>\nI look.\n"
        '<tool_calls>[{"name": "weather", "arguments": {"city": "北京"}}, {"name": "now", "arguments": {}}]'
        "</tool_calls>\n</answer>",
        content="I look.",
        reasoning="Look.",
        calls=(weather(city="北京"), NOW),
    ),
    "Hunyuan, no thought": Sample(
        ("hunyuan_a13b", "hunyuan_a13b"),
        "<think>\n\n</think>\n<answer>\nSo:\n</b>\n\nyes\n</answer>",
        content="So:\n</b>\n\nyes",
        reasoning="",
    ),
    "Granite 3": Sample(
        ("granite", "granite"),
        'Here is my thought process:\n\nLook.\n\nHere is my response:\n\n<|tool_call|>[{"name": "weather", '
        '"arguments": {"city": "Oslo"}}, {"arguments": {}, "name": "now"}]',
        reasoning="Look.",
        calls=(OSLO, NOW),
    ),
    "Granite 3.1": Sample(
        ("granite", None), '<tool_call> [{"name": "weather", "arguments": {"city": "Oslo"}}]', calls=(OSLO,)
    ),
    "Granite 3.3": Sample(
        ("granite", "granite_3.3"),
        "<think>Look.</think><response>Hi.</response>",
        content="Hi.",
        reasoning="Look.",
    ),
    "Granite, not what it begins like": Sample(
        ("granite", "granite"), "Here is my thought.", content="Here is my thought.", reasoning=""
    ),
    "Phi-4-mini": Sample(
        ("phi4_mini_json", None),
        'Sure. functools[\n  {"name": "weather", "arguments": {"city": "Oslo"}},\n  {"name": "now", '
        '"arguments": {}}\n]',
        content="Sure.",
        calls=(OSLO, NOW),
    ),
    "Phi-4-mini, by its own tokens": Sample(
        ("phi4_mini", None),
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Oslo"}}]<|/tool_call|>',
        calls=(OSLO,),
    ),
    "Olmo 3": Sample(
        ("olmo3", "olmo3"),
        '<think>a</think>\n<function_calls>\nweather(city="Oslo\'s\\n", days=3, note=null)\nnow()\n</function_calls>',
        reasoning="a",
        calls=(weather(city="Oslo's\n", days=3, note=None), NOW),
    ),
    "LFM2": Sample(
        ("lfm2", None),
        "<|tool_call_start|> [weather(city='Oslo', exact=True, filter={'a': [None]}), now()]<|tool_call_end|>Looking.",
        content="Looking.",
        calls=(("weather", {"city": "Oslo", "exact": True, "filter": {"a": [None]}}), NOW),
    ),
    "Llama 4": Sample(
        ("llama4_pythonic", None),
        'I look. <|python_start|>[weather(city="Oslo"),now()]<|python_end|>',
        content="I look.",
        calls=(OSLO, NOW),
    ),
    "Llama 4, a bare list": Sample(("llama4_pythonic", None), '[weather(city="Oslo"), now()]', calls=(OSLO, NOW)),
    "Llama 4, JSON": Sample(
        ("llama4_json", None),
        '<|python_start|>{"name": "weather", "parameters": {"city": "Oslo"}}<|python_end|>',
        calls=(OSLO,),
    ),
    "Llama 4, JSON for Python": Sample(("llama4_pythonic", None), '{"name": "now", "parameters": {}}', calls=(NOW,)),
    "Llama 3.2, Python": Sample(
        ("pythonic", None),
        "[grocery.order(items=[{'name': 'eggs', 'n': 6}], to='845 Willow'), get-time()]",
        calls=(("grocery.order", {"items": [{"name": "eggs", "n": 6}], "to": "845 Willow"}), ("get-time", {})),
    ),
    "Nemotron": Sample(
        ("nemotron_json", "think"),
        '<think>\na\n</think>\n\nI look.<TOOLCALL>[{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": '
        '"now", "arguments": {}}]</TOOLCALL>',
        content="I look.",
        reasoning="a",
        calls=(OSLO, NOW),
    ),
    "Nemotron, one object": Sample(
        ("nemotron_json", None), '<TOOLCALL>{"name": "now", "arguments": {}}</TOOLCALL>', calls=(NOW,)
    ),
    "Gemma 3": Sample(
        ("gemma", None),
        "Well:\n```tool_code\nweather(city='Oslo')\n```",
        content="Well:",
        calls=(OSLO,),
    ),
    "Granite 20B": Sample(
        ("granite-20b-fc", None),
        '<function_call> {"name": "weather", "arguments": {"city": "Oslo"}}\n<function_call>{"name": "now"}',
        calls=(OSLO, NOW),
    ),
    "InternLM": Sample(
        ("internlm", None),
        'Hi.<|action_start|><|plugin|>{"name": "now", "parameters": {}}<|action_end|>',
        content="Hi.",
        calls=(NOW,),
    ),
    "LongCat": Sample(
        ("longcat", None),
        '<longcat_tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</longcat_tool_call>',
        calls=(OSLO,),
    ),
}

# One call of `weather` and one of `now`, or one alone, as the chat template of a family shows them.
DEMANDED = {
    "harmony": '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo", "days": 3}',
    "deepseek_v3": _DS + _CALL + "function" + _SEP + 'weather\n```json\n{"city": "Oslo", "days": 3}\n```' + _END + "\n"
    + _CALL + "function" + _SEP + "now\n```json\n{}\n```" + _END + _DS_END,
    "deepseek_v31": _DS + _CALL + "weather" + _SEP + '{"city": "Oslo", "days": 3}' + _END + _CALL + "now" + _SEP + "{}"
    + _END + _DS_END,
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Oslo", "days": 3}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}'
    "<|tool_call_end|><|tool_calls_section_end|>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n<parameter '
    'name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    "seed_oss": "<seed:tool_call>\n<function=weather>\n<parameter=city>Oslo</parameter>\n<parameter=days>3"
    "</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
    "glm": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "gemma4": '<|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:3}<tool_call|><|tool_call>call:now{}<tool_call|>',
    "functiongemma": "<start_function_call>call:weather{city:<escape>Oslo<escape>,days:3}<end_function_call>",
    "command": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Oslo", '
    '"days": 3}},\n    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
    "hunyuan_a13b": '<tool_calls>[{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}, {"name": "now", '
    '"arguments": {}}]</tool_calls>',
    "nemotron_json": '<TOOLCALL>[{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}]</TOOLCALL>',
    "olmo3": '<function_calls>weather(city="Oslo", days=3)\nnow()</function_calls>',
    "lfm2": '<|tool_call_start|>[weather(city="Oslo", days=3), now()]<|tool_call_end|>',
    "granite": '<|tool_call|>[{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}]',
    "phi4_mini_json": 'functools[{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}]',
    "phi4_mini": '<|tool_call|>[{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}]<|/tool_call|>',
    "granite-20b-fc": '<function_call> {"name": "weather", "arguments": {"city": "Oslo", "days": 3}}',
    "internlm": '<|action_start|><|plugin|>\n{"name": "weather", "parameters": {"city": "Oslo", "days": 3}}'
    "<|action_end|>",
    "longcat": '<longcat_tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n'
    "</longcat_tool_call>",
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>\n<tool_call>\n'
    '{"name": "now", "arguments": {}}\n</tool_call>',
    "mistral": '[TOOL_CALLS]weather[ARGS]{"city": "Oslo", "days": 3}[TOOL_CALLS]now[ARGS]{}',
    "mistral_list": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}]',
    "gemma": '```tool_code\nweather(city="Oslo", days=3)\nnow()\n```',
    "llama4_pythonic": '<|python_start|>[weather(city="Oslo", days=3), now()]<|python_end|>',
    "pythonic": '[weather(city="Oslo", days=3), now()]',
    "llama4_json": '{"name": "weather", "parameters": {"city": "Oslo", "days": 3}}\n{"name": "now", "parameters": {}}',
    "llama3_json": '{"name": "weather", "parameters": {"city": "Oslo", "days": 3}}; {"name": "now", "parameters": {}}',
}  # fmt: skip

# Texts of chat templates, and the forms that they show.
TEMPLATES = {
    "gpt-oss": ("<|start|>assistant to=functions.<|channel|>commentary json<|message|>", "harmony", "harmony"),
    "DeepSeek R1": ("</think><｜tool▁calls▁begin｜><｜tool▁sep｜>```json", "deepseek_v3", "think"),
    "DeepSeek V3": ("<｜tool▁calls▁begin｜><｜tool▁sep｜>```json", "deepseek_v3", None),
    "DeepSeek V3.1": ("</think><｜tool▁calls▁begin｜><｜tool▁sep｜>", "deepseek_v31", "think"),
    "Kimi-K2": ("<|tool_calls_section_begin|>", "kimi_k2", None),
    "MiniMax-M2": ("<minimax:tool_call></think>", "minimax_m2", "think"),
    "Seed-OSS": ("<seed:tool_call><function=</parameter></seed:think>", "seed_oss", "seed_oss"),
    "GLM": ("<tool_call><arg_key></think>", "glm", "think"),
    "Qwen3-Coder": ("<tool_call><function=", "qwen3_coder", None),
    "Qwen3": ("<tool_call></think>", "hermes", "think"),
    "Gemma 4": ("<|tool_call>call:<|channel>thought\n<channel|>", "gemma4", "gemma4"),
    "Gemma 3": ("tool_code", "gemma", None),
    "Command": ("<|START_ACTION|><|START_THINKING|><|END_THINKING|>", "command", "command"),
    "Hunyuan": ("<tool_calls>[{<think>\n\n</think>", "hunyuan_a13b", "hunyuan_a13b"),
    "Nemotron": ("<TOOLCALL>", "nemotron_json", None),
    "Olmo 3": ("<functions><function_calls>", "olmo3", None),
    "LFM2": ("<|tool_list_start|>", "lfm2", None),
    "Granite 3.2": ("<|start_of_role|><|tool_call|>Here is my thought process:", "granite", "granite"),
    "Granite 3.3": ("<|start_of_role|><|tool_call|><think></think><response></response>", "granite", "granite_3.3"),
    "Granite 4": ("<|start_of_role|><tool_call>", "hermes", None),
    "Phi-4-mini": ("<|tool|><|/tool|>", "phi4_mini", None),
    "Phi-4-mini, vLLM's": ("functools[", "phi4_mini_json", None),
    "Mistral": ("[TOOL_CALLS][ARGS][THINK]", "mistral", "mistral"),
    "Mistral v3": ("[TOOL_CALLS]", "mistral_list", None),
    "Llama 3": ("<|python_tag|>", "llama3_json", None),
    "Llama 3.2, Python": ("[func_name1(params_name1=params_value1", "pythonic", None),
    "Llama 4": ("<|header_start|><|python_start|>", "llama4_json", None),
    "Llama 4, Python": ("<|header_start|><|python_start|>[func_name1(param1=value1", "llama4_pythonic", None),
    "none": ("{{ messages }}", None, None),
}
