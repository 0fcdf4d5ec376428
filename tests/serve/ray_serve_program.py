"""Two replicas of a small model under Ray Serve answer as one LLM does, whole and streamed. Prints a line of JSON."""

import json
import urllib.request
from collections.abc import Callable
from typing import Any

import ray
from ray import serve

from ferrum_jax import LLM, SamplingParams
from tests.support import GOLDENS, SMALL

PORT = 8123
PROMPTS = ["def main():", "import os", "class A:", "x = 1"]


def ask(prompt: str, **more: object) -> bytes:
    body = json.dumps({"model": "model", "prompt": prompt, "max_tokens": 8, "temperature": 0, **more}).encode()
    asked = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=120) as answer:
        return answer.read()


def check(replicas: Callable[..., Any]) -> None:
    """replicas: of the example."""
    model = str(GOLDENS / "qwen3")
    ray.init(num_cpus=4, include_dashboard=False)
    serve.start(http_options={"port": PORT})
    serve.run(replicas(model, 2, SMALL), name="ferrum", route_prefix="/")
    texts = [json.loads(ask(prompt))["choices"][0]["text"] for prompt in PROMPTS * 4]
    stream = ask(PROMPTS[0], stream=True)
    serve.shutdown()
    ray.shutdown()
    wanted = [
        output.text for output in LLM(model, SMALL).generate(PROMPTS, SamplingParams(max_tokens=8, temperature=0.0))
    ]
    events = [json.loads(line[6:]) for line in stream.split(b"\n") if line.startswith(b"data: {")]
    streamed = "".join(choice["text"] for event in events for choice in event["choices"])
    print(json.dumps({"equal": texts == wanted * 4, "streamed": streamed == wanted[0], "ended": b"[DONE]" in stream}))
