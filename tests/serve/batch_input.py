"""Batches for tests: rows, and what the official client is asked to do with them."""

import json
import time
from pathlib import Path
from typing import Any

from ferrum_jax.batch.job import EXIT_OK
from tests.batch.fake_llm import json_lines
from tests.batch.running import run_rows

CHAT = "/v1/chat/completions"


def rows(
    count: int, max_tokens: int = 4, *, first: int = 0, url: str = CHAT, body: dict | None = None, **more: Any
) -> bytes:
    """Lines of so many rows, of a short chat or of `body`. more: fields of a chat."""
    chat = {"model": "small", "messages": [{"role": "user", "content": "hi"}], "max_tokens": max_tokens, **more}
    lines = [
        {"custom_id": f"row-{i}", "method": "POST", "url": url, "body": body or chat}
        for i in range(first, first + count)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def begin(client: Any, content: bytes, **more: Any) -> Any:
    """A batch over this content, which is uploaded."""
    file = client.files.create(file=("rows.jsonl", content), purpose="batch")
    asked = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    return client.batches.create(**{**asked, **more})


def ended(client: Any, batch: Any, seconds: float = 120.0) -> Any:
    """The batch once it has ended."""
    until = time.monotonic() + seconds
    while (found := client.batches.retrieve(batch.id)).status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < until, found
        time.sleep(0.05)
    return found


def lines_of(client: Any, file_id: str | None) -> list[dict]:
    """What a file holds; nothing of no file."""
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()] if file_id else []


def bodies_of_job(llm: Any, folder: Path, *rows: dict[str, Any]) -> list[dict[str, Any]]:
    """The bodies that a job over these rows answers, in their order."""
    (folder / "in.jsonl").write_bytes(json_lines(rows))
    assert run_rows(folder, lambda start: llm) == EXIT_OK
    return [json.loads(line)["response"]["body"] for line in (folder / "out.jsonl").read_text().splitlines()]
