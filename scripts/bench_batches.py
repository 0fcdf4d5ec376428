"""What a batch costs live requests: the same load at one server, by turns without a batch and beside one.

    python -m scripts.bench_batches --model checkpoints/demo --rounds 5

Prints one JSON line: the medians of both, and what the batch adds in percent. Rounds alternate, so that a machine that
is busy with something else is so for both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

_TIMES = ("ttft_ms", "tpot_ms", "e2el_ms")


def _ask(url: str, body: Any = None, kind: str = "application/json") -> Any:
    content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, content, {"Content-Type": kind})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def _begin(url: str, num_rows: int, prompt_tokens: int, max_tokens: int) -> str:
    """The id of a batch that takes longer than a round."""
    body = {"prompt": "word " * prompt_tokens, "max_tokens": max_tokens, "ignore_eos": True}
    lines = [
        json.dumps(
            {
                "custom_id": f"row-{i}",
                "method": "POST",
                "url": "/v1/completions",
                "body": {**body, "prompt": f"{i} {body['prompt']}"},
            }
        )
        for i in range(num_rows)
    ]
    parts = [('"purpose"', "batch"), ('"file"; filename="rows.jsonl"', "\n".join(lines))]
    form = "".join(f"--b\r\nContent-Disposition: form-data; name={name}\r\n\r\n{text}\r\n" for name, text in parts)
    file = _ask(f"{url}/v1/files", f"{form}--b--\r\n".encode(), "multipart/form-data; boundary=b")
    asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    return _ask(f"{url}/v1/batches", asked)["id"]


def _round(url: str, args: argparse.Namespace) -> dict[str, float]:
    """The medians of one load."""
    words = ["--num-prompts", str(args.num_prompts), "--request-rate", str(args.request_rate)]
    words += ["--input-len", str(args.input_len), "--output-len", str(args.output_len)]
    command = [sys.executable, "-m", "ferrum_jax", "bench", "serve", "--url", url, *words]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {name: found[f"median_{name}"] for name in _TIMES}


def _beside(url: str, args: argparse.Namespace) -> tuple[dict[str, float], int]:
    """The medians beside a batch, and how many of its rows were answered meanwhile."""
    batch = _begin(url, args.num_rows, args.input_len, args.output_len)
    while not _ask(f"{url}/v1/batches/{batch}")["request_counts"]["completed"]:
        time.sleep(0.1)
    before = _ask(f"{url}/v1/batches/{batch}")["request_counts"]["completed"]
    found = _round(url, args)
    state = _ask(f"{url}/v1/batches/{batch}")
    if state["status"] != "in_progress":
        raise SystemExit("the batch ended before the load did; give more --num-rows")
    _ask(f"{url}/v1/batches/{batch}/cancel", {})
    while _ask(f"{url}/v1/batches/{batch}")["status"] != "cancelled":
        time.sleep(0.1)
    return found, state["request_counts"]["completed"] - before


def main() -> None:
    """Starts the server, and prints what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-prompts", type=int, default=40)
    parser.add_argument("--request-rate", type=float, default=4.0)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--num-rows", type=int, default=5000)
    parser.add_argument("serve", nargs="*", help="after --: arguments of `ferrum-jax serve`")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ferrum_jax", "serve", "--model", args.model, "--port", "0", *args.serve]
        command += ["--batches", str(Path(folder, "batches"))]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
            try:
                assert server.stderr is not None
                line = next(line for line in server.stderr if " at http" in line)
                url = line.split(" at ")[1].split("/v1 ")[0]
                _round(url, args)  # what is compiled on first use
                alone, beside, rows = [], [], []
                for _ in range(args.rounds):
                    alone.append(_round(url, args))
                    found, num_rows = _beside(url, args)
                    beside.append(found)
                    rows.append(num_rows)
            finally:
                server.terminate()
    report: dict[str, Any] = {"rows_of_the_batch_in_a_round": statistics.median(rows)}
    for name in _TIMES:
        before, now = (statistics.median([each[name] for each in some]) for some in (alone, beside))
        report[name] = {"alone": before, "beside": now, "added_percent": round(100 * (now / before - 1), 1)}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
