"""Models in memory, behind a URL and with weights that change: the tokens of the folder, no compile, no stale hit."""

import dataclasses
import functools

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from checkpoints import huggingface
from checkpoints.memory import copies_of
from ferrum_jax import LLM, SamplingParams
from ferrum_jax.models.families import registry
from ferrum_jax.runtime.placing.weights import replace_weights
from tests.support import GOLDENS, INVARIANT, SMALL, small_llm

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
PROMPT = [(7 * i) % 290 + 6 for i in range(40)]


def model(scale: float = 1.0) -> nnx.Module:
    """The golden model in memory; scale: of the first layer's output projection."""
    layout = small_llm("qwen3").loaded.layout
    arrays = dict(zip(layout.targets, small_llm("qwen3").loaded.weights, strict=True))
    name = "layers.0.attention.o.weight"
    return registry.bind(layout.graph, arrays | {name: arrays[name] * scale})


@functools.cache
def in_memory() -> LLM:
    return LLM.from_model(model(), SMALL)


def tokens(llm: LLM) -> tuple[int, ...]:
    return llm.generate([PROMPT], GREEDY, progress=False)[0].token_ids


def test_a_model_in_memory_is_the_model_of_its_folder():
    assert in_memory().loaded.fingerprint == small_llm("qwen3").loaded.fingerprint
    assert in_memory().tokenizer is None
    with pytest.raises(ValueError, match="the weights are NoneType; give a folder, or arrays by name"):
        in_memory().update_weights(None)  # pyright: ignore[reportArgumentType]
    in_memory().update_weights(model())
    assert tokens(in_memory()) == tokens(small_llm("qwen3"))


def test_a_model_behind_a_url_is_the_model_of_its_folder():
    fsspec.filesystem("memory").put(str(GOLDENS / "qwen3"), "/models/qwen3", recursive=True)
    llm = LLM("memory://models/qwen3", SMALL)
    assert llm.loaded.fingerprint == small_llm("qwen3").loaded.fingerprint
    assert tokens(llm) == tokens(small_llm("qwen3"))


def test_new_weights_need_no_compile_hit_nothing_of_the_old_ones_and_act_at_once():
    llm = in_memory()
    llm.update_weights(nnx.state(model()))
    before, old = tokens(llm), llm.loaded.fingerprint
    assert llm.generate([PROMPT], GREEDY, progress=False)[0].num_cached_tokens > 0
    compiles = llm.stats()["compiles_after_ready"]
    other = model(-3.0)
    llm.update_weights(registry.parameters_of(other))
    output = llm.generate([PROMPT], GREEDY, progress=False)[0]
    assert output.num_cached_tokens == 0 and output.token_ids != before and llm.loaded.fingerprint != old
    llm.update_weights(model())
    assert tokens(llm) == before and llm.loaded.fingerprint == old
    assert llm.stats()["compiles_after_ready"] == compiles


def test_the_weights_are_copies_that_a_trainer_may_donate():
    llm, arrays = in_memory(), {name: jnp.array(a) for name, a in registry.parameters_of(model()).items()}
    llm.update_weights(arrays)
    before = tokens(llm)
    jax.tree.map(lambda a: a.delete(), arrays)
    assert tokens(llm) == before


@pytest.mark.slow
def test_dense_weights_in_memory_are_quantised_like_a_folders():
    int8 = dataclasses.replace(SMALL, weights="int8", max_num_seqs=1, max_num_batched_tokens=64)
    folder, llm = LLM(str(GOLDENS / "qwen3"), int8), LLM.from_model(model(), int8)
    assert llm.loaded.fingerprint == folder.loaded.fingerprint != small_llm("qwen3").loaded.fingerprint
    before, compiles = tokens(llm), llm.stats()["compiles_after_ready"]
    assert before == tokens(folder)
    llm.update_weights(model(-3.0))
    output = llm.generate([PROMPT], GREEDY, progress=False)[0]
    assert output.num_cached_tokens == 0 and output.token_ids != before
    llm.update_weights(registry.parameters_of(model()))
    assert tokens(llm) == before and llm.loaded.fingerprint == folder.loaded.fingerprint
    assert llm.stats()["compiles_after_ready"] == compiles
    codes = dict(zip(llm.loaded.layout.targets, llm.loaded.weights, strict=True))["layers.0.mlp.up.weight.codes"]
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up\.weight\.codes is missing"):
        llm.update_weights({"layers.0.mlp.up.weight": codes[:1]})


