"""A thousand clients for two minutes, a third of whom leave at random and a tenth of whom send garbage."""

import asyncio
import gc
import json
import os
import random
import time

import pytest

from ferrum_jax.serve.http.settings import ServerSettings
from tests.histories import seeded
from tests.serve.running import Running, request, running

CLIENTS, SECONDS = 1000, 120
GARBAGE = (
    b"\x00\xff garbage\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n",
    request("/v1/completions", b"{"),
    request("/v1/completions", b'{"prompt": {}, "n": "x"}'),
    request("/v1/completions", b'{"prompt": "' + b"x" * 300_000 + b'"}'),
    request("/v1/completions", b'{"prompt": "x"}')[:-4],
)


def asked(place: int, **fields: object) -> bytes:
    body = {"prompt": [7 + place, 9, 11], "max_tokens": 4, "temperature": 0, **fields}
    return request("/v1/completions", json.dumps(body).encode())


def text_of(answer: bytes) -> str | None:
    """The text of a good answer; None of another."""
    head, _, content = answer.partition(b"\r\n\r\n")
    return json.loads(content)["choices"][0]["text"] if head.startswith(b"HTTP/1.1 200") else None


class Crowd:
    """num_good, num_busy: answers, and those that were told to come again. wrong: what should not have been said."""

    def __init__(self, server: Running, wanted: list[str | None]) -> None:
        self.num_good = self.num_busy = 0
        self.wrong: list[bytes] = []
        self._server, self._wanted = server, wanted

    async def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        await asyncio.gather(*[self._client(random.Random(seeded(seed)), end) for seed in range(CLIENTS)])

    async def _client(self, draw: random.Random, end: float) -> None:
        await asyncio.sleep(draw.random() * 2)
        while time.monotonic() < end:
            kind = draw.random()
            if kind < 0.1:
                await self._speak(draw.choice(GARBAGE), leave_s=0.05)
            elif kind < 0.43:
                content = asked(draw.randrange(20), max_tokens=100, stream=draw.random() < 0.5)
                await self._speak(content, leave_s=draw.random())
            else:
                await self._good(draw.randrange(20))

    async def _good(self, place: int) -> None:
        answer = await self._speak(asked(place))
        if answer.startswith(b"HTTP/1.1 429"):
            self.num_busy += 1
            await asyncio.sleep(0.5)
        elif text_of(answer) == self._wanted[place]:
            self.num_good += 1
        else:
            self.wrong.append(answer)

    async def _speak(self, content: bytes, leave_s: float | None = None) -> bytes:
        """What is answered; b"" where it is not waited for."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        try:
            writer.write(content)
            if leave_s is None:
                return await reader.read(-1)
            await asyncio.sleep(leave_s)
            return b""
        except OSError:  # the server has closed on garbage
            return b""
        finally:
            writer.close()


def held_bytes() -> int:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.long
def test_a_crowd_gets_right_answers_and_leaves_nothing():
    settings = ServerSettings(names=("small",), max_waiting=500, max_body_bytes=200_000, body_s=5.0)
    with running(settings) as server:
        wanted = [text_of(server.raw(asked(place))) for place in range(20)]
        asyncio.run(Crowd(server, wanted).run(SECONDS / 4))  # what grows at first has grown
        server.wait_until_idle(60.0)
        time.sleep(6.0)  # connections that clients left end
        before, files, tasks = held_bytes(), len(os.listdir("/proc/self/fd")), server.num_tasks()
        crowd = Crowd(server, wanted)
        asyncio.run(crowd.run(SECONDS))
        server.wait_until_idle(60.0)
        time.sleep(6.0)  # bodies that never came are given up
        assert not crowd.wrong, crowd.wrong[0][:500]
        assert crowd.num_good > 100, (crowd.num_good, crowd.num_busy)
        assert len(os.listdir("/proc/self/fd")) <= files + 5
        assert server.num_tasks() <= tasks
        assert held_bytes() < 1.02 * before
        assert server.llm.thread.failed is None and server.ask("/health")[0] == 200
