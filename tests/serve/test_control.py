"""A training loop pauses a server, has it sleep and gives it other weights, with an admin key."""

import asyncio
import concurrent.futures
import shutil
import threading

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ferrum_jax import LLM, EngineConfig, SamplingParams
from ferrum_jax.async_llm import AsyncLLM
from ferrum_jax.engine.engine_thread import EngineFailed
from ferrum_jax.serve.http.settings import ServerSettings
from tests.rows import rows_beside
from tests.serve.running import running
from tests.serve.test_adapters import read_key
from tests.serve.test_under_load import until
from tests.support import COMPILED, GOLDENS, INVARIANT, SMALL, in_loop

ADMIN = {"Authorization": "Bearer admin-key"}
PROMPT, LONG = [7, 8, 9], SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
BODY = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True}


WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The golden's weights in one folder, and in another with the sign of one turned."""
    found = tmp_path_factory.mktemp("weights")
    for name in ("same", "other"):
        shutil.copytree(GOLDENS / "qwen3", found / name)
    tensors = load_file(found / "other" / WEIGHTS)
    (name,) = [each for each in tensors if each.endswith("layers.0.self_attn.o_proj.weight")]
    tensors[name][-1, -1] *= -1
    save_file(tensors, found / "other" / WEIGHTS)
    return found


@pytest.fixture(scope="module")
def llm(root):
    return LLM(str(root / "same"), SMALL)


async def tokens(llm: AsyncLLM, **how) -> list:
    """The outputs of a request, as they grow."""
    return [output async for output in llm.generate(PROMPT, LONG, **how)]


async def begun(llm: AsyncLLM) -> asyncio.Task:
    """A request that has some of its tokens."""
    task = asyncio.create_task(tokens(llm))
    while not llm.thread.num_steps or not llm.thread.num_open:
        await asyncio.sleep(0.001)
    return task


@pytest.mark.parametrize("requests", ["keep", "wait", "abort"])
@in_loop
async def test_a_pause_keeps_ends_or_waits_for_what_runs_and_holds_what_comes(llm, requests):
    async with AsyncLLM.over(llm) as engine:
        (*_, wanted) = await tokens(engine)
        running = await begun(engine)
        await engine.pause(requests)
        steps = engine.thread.num_steps
        late = asyncio.create_task(tokens(engine))
        left = asyncio.create_task(tokens(engine))
        await asyncio.sleep(0.1)
        assert engine.is_paused and engine.thread.num_steps == steps and engine.thread.silence_s == 0
        assert not late.done() and running.done() == (requests != "keep")
        left.cancel()
        await engine.resume()
        (*_, first), (*_, second) = await running, await late
        assert second.token_ids == wanted.token_ids
        if requests == "abort":
            assert first.outputs[0].finish_reason == "abort"
            assert first.token_ids == wanted.token_ids[: len(first.token_ids)]
        else:
            assert first.token_ids == wanted.token_ids
        assert not engine.is_paused and engine.thread.num_open == 0


def held(thread) -> threading.Event:
    """The event for which the engine's thread waits from now on, taking no command."""
    begun, goes_on = threading.Event(), threading.Event()
    thread.call(lambda: begun.set() or goes_on.wait(60))
    assert begun.wait(60)
    return goes_on


def test_answers_in_one_piece_are_refused_when_they_are_aborted(root):
    settings = ServerSettings(names=("small",), admin_keys=(read_key("admin-key"),))
    bodies = {
        "/v1/completions": BODY,
        "/v1/responses": {"input": "hi", "max_output_tokens": 40},
        "/v1/embeddings": {"input": "hi"},
    }
    with running(settings) as server, concurrent.futures.ThreadPoolExecutor(4) as pool:
        goes_on = held(server.llm.thread)  # so that all of them come before the next step
        asked = [pool.submit(server.ask, path, body) for path, body in bodies.items()]
        until(lambda: server.llm.thread._commands.qsize() >= 3)
        server.llm.thread.pause("abort")
        goes_on.set()
        completion, response, embedding = (each.result()[2] for each in asked)
        server.llm.thread.resume()
    assert completion["choices"][0]["finish_reason"] == "abort"
    assert response["status"] == "failed" and "ended by who owns the engine" in response["error"]["message"]
    assert embedding["error"]["code"] == "aborted" and asked[2].result()[0] == 503


@in_loop
async def test_scores_and_vectors_of_an_aborted_request_are_an_error(llm):
    async with AsyncLLM.over(llm) as engine:
        goes_on = held(engine.thread)
        asked = [asyncio.create_task(call) for call in (engine.embed("hi"), engine.compute_logprobs([PROMPT]))]
        while engine.thread._commands.qsize() < 2:
            await asyncio.sleep(0.01)
        paused = engine.thread.pause("abort")
        goes_on.set()
        await asyncio.wrap_future(paused)
        for task in asked:
            with pytest.raises(EngineFailed, match="ended by who owns the engine"):
                await task


@in_loop
async def test_a_pause_that_is_resumed_while_it_waits_says_so(llm):
    async with AsyncLLM.over(llm) as engine:
        running = await begun(engine)
        waits = asyncio.create_task(engine.pause("wait"))
        await asyncio.sleep(0)
        resumed = engine.thread.resume()
        try:
            await waits
            paused = True
        except ValueError as error:
            paused = False
            assert "resumed before all that ran had ended" in str(error)
        await asyncio.wrap_future(resumed)
        assert paused or not engine.is_paused
        await running


