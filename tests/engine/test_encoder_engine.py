"""The engine of an encoder: requests for vectors come and go as those of any engine."""

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

from ferrum_jax import LLM, EngineConfig
from ferrum_jax.core.delta import Delta
from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.engine import encoder_engine
from ferrum_jax.engine.encoder_engine import EncoderEngine
from ferrum_jax.sampling_params import SamplingParams
from ferrum_jax.tasks.task import ONE_TOKEN, EngineRequest, completion
from tests.support import COMPILED, GOLDENS

CONFIG = EngineConfig(max_model_len=64, max_num_seqs=8, max_num_batched_tokens=128, compilation_cache_dir=str(COMPILED))
MEAN = RequestOptions(embeds=True, pooling="mean")
TEXTS = [np.random.default_rng(n).integers(5, 90, 1 + 7 * n % 40).tolist() for n in range(30)]


@functools.cache
def encoder() -> LLM:
    return LLM(str(GOLDENS / "encoders" / "bert"), CONFIG)


@functools.cache
def wanted() -> list[np.ndarray]:
    return [output.embedding for output in encoder().embed(TEXTS, pooling="mean", normalize=False)]


def fresh() -> EncoderEngine:
    engine = encoder().model.make_engine()
    assert isinstance(engine, EncoderEngine)
    return engine


def ended(engine: EncoderEngine) -> list[Delta]:
    deltas = []
    while engine.has_unfinished:
        deltas += engine.step()
    return deltas


def test_each_window_gives_its_shortest_texts_first_and_one_step_is_in_flight(monkeypatch):
    monkeypatch.setattr(encoder_engine, "WINDOW", 20)
    engine = fresh()
    ids = [engine.add(text, ONE_TOKEN, MEAN) for text in TEXTS]
    assert engine.step() == [] and engine.live()["num_running"] > 0
    deltas = ended(engine)
    assert {delta.id for delta in deltas[:20]} == set(ids[:20]) and {delta.id for delta in deltas} == set(ids)
    for window in (deltas[:20], deltas[20:]):
        lengths = [engine.runner.length_of(len(TEXTS[delta.id])) for delta in window]
        assert lengths == sorted(lengths)
    for delta in deltas:
        assert delta.is_last and delta.beside is not None and not delta.token_ids
        assert delta.beside.embedding is not None
        np.testing.assert_allclose(delta.beside.embedding, wanted()[delta.id], rtol=1e-5, atol=1e-6)


def test_a_text_that_is_aborted_is_heard_of_no_more_wherever_it_is():
    engine = fresh()
    ids = [engine.add(text, ONE_TOKEN, MEAN) for text in TEXTS]
    engine.abort(ids[-1])  # it waits
    engine.step()
    flying = next(iter(engine._in_flight)).texts[0].id
    engine.abort(flying)
    assert {delta.id for delta in ended(engine)} == set(ids) - {flying, ids[-1]}
    engine.add(TEXTS[0], ONE_TOKEN, MEAN)
    assert [delta.finish_reason for delta in engine.abort_all()] == ["abort"]
    assert not engine.has_unfinished and engine.step() == engine.settle() == []


def test_an_engines_calls_run_poolings_side_by_side_and_refuse_the_rest():
    calls, pooled = encoder().calls, dataclasses.replace(MEAN, pooling="cls")
    refused = {
        "words": (TEXTS[0], SamplingParams(max_tokens=3), MEAN, "BertModel is an encoder and generates nothing"),
        "text": (TEXTS[0], ONE_TOKEN, RequestOptions(), "BertModel is an encoder and generates nothing"),
        "pooling": (TEXTS[0], ONE_TOKEN, dataclasses.replace(MEAN, pooling="max"), "pooling is 'max'; this model has"),
        "long": ([5] * 65, ONE_TOKEN, MEAN, "the text has 65 tokens; it must have 1 to 64"),
    }
    asked = {key: case[:3] for key, case in refused.items()} | {"mean": (TEXTS[9], ONE_TOKEN, MEAN)}
    asked["cls"] = (TEXTS[9], ONE_TOKEN, pooled)
    tasks = [(key, lambda case=case: completion(EngineRequest(*case))) for key, case in asked.items()]
    found: dict[str, Any] = dict(calls.run(tasks))
    for key, case in refused.items():
        with pytest.raises(ValueError, match=case[3]):
            raise found[key]
    np.testing.assert_allclose(found["mean"].embedding, wanted()[9], rtol=1e-5, atol=1e-6)
    assert found["mean"].finished and not np.allclose(found["cls"].embedding, wanted()[9])
