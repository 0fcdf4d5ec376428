"""`ferrum-jax serve` over two processes with a data shard each: the answers of one process, and one end for both."""

import concurrent.futures
import contextlib
import json
import signal
import urllib.request

import pytest

from ferrum_jax import LLM, EngineConfig, SamplingParams
from tests.distributed import together
from tests.distributed.folder import write_model, write_tokenizer
from tests.serve.running import url_of
from tests.support import COMPILED

pytestmark = pytest.mark.slow
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 256, "num_blocks": 80, "block_size": 16}
FLAGS = [word for name, value in SIZES.items() for word in (f"--{name.replace('_', '-')}", str(value))]
PROMPTS = ["abc" * number for number in range(1, 9)]
TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model with a tokenizer."""
    folder = write_model(tmp_path_factory.mktemp("served") / "model")
    write_tokenizer(folder)
    return str(folder)


@contextlib.contextmanager
def two(model):
    """Both processes, that with HTTP first, and the server's URL."""
    serve = ["serve", "--model", model, "--mesh", "dp=2", "--port", "0", *FLAGS]
    with together.two(lambda n, *met: together.started(*serve, "--compilation-cache-dir", str(COMPILED), *met)) as both:
        yield both, url_of(both[0])


def ask(url, prompt, **more):
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, **more}
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    return urllib.request.urlopen(asked, timeout=60)


def text_of(url, prompt, **more):
    with ask(url, prompt, **more) as answer:
        return json.loads(answer.read())["choices"][0]["text"]


def test_two_processes_answer_as_one_and_a_signal_to_the_first_lets_both_end(model):
    alone = LLM(model, EngineConfig(**SIZES, compilation_cache_dir=str(COMPILED)))
    outputs = alone.generate(PROMPTS, SamplingParams(max_tokens=TOKENS, temperature=0.0))
    wanted = [output.text for output in outputs]
    assert len(set(wanted)) > 1
    with two(model) as ((leader, other), url):
        with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
            assert list(pool.map(lambda prompt: text_of(url, prompt), PROMPTS)) == wanted
        with ask(url, "x", stream=True, max_tokens=200, ignore_eos=True) as left:
            left.readline()  # and who asked leaves
        assert text_of(url, PROMPTS[0], structured_outputs={"choice": ["gab", "fed"]}) in ("gab", "fed")
        with ask(url, PROMPTS[0], stream=True, max_tokens=200, ignore_eos=True) as stream:
            stream.readline()
            leader.send_signal(signal.SIGTERM)
            assert stream.read().endswith(b"data: [DONE]\n\n")
        assert (leader.wait(60), other.wait(60)) == (0, 0), leader.stderr.read() + other.stderr.read()


def test_the_end_of_the_other_process_ends_the_server_with_75_while_nobody_asks(model):
    with two(model) as ((leader, other), url):
        assert text_of(url, PROMPTS[0])
        other.kill()
        assert leader.wait(60) == 75
        assert "process 1 has ended" in leader.stderr.read()
