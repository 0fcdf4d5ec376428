"""Files and batches over HTTP, by OpenAI's own client: what is uploaded is answered, listed, cancelled and deleted."""

from __future__ import annotations

import json
import time

import pytest

from ferrum_jax.serve.http.settings import ServerSettings
from tests.serve.running import running

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("batches")
    with running(ServerSettings(names=("small",), batches=str(folder), max_file_bytes=1 << 20)) as found:
        yield found


def rows(count: int, max_tokens: int = 4, **more) -> bytes:
    body = {"model": "small", "messages": [{"role": "user", "content": "hi"}], "max_tokens": max_tokens, **more}
    lines = [{"custom_id": f"row-{i}", "method": "POST", "url": CHAT, "body": body} for i in range(count)]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def begin(client, content: bytes, **more):
    file = client.files.create(file=("rows.jsonl", content), purpose="batch")
    asked = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    return client.batches.create(**{**asked, **more})


def ended(client, batch, seconds: float = 60.0):
    until = time.monotonic() + seconds
    while client.batches.retrieve(batch.id).status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < until, client.batches.retrieve(batch.id)
        time.sleep(0.05)
    return client.batches.retrieve(batch.id)


def lines_of(client, file_id: str | None) -> list[dict]:
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()] if file_id else []


def test_a_batch_goes_from_upload_to_its_answers(client):
    batch = begin(client, rows(5), metadata={"what": "test"})
    assert batch.status in ("validating", "in_progress") and batch.metadata == {"what": "test"}
    done = ended(client, batch)
    assert done.status == "completed", done
    print(done)
    found = lines_of(client, done.output_file_id)
    print(found[0])
    assert [line["custom_id"] for line in found] == [f"row-{i}" for i in range(5)]