def test_all_that_does_not_fit_is_one_error_and_changes_nothing():
    llm, arrays = in_memory(), registry.parameters_of(model())
    before = llm.loaded
    wrong = arrays | {"norm.weight": np.zeros(3, np.float32), "extra": arrays["norm.weight"]}
    wrong["layers.1.mlp.up.weight"] = arrays["layers.1.mlp.up.weight"].astype(jnp.bfloat16)
    del wrong["embed.weight"]
    with pytest.raises(ValueError, match="4 mismatches") as error:
        llm.update_weights(wrong)
    for part in ("embed.weight is missing", "extra is left over", "norm.weight is [3]", "up.weight is bfloat16; the"):
        assert part in str(error.value)
    assert llm.loaded is before
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    with pytest.raises(ValueError, match="requests are running"):
        llm.update_weights(arrays)
    stream.close()
    with pytest.raises(ValueError, match="the model is a Linear; it must be one of"):
        LLM.from_model(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))


def hf_state() -> dict[str, np.ndarray]:
    """The golden's tensors by the names of its folder, copied."""
    tensors = huggingface.map_tensors(GOLDENS / "qwen3")
    return {name: np.array(tensor) for name, tensor in tensors.items()}


def test_a_hugging_face_state_dict_and_a_folder_are_taken_as_they_are():
    llm = in_memory()
    llm.update_weights(model(-3.0))
    changed = tokens(llm)
    before = llm.weights_version
    assert llm.update_weights(hf_state()) == before + 1
    assert llm.loaded.fingerprint == small_llm("qwen3").loaded.fingerprint
    assert tokens(llm) == tokens(small_llm("qwen3")) != changed
    llm.update_weights(model(-3.0))
    llm.update_weights(GOLDENS / "qwen3")
    assert tokens(llm) == tokens(small_llm("qwen3"))
    with pytest.raises(ValueError, match="another model"):
        llm.update_weights(GOLDENS / "llama")
    state = hf_state()
    del state["model.norm.weight"]
    state["model.layers.0.mlp.up_proj.weight"] = state["model.layers.0.mlp.up_proj.weight"][1:]
    with pytest.raises(ValueError, match="2 mismatches"):
        llm.update_weights(state)
    assert tokens(llm) == tokens(small_llm("qwen3"))


def test_some_layers_alone_are_taken_by_either_names_or_by_others_that_are_mapped():
    llm = in_memory()
    llm.update_weights(model())
    own, stored = "layers.0.attention.o.weight", "model.layers.0.self_attn.o_proj.weight"
    array = registry.parameters_of(model(-3.0))[own]
    llm.update_weights(model(-3.0))
    wanted, changed = llm.loaded.fingerprint, tokens(llm)
    for state, names in (({own: array}, None), ({stored: array}, None), ({"mine": array}, {"mine": stored})):
        llm.update_weights(model())
        llm.update_weights(state, partial=True, names=names)
        assert llm.loaded.fingerprint == wanted and tokens(llm) == changed
    with pytest.raises(ValueError, match="bfloat16"):
        llm.update_weights({own: array.astype(jnp.bfloat16)}, partial=True)
    llm.update_weights({own: array.astype(jnp.bfloat16)}, partial=True, cast=True)
    with pytest.raises(ValueError, match="nowhere is left over"):
        llm.update_weights({own: array, "nowhere": array}, partial=True)
    with pytest.raises(ValueError, match="names has"):
        llm.update_weights({own: array}, names={"nobody": own})


@pytest.mark.slow
def test_dense_weights_are_quantised_on_their_way_into_a_quantised_engine():
    llm = LLM(str(GOLDENS / "qwen3"), dataclasses.replace(SMALL, weights="int8"))
    before, wanted = tokens(llm), llm.loaded.fingerprint
    state = hf_state()
    llm.update_weights(state)
    assert tokens(llm) == before and llm.loaded.fingerprint == wanted
    state["model.layers.0.mlp.up_proj.weight"][0, 0] = np.nan
    with pytest.raises(ValueError, match=r"up_proj\.weight has weights that are not finite"):
        llm.update_weights(state)
    assert tokens(llm) == before


