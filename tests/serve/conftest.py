"""A server for the tests of a module, and OpenAI's own client of it."""

import openai
import pytest

from ferrum_jax.serve.http.settings import ServerSettings
from tests.serve.running import running


@pytest.fixture(scope="module")
def server():
    with running(ServerSettings(names=("small",))) as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found
