"""Transcriptions over HTTP: OpenAI's own client gets what a program gets, and forms are refused in words."""

import json
import urllib.request
import warnings

import pytest

from ferrum_jax.serve.http.settings import ServerSettings
from ferrum_jax.tasks.transcription.forms import as_text, as_verbose_json
from scripts.goldens.sounds import wav
from tests.rows import rows_beside
from tests.serve.running import running
from tests.transcribing.heard import RATE, whisper_llm

SECONDS = 31
PATH = "/v1/audio/transcriptions"


@pytest.fixture(scope="module")
def content() -> bytes:
    return wav(SECONDS, RATE, 1)


@pytest.fixture(scope="module")
def server():
    with running(ServerSettings(names=("whisper",)), inner=whisper_llm()) as found:
        yield found


@pytest.fixture(scope="module")
def wanted(content):
    """What a program gets, by whether times are asked for; made before the server takes the model."""
    llm = whisper_llm()
    how = {"language": "en", "logprobs": True}
    return {timed: llm.transcribe(content, **how, timestamps=timed)[0] for timed in (False, "segment")}


def rounded(found: dict) -> dict:
    """The same with log-probabilities to three places: their last bits depend on the other rows of a step."""
    segments = [{**each, "avg_logprob": round(each["avg_logprob"], 3)} for each in found["segments"]]
    return {**found, "segments": segments}


@pytest.mark.parametrize("form", ["json", "text", "srt", "vtt", "verbose_json"])
def test_the_official_client_gets_what_a_program_gets(wanted, client, content, form):
    found = client.audio.transcriptions.create(
        model="whisper", file=("talk.wav", content), language="en", response_format=form, temperature=0
    )
    if form == "json":
        assert found.text == wanted[False].text and found.usage.seconds == SECONDS
    elif form == "verbose_json":
        assert rounded(json.loads(found.to_json())) == rounded(as_verbose_json(wanted["segment"], 0.0))
        assert found.language == "english" and found.duration == pytest.approx(SECONDS)
    else:
        assert found == as_text(wanted["segment"] if form != "text" else wanted[False], form)


def test_segments_may_be_asked_for_by_name(wanted, client, content):
    found = client.audio.transcriptions.create(
        model="whisper",
        file=("talk.wav", content),
        language="en",
        response_format="verbose_json",
        timestamp_granularities=["segment"],
    )
    assert [each.start for each in found.segments] == [each.start_s for each in wanted["segment"].segments]


def test_a_stream_gives_the_text_of_the_windows_in_their_order(wanted, client, content):
    events = list(
        client.audio.transcriptions.create(model="whisper", file=("a.wav", content), language="en", stream=True)
    )
    assert events[-1].type == "transcript.text.done" and events[-1].text == wanted[False].text
    assert {each.type for each in events[:-1]} == {"transcript.text.delta"}
    assert "".join(each.delta for each in events[:-1]) == wanted[False].text


def test_a_stream_with_times_gives_each_part_behind_its_text(wanted, client, content):
    events = client.audio.transcriptions.create(
        model="whisper", file=("a.wav", content), language="en", stream=True, response_format="verbose_json"
    )
    parts, grown, whole = [], "", ""
    for event in events:
        if event.type == "transcript.text.segment":
            parts.append((event.id, event.start, event.end, event.text))
            assert event.text.strip() in grown, "it was told before"
        elif event.type == "transcript.text.delta":
            grown += event.delta
        else:
            whole = event.text
    segments = wanted["segment"].segments
    assert parts == [(str(each.id), each.start_s, each.end_s, each.text) for each in segments] and len(parts) > 1
    assert grown == whole == wanted["segment"].text


def test_the_page_offers_a_form_for_sounds(server):
    _, _, page = server.ask("/")
    assert b'id="times"' in page and b"v1/audio/transcriptions" in page and b"http" not in page.split(b"<body>")[1]
    with urllib.request.urlopen(f"{server.url}/page/events") as events:
        shown = json.loads(next(line for line in events if line.startswith(b"data: "))[6:])
    assert (shown["writes_down"], shown["takes"], shown["max_body_bytes"]) == (True, [], 32 << 20)


