"""A service whose engine is the test, and requests of it; an ASGI host without a state."""

import dataclasses
from typing import Any

from ferrum_jax.openai.asked import AskedText
from ferrum_jax.sampling_params import SamplingParams
from ferrum_jax.serve.http.service import Service
from ferrum_jax.serve.http.settings import ServerSettings
from ferrum_jax.serve.link.engine_client import EngineClient


class OwnLink:
    """A link whose other end is the test."""

    def __init__(self) -> None:
        self.sent: list[list] = []
        self.receive = lambda messages: None

    def send(self, message: list) -> None:
        self.sent.append(message)


def service_over(link: OwnLink) -> Service:
    return Service(EngineClient(link), ServerSettings())


def open_over(service: Service, link: OwnLink, prompts: Any = None, **facts: Any) -> None:
    """The engine says that it is ready. prompts: None for those of the service."""
    known: dict[str, Any] = {
        "num_rows": 4,
        "generates": True,
        "max_model_len": 1000,
        "adapters": [],
        "forms": [None, None],
    }
    known["identity"] = {"generation": {}}
    link.receive([["ready", known | facts]])
    service.open(prompts or service.prompts)


def asked(prompt: Any, **params: Any) -> AskedText:
    fields: dict = dict.fromkeys(field.name for field in dataclasses.fields(AskedText))
    fields |= {"prompts": [prompt], "params": SamplingParams(detokenize=False, **params)}
    return AskedText(**fields | {"is_chat": False, "echo": False, "priority": 0})


async def got(app: Any, path: str) -> tuple[int, str]:
    """Status and text of an answer. ASGI leaves `state` out of the scope where a host has none."""
    sent: list[dict] = []

    async def receive() -> dict:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b"", "root_path": ""}
    await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent).decode()
