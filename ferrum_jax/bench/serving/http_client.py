"""One streamed request over a connection of its own, with the time of each event. It needs no library."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import ssl
import time
import urllib.parse
from collections.abc import AsyncIterator, Mapping
from typing import Any

from ferrum_jax.bench.serving.loads import TimedRequest

_MOST_LINE = 1 << 26


@dataclasses.dataclass(frozen=True, kw_only=True)
class Address:
    """Where a server is. path: before all of its paths."""

    host: str
    port: int
    path: str
    tls: ssl.SSLContext | None

    @classmethod
    def of(cls, url: str, *, verify: bool = True) -> Address:
        """Raises ValueError for what is no URL of a server."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--url is {url!r}; it must be as in http://127.0.0.1:8000")
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        if tls is not None and not verify:
            tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
        port = parts.port or (80 if tls is None else 443)
        return cls(host=parts.hostname, port=port, path=parts.path.rstrip("/").removesuffix("/v1"), tls=tls)


@dataclasses.dataclass(kw_only=True)
class Answered:
    """What became of a request. Times are seconds of one clock; error: "" where it went well."""

    asked: TimedRequest
    late_s: float = 0.0  # after it should have been sent
    sent: float = 0.0
    event_times: list[float] = dataclasses.field(default_factory=list)  # of those with tokens
    ended: float = 0.0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    text: str = ""
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.event_times[0] - self.sent

    @property
    def between_s(self) -> list[float]:
        return [later - sooner for sooner, later in zip(self.event_times, self.event_times[1:], strict=False)]

    @property
    def latency_s(self) -> float:
        return self.ended - self.sent

    @property
    def tpot_s(self) -> float:
        """Seconds a token after the first."""
        return (self.event_times[-1] - self.event_times[0]) / max(1, self.num_tokens - 1)


async def lines_of(
    place: Address, method: str, path: str, body: Any, headers: Mapping[str, str]
) -> AsyncIterator[bytes]:
    """The lines of an answer's body as they come. Raises ConnectionError for a status other than 200, with its text."""
    content = b"" if body is None else json.dumps(body).encode()
    given = {"Host": place.host, "Content-Type": "application/json", "Content-Length": len(content), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    reader, writer = await asyncio.open_connection(place.host, place.port, ssl=place.tls, limit=_MOST_LINE)
    try:
        writer.write(f"{method} {place.path}{path} HTTP/1.1\r\n{head}Connection: close\r\n\r\n".encode() + content)
        status = (await reader.readline()).decode("latin-1").split(" ", 2)[1:2]
        is_chunked = False
        while (line := await reader.readline()).strip():
            is_chunked |= line.lower().replace(b" ", b"").strip() == b"transfer-encoding:chunked"
        if status != ["200"]:
            raise ConnectionError(f"HTTP {''.join(status) or 'without a status'}: {(await reader.read(2000)).decode()}")
        rest = b""
        while part := await _part(reader, is_chunked):
            *whole, rest = (rest + part).split(b"\n")
            for line in whole:
                yield line
        if rest:
            yield rest
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _part(reader: asyncio.StreamReader, is_chunked: bool) -> bytes:
    if not is_chunked:
        return await reader.read(1 << 16)
    size = int((await reader.readline()).partition(b";")[0].strip() or b"0", 16)
    content = await reader.readexactly(size)
    await reader.readline()
    return content


async def ask(place: Address, asked: TimedRequest, model: str, headers: Mapping[str, str], more: Any) -> Answered:
    """Sends one request and reads its stream to the end. more: further fields of the body."""
    found = Answered(asked=asked, num_prompt_tokens=asked.num_prompt_tokens, sent=time.perf_counter())
    prompt = {"messages" if asked.is_chat else "prompt": asked.prompt}
    body = {"model": model, "max_tokens": asked.max_tokens, "stream": True, **prompt, **more}
    body["stream_options"] = {"include_usage": True}
    path = "/v1/chat/completions" if asked.is_chat else "/v1/completions"
    is_done = False
    try:
        async for line in lines_of(place, "POST", path, body, headers):
            if line.startswith(b"data: ") and not (is_done := line.startswith(b"data: [DONE]")):
                _take(found, json.loads(line[6:]))
        if not (is_done or found.error):
            found.error = "the stream broke off before its end"
    except (OSError, ValueError, asyncio.IncompleteReadError) as error:
        found.error = f"{type(error).__name__}: {error}"
    found.ended = time.perf_counter()
    if not found.error and not found.event_times:
        found.error = "no token came"
    return found


def _take(found: Answered, event: Mapping[str, Any]) -> None:
    if "error" in event:
        found.error = str(event["error"])
        return
    usage = event.get("usage")
    if usage:
        found.num_prompt_tokens, found.num_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    for choice in event.get("choices", ()):
        text = choice.get("text") or choice.get("delta", {}).get("content") or ""
        if text or choice.get("finish_reason") or choice.get("token_ids"):
            found.event_times.append(time.perf_counter())
            found.text += text
