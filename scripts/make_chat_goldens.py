#!/usr/bin/env python3
"""Makes tests/text/templates/recorded.json: what transformers renders from the chat templates beside it.

    python -m scripts.make_chat_goldens

Needs transformers (made with 5.23); the tests that read the result do not. A template is a file NAME.jinja, written for
the tests with the constructs of its family; each is rendered with every conversation, or its refusal is recorded.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import (  # pyright: ignore[reportMissingImports]
    render_jinja_template,
)

FOLDER = Path("tests/text/templates")
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "  What is 2 < 3 & 'é'? \n"}
CALL = {"name": "weather", "arguments": {"city": "Zürich", "days": 2}}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "id": "abcdefghi", "function": CALL}],
}
RESULT = {"role": "tool", "name": "weather", "tool_call_id": "abcdefghi", "content": '{"sky": "<clear>"}'}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ANSWER = {"role": "assistant", "content": " Yes. "}
THOUGHT = {"role": "assistant", "content": "<think>\nTwo is less.\n</think>\n\nYes."}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [ASK]},
    "system": {"messages": [SYSTEM, ASK]},
    "turns": {"messages": [SYSTEM, ASK, ANSWER, ASK]},
    "no generation prompt": {"messages": [ASK, ANSWER], "add_generation_prompt": False},
    "two users": {"messages": [ASK, ASK]},
    "unknown role": {"messages": [{"role": "bystander", "content": "Hm."}]},
    "tools": {"messages": [SYSTEM, ASK], "tools": [TOOL]},
    "a call and its result": {"messages": [ASK, CALLED, RESULT], "tools": [TOOL, TOOL]},
    "thoughts": {"messages": [ASK, THOUGHT, ASK, THOUGHT], "add_generation_prompt": False},
    "no thinking": {"messages": [ASK, THOUGHT, ASK], "enable_thinking": False},
    "a date": {"messages": [ASK], "date_string": "1 Jan 2020"},
}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    templates = sorted(FOLDER.glob("*.jinja"))
    recorded = {
        "tokens": TOKENS,
        "conversations": CONVERSATIONS,
        "texts": {path.stem: {name: render(path, name) for name in CONVERSATIONS} for path in templates},
    }
    (FOLDER / "recorded.json").write_text(json.dumps(recorded, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{len(templates)} templates, {len(CONVERSATIONS)} conversations")


def render(path: Path, name: str) -> str | None:
    """The reference's text; None where the template refuses."""
    options = {"date_string": "2 Feb 2022", "add_generation_prompt": True, **CONVERSATIONS[name]}
    messages, tools = options.pop("messages"), options.pop("tools", None)
    try:
        texts, _ = render_jinja_template(
            [messages], tools=tools, chat_template=path.read_text(encoding="utf-8"), **TOKENS, **options
        )
    except jinja2.TemplateError:
        return None
    return texts[0]


if __name__ == "__main__":
    main()