@in_loop
async def test_a_pause_takes_no_other_word_and_ends_with_the_engine(llm):
    engine = AsyncLLM.over(llm)
    with pytest.raises(ValueError, match=r"requests is 'stop'; it must be one of \('abort', 'wait', 'keep'\)"):
        await engine.pause("stop")
    await engine.pause("keep")
    late = asyncio.create_task(tokens(engine))
    await asyncio.sleep(0.05)
    await asyncio.to_thread(engine.close)
    with pytest.raises(RuntimeError, match="the engine was closed"):
        await late


@in_loop
async def test_a_query_is_read_again_beside_a_document_of_other_weights():
    config = EngineConfig(max_model_len=40, compilation_cache_dir=str(COMPILED))
    llm, pair = LLM(str(GOLDENS / "encoders" / "bert"), config), ("keys of a block", "the quick brown fox")
    same = load_file(GOLDENS / "encoders" / "bert" / WEIGHTS)
    (name,) = [each for each in same if each.endswith("word_embeddings.weight")]
    async with AsyncLLM.over(llm) as engine:
        make = llm.model.tasks.pairs()  # reads a query once for all its pairs

        async def score() -> float:
            (found,) = [one async for _, one in engine.run([(0, lambda: make(pair))])]
            return found.score

        before = await score()
        await engine.pause("keep")
        late = asyncio.create_task(score())
        while engine.thread.num_open + engine.thread._commands.qsize() == 0:
            await asyncio.sleep(0.01)
        await engine.update_weights(same | {name: np.ascontiguousarray(same[name][::-1])})
        await engine.resume()
        (fresh,) = await engine.score([pair])
        assert await late == fresh.score != before


def test_a_checksum_is_of_every_bit_of_the_weights(llm, root):
    before = llm.weights_checksum()
    llm.update_weights(str(root / "other"))
    assert llm.weights_checksum() != before
    llm.sleep()
    with pytest.raises(ValueError, match="the weights sleep; wake_up"):
        llm.weights_checksum()
    llm.wake_up()
    llm.update_weights(str(root / "same"))
    assert llm.weights_checksum() == before


@pytest.mark.slow
def test_a_training_loop_changes_weights_over_http(root):
    llm = LLM(str(root / "same"), INVARIANT)
    settings = ServerSettings(keys=(read_key("user-key"),), admin_keys=(read_key("admin-key"),), weights_root=str(root))
    user = {"Authorization": "Bearer user-key"}
    with (
        running(settings, inner=llm) as server,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):

        def ask(path: str, body: object = None, **headers: str):
            status, _, answer = server.ask(path, body, **(headers or ADMIN))
            return status, answer

        assert ask("/pause", {}, **user)[0] == 401 and ask("/weights_checksum", **user)[0] == 401
        _, first = ask("/weights_checksum")
        _, wanted = ask("/v1/completions", BODY, **user)
        assert ask("/pause?mode=keep", {}) == (200, {"status": "paused"})
        late = pool.submit(ask, "/v1/completions", BODY, **user)
        assert ask("/is_paused") == (200, {"is_paused": True}) and ask("/is_sleeping") == (200, {"is_sleeping": False})
        assert ask("/health")[0] == 200
        assert ask("/update_weights", {"path": "other"}) == (200, {"weights_version": 1})
        status, freed = ask("/sleep?level=1", {})
        assert status == 200 and set(freed) == {"weights", "kv_cache"} and ask("/is_sleeping")[1]["is_sleeping"]
        assert ask("/wake_up?tags=weights&tags=kv_cache", {}) == (200, {"status": "awake"})
        _, second = ask("/weights_checksum")
        assert second["weights_version"] == 1 and second["checksum"] != first["checksum"] and not late.done()
        assert ask("/resume", {}) == (200, {"status": "resumed"})
        assert late.result()[0] == 200
        _, answer = ask("/v1/completions", BODY, **user)
        assert answer["system_fingerprint"].endswith(".1") and "." not in wanted["system_fingerprint"]
        assert ask("/update_weights", {"path": "same", "requests": "keep"}) == (200, {"weights_version": 2})
        assert ask("/weights_checksum")[1]["checksum"] == first["checksum"]
        _, again = ask("/v1/completions", BODY, **user)
        assert again["choices"][0]["text"] == wanted["choices"][0]["text"]
        for path, body, said in rows_beside(__file__)["refused"]:
            status, answer = ask(path, body)
            assert status == 400 and said in answer["error"]["message"], (path, answer)


def test_without_an_admin_key_nothing_is_controlled(root):
    with running() as server:
        for path in ("/pause", "/resume", "/sleep", "/wake_up", "/update_weights"):
            status, _, answer = server.ask(path, {})
            assert status == 404 and "--admin-key-file" in answer["error"]["message"]
    with pytest.raises(ValueError, match="weights_root is given and no admin key"):
        ServerSettings(weights_root=str(root))
    with pytest.raises(ValueError, match=r"weights_root is .*, which is no folder"):
        ServerSettings(weights_root=str(root / "none"), admin_keys=(read_key("admin-key"),))
