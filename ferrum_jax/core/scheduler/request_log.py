"""A request log: what was asked of an engine and what it answered, as token ids, for `ferrum-jax cache simulate`.

A JSONL file. An engine appends one header line with its sizes, then one line for each submission that ended;
so an engine that is started again begins a new segment, with empty caches. `arrival` counts the engine's
steps, not seconds: the same segment gives the same plans again. While executables are still being compiled, the tokens
that a step may have change, and so do horizons; each change has a line. Where tokens are drafted, so have what steps
take and each text that was learnt. Prompts stand in it in full, their images as digests and grids.
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ferrum_jax.core.plan import Draw
from ferrum_jax.inputs.prompt import MediaSpan, PlacedImage
from ferrum_jax.inputs.sizes.engine_sizes import EngineSizes

FORMAT = 7
_READS = range(3, FORMAT + 1)  # 3 has no limits, 3 and 4 have no images, 6 has drafts, 7 horizons
_HEADER = "ferrum_jax_request_log"  # of a header line, its format
_START = f'{{"{_HEADER}":'.encode()  # of a file
_PIECE_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggedChoice:
    """The tokens of one choice and what ended it."""

    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggedRequest:
    """One submission. arrival: calls of `Engine.step` before it was queued. max_tokens: of each choice, as far as it
    could go."""

    id: int  # ascending by when it was asked for
    arrival: int
    prompt_token_ids: list[int]
    max_tokens: int
    choices: list[LoggedChoice]
    priority: int = 0
    prompt_logprobs: bool = False  # its first choice takes no hits
    takes_hits: bool = True  # of its choices
    most_hit_tokens: int | None = None  # that its first choice may hit
    takes_drafts: bool = True
    draw: int = Draw.FULL
    needs_host: bool = False
    stop_ids: tuple[int, ...] = ()  # no draft goes beyond one of them
    adapter: str = ""  # its digest
    cache_salt: str = ""
    media: tuple[MediaSpan, ...] = ()
    images: tuple[PlacedImage, ...] = ()  # those that the model is given


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanLimit:
    """The most tokens of a step from some step on, None for what the sizes say, and horizons. arrival: steps before."""

    arrival: int
    token_limit: int | None
    horizons: Sequence[Sequence[int]] = ()  # as `Scheduler.limit` takes them


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToldCosts:
    """Step times from some step on: the fields of `StepCosts`, by rows. arrival: steps before it."""

    arrival: int
    costs: Sequence[tuple[int, float, Sequence[Sequence[float]]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearntText:
    """A text from elsewhere, from which tokens are drafted from some step on. arrival: steps before it."""

    arrival: int
    learnt: Sequence[int]  # its tokens
    num_prompt_tokens: int
    cache_salt: str


PlanEvent = PlanLimit | ToldCosts | LearntText
_EVENTS: dict[str, type[PlanEvent]] = {"token_limit": PlanLimit, "costs": ToldCosts, "learnt": LearntText}  # by a field


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """The lines of one engine, in order of arrival."""

    sizes: EngineSizes
    requests: list[LoggedRequest]
    events: list[PlanEvent] = dataclasses.field(default_factory=list)


class RequestLogWriter:
    """Appends a segment to a file. The file is open only while a line is written, so nothing has to be closed."""

    def __init__(self, path: str, sizes: EngineSizes) -> None:
        """Raises ValueError for a file that exists and is not a request log."""
        self._path = path
        if os.path.isfile(path):
            require_request_log(path)
            _cut_unfinished(path)
        self._write({_HEADER: FORMAT, **dataclasses.asdict(sizes)})

    def write(self, request: LoggedRequest) -> None:
        line = dataclasses.asdict(request)
        for name in ("media", "images"):
            line[name] = [{**part, "digest": part["digest"].hex()} for part in line[name]]
        self._write(line)

    def event(self, event: PlanEvent) -> None:
        self._write(dataclasses.asdict(event))

    def _write(self, line: Mapping[str, Any]) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


def require_request_log(path: str) -> None:
    """Raises ValueError for a file that exists, is not empty and is not a request log; nothing is appended to it."""
    if not os.path.isfile(path):
        return
    with open(path, "rb") as file:
        start = file.read(len(_START))
    if not _START.startswith(start):
        raise ValueError(f"{path} exists and is not a request log; name another file with request_log (--request-log)")


def _cut_unfinished(path: str) -> None:
    """Removes a last line that was cut short: what is appended would stand on it."""
    with open(path, "rb+") as file:
        end = size = file.seek(0, os.SEEK_END)
        while end:
            start = max(end - _PIECE_BYTES, 0)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            file.truncate(end)


def read_request_log(path: Path) -> list[Segment]:
    """The segments of a request log. A last line that was cut short (its engine was killed) is left out.

    Raises ValueError naming the file and the line that does not belong to a request log.
    """
    segments: list[Segment] = []
    with open(path, encoding="utf-8") as file:
        for number, text in enumerate(file, start=1):
            if not text.endswith("\n"):
                break
            try:
                line = _parse(text)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ValueError(f"{path}, line {number} is not a line of a request log: {error}") from error
            if isinstance(line, EngineSizes):
                segments.append(Segment(sizes=line, requests=[]))
            elif not segments:
                raise ValueError(
                    f"{path} does not begin with the header of a request log; write one with --request-log"
                )
            elif isinstance(line, LoggedRequest):
                segments[-1].requests.append(line)
            else:
                segments[-1].events.append(line)
    if not any(segment.requests for segment in segments):
        raise ValueError(f"{path} holds no request that ended; write a request log with --request-log")
    for segment in segments:
        segment.requests.sort(key=lambda request: (request.arrival, request.id))
    return segments


def _parse(text: str) -> EngineSizes | LoggedRequest | PlanEvent:
    line = json.loads(text)
    if _HEADER in line:
        found = line.pop(_HEADER)
        if found not in _READS:
            raise ValueError(f"its format is {found}, this version reads {_READS[0]} to {FORMAT}")
        return EngineSizes(**line)
    for event in (kind for field, kind in _EVENTS.items() if field in line):
        return event(**line)
    media = tuple(MediaSpan(**_with_digest(span)) for span in line.pop("media"))
    if "images" not in line and any(span.kind == "image" for span in media):
        raise ValueError(
            "its prompt has images, and only logs of format 5 or later say what was encoded of them; write the log "
            "again"
        )
    images = tuple(_image(image) for image in line.pop("images", ()))
    choices = [LoggedChoice(**choice) for choice in line.pop("choices")]
    stop_ids = tuple(line.pop("stop_ids", ()))
    return LoggedRequest(**line, choices=choices, stop_ids=stop_ids, media=media, images=images)


def _image(part: Mapping[str, Any]) -> PlacedImage:
    grids = {name: part[name] and tuple(part[name]) for name in ("grid", "rope_grid")}
    return PlacedImage(**{**_with_digest(part), **grids})


def _with_digest(part: Mapping[str, Any]) -> dict[str, Any]:
    return {**part, "digest": bytes.fromhex(part["digest"])}
