"""Tokens that a checkpoint's own head drafts: they change no byte, and they are those of the whole sequence."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from checkpoints import open_checkpoint
from ferrum_jax import SamplingParams
from ferrum_jax.core.drafts.mtp_drafts import UNKNOWN, MtpDrafts
from ferrum_jax.core.scheduler.drafting import Drafting
from ferrum_jax.engine.startup.behind import _Behind
from ferrum_jax.engine.startup.model_source import ModelSource
from ferrum_jax.inputs.params.structured_outputs import StructuredOutputsParams
from ferrum_jax.llm import LLM
from ferrum_jax.models.families.registry import bind
from ferrum_jax.models.layers.attention import ForwardContext
from ferrum_jax.runtime.compile.deferred import DeferredExecutable, Prepared
from ferrum_jax.runtime.compile.executable_store import ExecutableStore
from tests.golden_table import GOLDENS
from tests.marks import few, slow
from tests.speculation.told import ToldDrafts, take_source
from tests.support import INVARIANT, SMALL, answers, fresh_engine, requests_of, run, small_llm, told

PROMPTS = [[3, 4, 5, 6] * 8, [7] * 20, [9], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2, 3], [5, 6, 7] * 30]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=2)
DRAWN = dataclasses.replace(GREEDY, temperature=0.8, seed=5)
MTP = {"method": "mtp"}
OF_KEYS, OF_STATES = "deepseek_v3", slow("qwen3_next")  # what their layers keep
OTHERS = few(("glm4_moe", "glm4_moe_lite", "qwen3_5", "qwen3_5_moe"), 0)
LADDER = dataclasses.replace(SMALL, max_num_seqs=1)
LEAST = 1e-4  # of the largest logit: what float32 steps differ by, in other buckets


class KeptDrafts(MtpDrafts):
    """The model's own drafts, which are all kept. instead: the tokens that are computed in their place."""

    def __init__(self, instead: ToldDrafts | None = None) -> None:
        super().__init__()
        self.kept: dict[tuple[int, ...], int] = {}  # by the tokens before it
        self._instead = instead

    def take(self, request, token_id):
        super().take(request, token_id)
        self.kept[tuple(request.token_ids)] = token_id

    def propose(self, request, most):
        return super().propose(request, most) if self._instead is None else self._instead.propose(request, min(most, 1))


class EagerDrafting(Drafting):
    """Computes drafts however seldom they come true."""

    def _learnt(self, request):
        book = super()._learnt(request)
        book.rate = 0.9
        return book


@functools.cache
def mtp_llm(name: str, config=INVARIANT):
    return small_llm(f"mtp/{name}", dataclasses.replace(config, speculative_config=MTP))


def drafting_engine(llm, source: KeptDrafts, **overrides):
    """A fresh engine over blocks of NaN that computes a draft wherever it has one."""
    engine = fresh_engine(llm, **overrides)
    take_source(engine, llm, source, EagerDrafting)
    return engine


def run_all(engine, prompts, params) -> list:
    """Outputs in the order of the prompts."""
    return answers(engine, requests_of(prompts, params))


@functools.cache
def whole_draft(llm):
    """What the head says behind each token of a sequence, without blocks, chunks or steps."""

    @jax.jit
    def draft(weights, ids):
        model, context = bind(llm.loaded.layout.graph, weights), ForwardContext()
        positions = jnp.arange(len(ids), dtype=jnp.int32)
        hidden = model(ids, positions, context)
        return model.logits(model.draft(ids[1:], hidden[:-1], positions[:-1], context))

    return draft


