"""What a server answers, as OpenAPI 3.1 and as a page, both made from its routes and the table of fields."""

from __future__ import annotations

import functools
import html
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from ferrum_jax.openai.body_fields import BODIES
from ferrum_jax.openai.schemas import DIALECT, body_schema, in_words
from ferrum_jax.serve.app.page_routes import page_html

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'"
_STREAMED = ("completion", "chat", "response")
_NUMBERED_ERROR = {
    "type": "object",
    "properties": {
        "message": {"type": "string"},
        "type": {"type": "string"},
        "param": {"type": ["string", "null"], "description": "the field that is wrong, down to its place"},
        "code": {"type": ["string", "null"]},
    },
    "required": ["message", "type", "param", "code"],
}


class ServedPath(NamedTuple):
    """One path that a server has. body: its kind, None for none. needs_key: where the server has keys."""

    method: str
    path: str
    says: str
    body: str | None
    needs_key: bool


async def openapi(request: Request) -> Response:
    """This description, as OpenAPI 3.1."""
    content = json.dumps(_described(request), ensure_ascii=False, allow_nan=False).encode()
    return Response(content, media_type="application/json")


async def docs(request: Request) -> Response:
    """This description, as a page."""
    headers = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache", "Referrer-Policy": "no-referrer"}
    return Response(_page(_described(request)), media_type="text/html", headers=headers)


def _described(request: Request) -> dict[str, Any]:
    return description(tuple(request.app.state.answered), request.app.state.service.settings.version)


@functools.lru_cache(maxsize=4)
def description(answered: tuple[ServedPath, ...], version: str) -> dict[str, Any]:
    """The OpenAPI description of these paths."""
    paths: dict[str, dict[str, Any]] = {}
    for each in answered:
        paths.setdefault(each.path.replace(":path}", "}"), {})[each.method.lower()] = _operation(each)
    kinds = dict.fromkeys(each.body for each in answered if each.body is not None)
    error = {"type": "object", "properties": {"error": _NUMBERED_ERROR}, "required": ["error"]}
    return {
        "openapi": "3.1.0",
        "info": {"title": "ferrum_jax", "version": version or "unknown"},
        "jsonSchemaDialect": DIALECT,
        "paths": paths,
        "components": {
            "schemas": {kind: body_schema(kind, "http") for kind in kinds} | {"error": error},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(each: ServedPath) -> dict[str, Any]:
    words = re.sub(r"[^a-z0-9]+", "_", each.path.lower()).strip("_") or "page"
    kinds = ["application/json", *(["text/event-stream"] if each.body in _STREAMED else [])]
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/error"}}}
    found: dict[str, Any] = {
        "operationId": f"{each.method.lower()}_{words}",
        "summary": each.says,
        "responses": {
            "200": {"description": "the answer", "content": {kind: {} for kind in kinds}},
            "default": {"description": "an error", "content": error},
        },
    }
    if named := re.findall(r"\{(\w+)", each.path):
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in named
        ]
    if each.body is not None:
        schema = {"$ref": f"#/components/schemas/{each.body}"}
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if each.needs_key:
        found["security"] = [{"key": []}, {}]
    return found


def _page(described: Mapping[str, Any]) -> bytes:
    style = re.search(rb"(?s)<style>.*?</style>", page_html())
    assert style is not None, "the page has a style"
    head = '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport" content='
    head += '"width=device-width,initial-scale=1">\n<title>ferrum_jax</title>\n<link rel="icon" href="data:,">\n'
    version = html.escape(described["info"]["version"])
    rows = [
        f"<tr><td><code>{method.upper()} {html.escape(path)}</code></td><td>{html.escape(said['summary'])}</td></tr>"
        for path, methods in described["paths"].items()
        for method, said in methods.items()
    ]
    cards = [_card("paths", rows)]
    for kind in (*BODIES, *(each for each in described["components"]["schemas"] if each not in BODIES)):
        if kind != "error":
            cards.append(_card(f"body: {kind}", _fields(described["components"]["schemas"][kind])))
    main = f"<body>\n<main>\n<h1>ferrum_jax {version}</h1>\n{''.join(cards)}</main>\n</body>\n</html>\n"
    return head.encode() + style[0] + b"\n</head>\n" + main.encode()


def _card(title: str, rows: Iterable[str]) -> str:
    return f'<section class="card"><h2>{html.escape(title)}</h2><table>{"".join(rows)}</table></section><br>\n'


def _fields(schema: Mapping[str, Any]) -> Iterable[str]:
    for name, said in schema["properties"].items():
        if not said["description"].startswith("not here:"):
            needed = "<b>needed</b>: " if name in schema["required"] else ""
            words = html.escape(f"{said['description']} ({in_words(said)})")
            yield f"<tr><td><code>{html.escape(name)}</code></td><td>{needed}{words}</td></tr>"