def test_a_translation_is_asked_for_at_its_own_path(client, content):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the client's own
        found = client.audio.translations.create(
            model="whisper", file=("a.wav", content), response_format="verbose_json"
        )
    assert json.loads(found.to_json())["task"] == "translate"


BOUNDARY = "-=-=-"


def form(**fields: str | bytes | list[str]) -> bytes:
    """The bytes of a form. Values that are bytes are files."""
    found = b""
    for name, value in fields.items():
        for each in value if isinstance(value, list) else [value]:
            key = f"{name}[]" if isinstance(value, list) else name
            named = f'{key}"; filename="a.wav' if isinstance(each, bytes) else key
            head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{named}"\r\n\r\n'
            found += head.encode() + (each if isinstance(each, bytes) else each.encode()) + b"\r\n"
    return found + f"--{BOUNDARY}--\r\n".encode()


def ask(server, body: bytes, path: str = PATH, kind: str = f"multipart/form-data; boundary={BOUNDARY}"):
    return server.ask(path, body, Content_Type=kind)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        *rows_beside(__file__)["a form that asks for something else is refused by its field"],
        ({"file": b"no sound"}, None, "the sound is not a file of a kind"),
        ({"file": b""}, None, "the sound is empty"),
    ],
)
def test_a_form_that_asks_for_something_else_is_refused_by_its_field(server, fields, param, said):
    small = wav(1, RATE, 1)
    status, _, answer = ask(server, form(**{"file": small, "model": "whisper", **fields}))
    assert status in (400, 404), answer
    assert said in answer["error"]["message"] and answer["error"]["param"] == param, answer


@pytest.mark.parametrize(
    ("body", "kind", "status", "said"),
    [
        (b"{}", "application/json", 415, "must be multipart/form-data"),
        (form(file=b"x"), "multipart/form-data", 400, "no boundary"),
        (form(file=b"x")[:-20], f"multipart/form-data; boundary={BOUNDARY}", 400, "form"),
        (b"x" * 100, f"multipart/form-data; boundary={BOUNDARY}", 400, "no form that can be read"),
        (
            form(model="a" * 70_000),
            f"multipart/form-data; boundary={BOUNDARY}",
            400,
            "has more than 65,536 bytes",
        ),
        (form(model=["a"] * 65), f"multipart/form-data; boundary={BOUNDARY}", 400, "more than 64 parts"),
        (form(model="a")[:-11] + form(model="b"), f"multipart/form-data; boundary={BOUNDARY}", 400, "given twice"),
    ],
)
def test_what_is_no_form_is_refused(server, body, kind, status, said):
    found, _, answer = ask(server, body, kind=kind)
    assert found == status and said in answer["error"]["message"], answer


def test_a_form_that_is_too_large_is_refused_before_it_is_read():
    settings = ServerSettings(names=("whisper",), max_body_bytes=1000)
    with running(settings, inner=whisper_llm()) as server:
        status, _, answer = ask(server, form(file=wav(1, RATE, 1)))
    assert status == 413 and answer["error"]["code"] == "body_too_large"


def test_the_openapi_page_shows_a_form(server):
    status, _, found = server.ask("/openapi.json")
    said = found["paths"][PATH]["post"]
    assert status == 200 and list(said["requestBody"]["content"]) == ["multipart/form-data"]
    assert "language" in found["components"]["schemas"]["transcription"]["properties"]


def test_a_reader_who_leaves_a_stream_ends_its_windows(server, client):
    sound = ("a.wav", wav(95, RATE, 1))
    with client.audio.transcriptions.create(model="whisper", file=sound, language="en", stream=True) as events:
        assert next(iter(events)).type == "transcript.text.delta"
    server.wait_until_idle()