def test_running_requests_are_ended_waited_for_or_kept_and_outputs_say_so():
    llm = in_memory()
    llm.update_weights(model())
    with pytest.raises(ValueError, match="requests is 'stop'"):
        llm.update_weights(model(), requests="stop")
    whole = llm.generate([PROMPT], GREEDY, progress=False)[0]
    for what in ("abort", "wait", "keep"):
        llm.update_weights(model())
        stream = llm.stream(PROMPT, GREEDY)
        some = next(stream)
        version = llm.update_weights(model(-3.0), requests=what)
        llm.engine.scheduler.check_invariants()
        *_, last = stream
        llm.engine.scheduler.check_invariants()
        assert last.token_ids[: len(some.token_ids)] == some.token_ids
        if what == "wait":
            assert last.token_ids == whole.token_ids and last.outputs[0].weights_versions is None
            assert last.weights_version == version - 1
        elif what == "abort":
            assert last.finish_reason == "abort" and last.weights_version == version - 1
            assert last.token_ids == whole.token_ids[: len(last.token_ids)]
        else:
            versions = last.outputs[0].weights_versions or ()
            assert list(versions) == sorted(versions) and set(versions) == {version - 1, version}
            assert len(versions) == 8 and last.weights_version == version and last.token_ids != whole.token_ids


def test_what_a_kept_row_computed_is_shared_with_nobody():
    llm = in_memory()
    llm.update_weights(model())
    stream = llm.stream(PROMPT, dataclasses.replace(GREEDY, max_tokens=40))
    next(stream)
    llm.update_weights(model(-3.0), requests="keep")
    *_, last = stream
    prompt = PROMPT + list(last.token_ids[:30])
    mixed = llm.generate([prompt], GREEDY, progress=False)[0]
    assert mixed.num_cached_tokens == 0
    llm.update_weights(model(-3.0))
    assert mixed.token_ids == llm.generate([prompt], GREEDY, progress=False)[0].token_ids


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_window"])
def test_whatever_a_model_caches_nothing_of_rows_that_live_through_an_update_is_hit(family):
    llm = LLM(str(GOLDENS / family), INVARIANT)
    old = dict(zip(llm.loaded.layout.targets, map(np.asarray, llm.loaded.weights), strict=True))["embed.weight"]
    old, new = {"embed.weight": old.copy()}, {"embed.weight": np.roll(old, 1, axis=0)}
    shared = PROMPT[:32]
    prompts = [shared + [(11 * i + 5 * k) % 290 + 6 for i in range(20)] for k in range(5)]

    def answers() -> list[tuple[int, ...]]:
        return [output.token_ids for output in llm.generate(prompts, GREEDY, progress=False)]

    before = answers()
    llm.update_weights(new, partial=True)
    expected = answers()
    assert expected != before
    llm.update_weights(old, partial=True)
    assert answers() == before and llm.stats()["entries"]
    streams = [llm.stream(prompt, dataclasses.replace(GREEDY, max_tokens=40)) for prompt in prompts[:3]]
    for stream in streams:
        next(stream)
    version = llm.update_weights(new, partial=True, requests="keep")
    llm.engine.scheduler.check_invariants()
    assert llm.stats()["entries"] == 0
    assert answers() == expected, "beside rows that hold what the old weights computed"
    ended = [list(stream)[-1] for stream in streams]
    llm.engine.scheduler.check_invariants()
    assert all(set(last.outputs[0].weights_versions) == {version - 1, version} for last in ended)
    longer = [prompt + list(last.token_ids) for prompt, last in zip(prompts, ended, strict=False)]
    found = [output.token_ids for output in llm.generate(longer, GREEDY, progress=False)]
    assert llm.reset_prefix_cache()
    assert found == [output.token_ids for output in llm.generate(longer, GREEDY, progress=False)]


def test_prefixes_that_were_saved_before_an_update_are_not_loaded_after_it(tmp_path):
    llm = in_memory()
    llm.update_weights(model())
    llm.cache_prefix(PROMPT, pin=True)
    llm.save_prefix_cache(tmp_path / "prefixes")
    llm.update_weights(model())  # the same weights: a sampled fingerprint cannot tell them from others
    assert llm.stats()["pinned"] == 0 and llm.generate([PROMPT], GREEDY, progress=False)[0].num_cached_tokens == 0
    with pytest.raises(ValueError, match="prefixes"):
        llm.load_prefix_cache(tmp_path / "prefixes")


def test_an_update_has_one_parameter_in_memory_twice_at_most():
    llm, live = LLM.from_model(model(), SMALL), []
    layout, old = llm.loaded.layout, llm.loaded.weights
    whole = sum(array.nbytes for array in old)

    def counted(make):
        def copy():
            made.append(make())
            live.append(sum(array.nbytes for array in (*old, *made) if not array.is_deleted()))
            return made[-1]

        return copy

    made: list[jax.Array] = []
    copies = copies_of(registry.parameters_of(model(-3.0)), layout.targets, layout.model.expansions)
    replace_weights(layout, old, {name: counted(make) for name, make in copies.items()})
    assert len(live) == len(old) and max(live) <= whole + max(array.nbytes for array in made)
