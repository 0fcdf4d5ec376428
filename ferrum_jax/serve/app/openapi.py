"""What a server answers, as OpenAPI 3.1 and as a page, both made from its routes and the table of fields."""

import functools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from ferrum_jax.io.pages.html_page import document, escaped, table
from ferrum_jax.openai.body_fields import BODIES, SOUNDS
from ferrum_jax.openai.schemas import DIALECT, body_schema, in_words

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'"
_STREAMED = ("completion", "chat", "response", *SOUNDS)
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
        kind = "multipart/form-data" if each.body in SOUNDS else "application/json"
        found["requestBody"] = {"required": True, "content": {kind: {"schema": schema}}}
    if each.needs_key:
        found["security"] = [{"key": []}, {}]
    return found


def _page(described: Mapping[str, Any]) -> bytes:
    paths = [
        (f"{method.upper()} {path}", said["summary"])
        for path, methods in described["paths"].items()
        for method, said in methods.items()
    ]
    schemas = described["components"]["schemas"]
    kinds = [*BODIES, *(kind for kind in schemas if kind not in BODIES and kind != "error")]
    cards = [_card("paths", paths), *(_card(f"body: {kind}", _fields(schemas[kind])) for kind in kinds)]
    name = f"ferrum_jax {described['info']['version']}"
    return document(name, f"<h1>{escaped(name)}</h1>", *cards).encode()


def _card(title: str, rows: Iterable[tuple[str, str]]) -> str:
    return f"<h2>{escaped(title)}</h2>{table((), rows)}"


def _fields(schema: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for name, said in schema["properties"].items():
        if not said["description"].startswith("not here:"):
            needed = "needed: " if name in schema["required"] else ""
            yield name, f"{needed}{said['description']} ({in_words(said)})"