def assert_whole(llm, kept: dict[tuple[int, ...], int]) -> None:
    """Each draft is what the head says of the whole sequence at once."""
    weights = dict(zip(llm.loaded.layout.targets, llm.loaded.weights, strict=True))
    sequences = [ids for ids in kept if not any(len(more) > len(ids) and more[: len(ids)] == ids for more in kept)]
    known, compared = {ids: token for ids, token in kept.items() if token != UNKNOWN}, 0
    for ids in sequences:
        padded = np.zeros(128, np.int32)
        padded[: len(ids)] = ids
        logits = np.asarray(whole_draft(llm)(weights, padded))
        for length in range(2, len(ids) + 1):
            if (token := known.get(ids[:length])) is not None:
                of_draft = logits[length - 2]
                assert of_draft[token] >= of_draft.max() - LEAST * np.abs(of_draft).max(), f"behind {length} tokens"
                compared += 1
    assert compared >= len(known) > 0, "each is a part of some sequence"


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("name", [OF_KEYS, OF_STATES, *OTHERS])
def test_in_invariant_mode_every_bit_is_that_without_drafts(name, params):
    plain = run(small_llm(f"mtp/{name}", INVARIANT), PROMPTS, params)
    engine = drafting_engine(mtp_llm(name), source := KeptDrafts(), check_writes=True)
    assert told(run_all(engine, PROMPTS, params)) == told(plain)
    assert engine.scheduler.drafting.counts.drafted_tokens > 20
    assert_whole(mtp_llm(name), source.kept)


@pytest.mark.parametrize("kind", ["right", "mixed"])
@pytest.mark.parametrize("name", [OF_KEYS, OF_STATES, *OTHERS])
def test_drafts_are_those_of_the_whole_sequence_where_others_came_true(name, kind):
    llm, plain = mtp_llm(name), run(small_llm(f"mtp/{name}", INVARIANT), PROMPTS, DRAWN)
    source = KeptDrafts(ToldDrafts(plain, kind, llm.spec.vocab_size))
    engine = drafting_engine(llm, source)
    assert told(run_all(engine, PROMPTS, DRAWN)) == told(plain)
    counts = engine.scheduler.drafting.counts
    assert counts.accepted_tokens > 20 and (kind == "right") == (counts.accepted_tokens == counts.drafted_tokens)
    assert_whole(llm, source.kept)


@pytest.mark.slow
@pytest.mark.parametrize("name", [OF_KEYS, OF_STATES])
def test_elsewhere_tokens_are_those_without_drafts(name):
    llm, plain = mtp_llm(name, SMALL), run(small_llm(f"mtp/{name}", SMALL), PROMPTS, DRAWN)
    for source in (KeptDrafts(), KeptDrafts(ToldDrafts(plain, "mixed", llm.spec.vocab_size))):
        engine = drafting_engine(llm, source)
        assert [o.token_ids for o in run_all(engine, PROMPTS, DRAWN)] == [o.token_ids for o in plain]
        assert engine.scheduler.drafting.counts.drafted_tokens > 20
        assert_whole(llm, source.kept)


@pytest.mark.parametrize("name", [OF_KEYS, OF_STATES])
def test_rows_that_are_preempted_go_on_with_drafts(name):
    plain = run(small_llm(f"mtp/{name}", INVARIANT), PROMPTS, DRAWN)
    engine = drafting_engine(mtp_llm(name), source := KeptDrafts(), num_blocks=9)
    assert told(run_all(engine, PROMPTS, DRAWN)) == told(plain) and engine.scheduler.metrics().preemptions
    assert_whole(mtp_llm(name), source.kept)


@pytest.mark.parametrize("name", [OF_KEYS, OF_STATES])
def test_what_is_hit_has_the_keys_and_values_of_the_head_too(name):
    llm = mtp_llm(name)
    engine = drafting_engine(llm, source := KeptDrafts())
    first = run_all(engine, PROMPTS, GREEDY)
    longer = [[*prompt, *output.token_ids] for prompt, output in zip(PROMPTS, first, strict=True)]
    for prompts in (longer, longer):  # the second time they are hit whole, and no step draws behind a forward
        source.kept.clear()
        found = run_all(engine, prompts, dataclasses.replace(GREEDY, max_tokens=8))
        assert all(output.num_cached_tokens >= 32 for output in found if len(output.prompt_token_ids) > 50)
        assert_whole(llm, source.kept)
    assert UNKNOWN in source.kept.values()
    plain = run(small_llm(f"mtp/{name}", INVARIANT), longer, dataclasses.replace(GREEDY, max_tokens=8))
    assert told(found) == told(plain)


