"""Parts of bodies that tests of clients ask with."""

from typing import Any

CALL = '<tool_call>{"name":"go","arguments":{"to":"Rom"}}</tool_call>'
ASKS = [{"role": "user", "content": "Go?"}]
PLACES: dict[str, Any] = {"type": "object", "properties": {"to": {"enum": ["Köln", "Rom"]}}, "required": ["to"]}
PLACES["additionalProperties"] = False
TOOLS = [
    {"type": "function", "function": {"name": "go", "parameters": PLACES}},
    {"type": "function", "function": {"name": "stop"}},
]
TEXTS = ["a block holds keys", "tokens of a row", "another text"]
