"""generation_config.json and the tokenizer's end token: what a request has that says nothing, through every door."""

import dataclasses
import json
import shutil

import pytest

from ferrum_jax.batch.journal.job_identity import JobIdentity
from ferrum_jax.batch.journal.keeper import JobOptions
from ferrum_jax.core.params_codec import params_of_json, params_to_json
from ferrum_jax.engine.startup.model_source import ModelSource
from ferrum_jax.engine.startup.open import Opening
from ferrum_jax.io.files.store import open_store
from ferrum_jax.llm import LLM
from ferrum_jax.openai.bodies import text_of
from ferrum_jax.sampling_params import SamplingParams
from tests.serve.running import DEMO
from tests.support import INVARIANT, SMALL

SAID = {"do_sample": True, "temperature": 0.6, "top_k": 1, "top_p": None, "max_new_tokens": 5}
TAKEN = {"temperature": 0.6, "top_k": 1, "max_new_tokens": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "demo"
    shutil.copytree(DEMO, path)
    (path / "generation_config.json").write_text(json.dumps(SAID))
    return path


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(str(folder), INVARIANT)


def test_a_request_without_parameters_is_sampled_as_the_file_says(llm):
    greedy = llm.generate("the", SamplingParams(max_tokens=5, temperature=0))[0].outputs[0].token_ids
    assert llm.generate("the")[0].outputs[0].token_ids == greedy and dict(llm.identity.generation) == TAKEN
    assert list(llm.stream("the"))[-1].outputs[0].token_ids == greedy
    own = llm.get_default_sampling_params()
    assert own == SamplingParams(temperature=0.6, top_k=1, max_tokens=5)


def test_its_most_tokens_are_fewer_where_there_is_no_room_and_given_ones_are_refused(llm):
    prompt = [5] * (llm.max_model_len - 2)
    assert len(llm.generate([prompt])[0].outputs[0].token_ids) <= 2
    with pytest.raises(ValueError, match="max_tokens is 5"):
        llm.generate([prompt], SamplingParams(max_tokens=5))


def test_what_is_given_wins_over_the_file_and_is_taken_once():
    for is_chat, most in ((False, None), (True, None)):
        params = text_of({"top_k": 7}, is_chat=is_chat)["params"].with_seed(3).over(TAKEN)
        assert (params.temperature, params.top_k, params.max_tokens, params.max_new_tokens) == (0.6, 7, most, 5)
        assert params.seed == 3 and params.over({"temperature": 0.1}) == params
    params = text_of({"temperature": 1.0, "max_tokens": 9}, is_chat=True)["params"].over(TAKEN)
    assert (params.temperature, params.max_tokens) == (1.0, 9)
    assert text_of({}, is_chat=False)["params"].over({}).max_tokens == 16
    assert text_of({}, is_chat=True)["params"].over({"temperature": 0.5}).max_tokens is None
    assert params_of_json(params_to_json(params)) == params


@pytest.mark.parametrize(("said", "words"), [({"top_p": 0}, "top_p is 0"), ({"temperature": "hot"}, "temperature is")])
def test_a_file_that_says_what_cannot_be_is_refused_unless_it_is_set_aside(folder, said, words):
    def opening(**how: str) -> Opening:
        found = Opening.of_checkpoint(str(folder), dataclasses.replace(SMALL, **how))
        return dataclasses.replace(found, source=dataclasses.replace(found.source, generation=said))

    with pytest.raises(ValueError, match=f"generation_config.json: {words}.*generation_config='none'"):
        opening().texts()
    assert opening(generation_config="none").texts().generation == {}


def test_the_tokenizers_end_token_ends_texts_too(folder):
    order = Opening.of_checkpoint(str(folder), SMALL)
    texts = order.texts()
    end, spec = texts.prompts.tokenizer.eos_id, order.source.spec
    for known in ((end,), (end + 1,)):
        source = ModelSource(spec=dataclasses.replace(spec, eos_token_ids=known), read=order.source.read)
        found = dataclasses.replace(order, source=source).ended(texts)
        assert found.end_ids | {*known} == {end, *known} and (end in found.end_ids) == (known != (end,))


def test_a_job_goes_on_with_what_it_took_and_one_from_before_with_nothing(tmp_path, llm):
    def job(name: str) -> JobIdentity:
        record = {"created": 0, "settings": {"model": "m"}}
        return JobIdentity(open_store(str(tmp_path / name)), name, record, JobOptions(), print)

    plain = dataclasses.replace(llm.identity, generation={})
    assert job("a").generation is None
    job("a").begin(llm.identity)
    assert job("a").generation == TAKEN
    job("a").begin(llm.identity)
    with pytest.raises(ValueError, match="was begun with other settings: generation"):
        job("a").check(plain)
    job("b").begin(plain)
    job("b").begin(llm.identity)
    assert job("b").generation == {}