def test_choices_of_one_prompt_have_drafts_of_their_own():
    params = dataclasses.replace(DRAWN, n=3, seed=None)
    plain = run(small_llm("mtp/deepseek_v3", INVARIANT), PROMPTS, params)
    engine = drafting_engine(mtp_llm("deepseek_v3"), KeptDrafts())
    assert told(run_all(engine, PROMPTS, params)) == told(plain)
    assert engine.scheduler.drafting.counts.drafted_tokens > 20


def letters(folder) -> str:
    """The path of a tokenizer of few tokens, each a character, and the golden's end token."""
    characters = [chr(code) for code in range(33, 127)]
    vocabulary = {text: id for id, text in enumerate(["<pad>", "</s>", *characters])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


def test_a_row_with_a_grammar_takes_drafts_that_its_masks_allow(tmp_path):
    asked = StructuredOutputsParams(regex="(ab|c){1,9}")
    params = dataclasses.replace(DRAWN, ignore_eos=False, logprobs=None, structured_outputs=asked)
    config = dataclasses.replace(INVARIANT, speculative_config=MTP)
    llm = LLM(str(GOLDENS / "mtp/deepseek_v3"), config, tokenizer=letters(tmp_path))
    plain = run(llm, PROMPTS[:3], dataclasses.replace(params, speculative=False))
    for source in (KeptDrafts(), KeptDrafts(ToldDrafts(plain, "mixed", llm.spec.vocab_size))):
        assert told(run_all(drafting_engine(llm, source), PROMPTS[:3], params)) == told(plain)


def test_a_request_that_wants_no_drafts_has_none():
    engine = drafting_engine(mtp_llm("deepseek_v3"), KeptDrafts())
    run_all(engine, PROMPTS, dataclasses.replace(GREEDY, speculative=False))
    assert engine.scheduler.drafting.counts.drafted_tokens == 0


def test_each_bucket_has_a_draft_and_is_missing_without_it():
    llm = mtp_llm("deepseek_v3", LADDER)
    executables, ladder = llm.loaded.executables, llm.loaded.layout.ladder
    drafts = ladder.drafts_of(ladder.buckets)
    assert set(executables.drafts) == set(drafts) and len(drafts) == len(ladder.buckets)
    without = dataclasses.replace(executables, drafts=Prepared({}))
    assert not executables.missing(ladder)
    assert without.missing(ladder) == {*ladder.buckets}


def test_a_forward_that_is_compiled_while_steps_run_comes_with_its_draft():
    llm = mtp_llm("deepseek_v3", LADDER)
    layout, whole = llm.loaded.layout, llm.loaded.executables
    bucket, *others = layout.ladder.buckets
    made = DeferredExecutable.made
    early = dataclasses.replace(
        whole,
        forwards=Prepared({b: made(whole.forwards[b]) for b in others}),
        drafts=Prepared({b: made(whole.drafts[b]) for b in layout.ladder.drafts_of(others)}),
    )
    assert early.missing(layout.ladder) == {bucket}
    store = ExecutableStore(SMALL.compilation_cache_dir, layout.mesh.devices.flatten().tolist())
    _Behind(layout, early, store)._add(bucket, early)
    assert not early.missing(layout.ladder) and bucket in early.forwards


def test_a_draft_writes_its_keys_and_values_in_place():
    llm = mtp_llm("deepseek_v3", LADDER)
    layout = llm.loaded.layout
    own = layout.pools.flat_caches()[layout.draft_layer.span(layout.pools)]
    num_bytes = sum(math.prod(array.shape) * array.dtype.itemsize for array in own)
    for part, executable in llm.loaded.executables.drafts.items():
        assert executable.memory_analysis().alias_size_in_bytes == num_bytes + 4 * part.num_places, str(part)


def test_a_model_without_such_a_layer_is_refused():
    with pytest.raises(ValueError, match="Qwen3ForCausalLM: the layers that predict one token more are not served"):
        LLM(str(GOLDENS / "qwen3"), SMALL, speculative_config=MTP)
    with pytest.raises(ValueError, match="method is 'mtp', and this model has no layer that predicts one token more"):
        LLM.from_source(ModelSource.of_checkpoint(open_checkpoint(GOLDENS / "qwen3")), SMALL, speculative_config=MTP)
