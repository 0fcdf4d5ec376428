"""Bundles of engines whose weights have a form: they start without a compile, and serve that form alone."""

import dataclasses
from pathlib import Path

import pytest

from ferrum_jax import LLM, EngineConfig, SamplingParams
from ferrum_jax.planning.offline.bundle_order import BundleOrder
from ferrum_jax.planning.offline.make_bundle import make_bundle
from ferrum_jax.runtime.compile.bundle import BundleWriter
from tests.support import GOLDENS, ROOT

pytestmark = pytest.mark.slow
DEMO = str(ROOT / "checkpoints" / "demo")  # wide enough for groups of 128, with experts
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [300, 20, 1]]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def config(weights: str) -> EngineConfig:
    """One row: a forward of a decode and a mixed one."""
    return EngineConfig(
        weights=weights,
        max_num_seqs=1,
        max_num_batched_tokens=16,
        max_model_len=64,
        num_blocks=16,
        block_size=16,
        compilation_cache_dir=None,
        ready="all",
    )


def order(model: str, weights: str) -> BundleOrder:
    return BundleOrder(model=model, target="cpu", config=config(weights))


@pytest.mark.parametrize(
    ("model", "weights"),
    [(str(GOLDENS / "qwen3"), "int8"), pytest.param(DEMO, "int4-g128", marks=pytest.mark.long)],
    ids=["int8", "int4-g128"],
)
def test_a_bundle_of_quantised_weights_gives_equal_tokens_and_compiles_nothing(
    tmp_path: Path, model: str, weights: str
) -> None:
    folder = tmp_path / "bundle"
    assert make_bundle(order(model, weights), folder, num_processes=1).num_compiled > 0
    llm = LLM(model, bundle=folder, require_bundle=True)
    assert llm.config.weights == weights, "the bundle's config says which form its engine has"
    tokens = [output.token_ids for output in llm.generate(PROMPTS, GREEDY, progress=False)]
    stats = llm.stats()
    assert (stats["bundle_misses"], stats["compiles_before_ready"], stats["compiles_after_ready"]) == (0, 1, 0)
    assert stats["bundle_hits"] == stats["executables"] - 1, "all but what makes the CPU's pools, which no file holds"
    compiled = LLM(model, config(weights))
    assert tokens == [output.token_ids for output in compiled.generate(PROMPTS, GREEDY, progress=False)]
    for other in ("auto", "int8-a16"):
        with pytest.raises(ValueError, match=r"it has no .* for this config; make the bundle anew"):
            LLM(model, dataclasses.replace(llm.config, weights=other), bundle=folder, require_bundle=True)


def test_a_bundle_of_a_published_form_is_refused_by_a_model_of_another(tmp_path: Path) -> None:
    """The form stands in the model's digest, so nothing of the bundle is tried."""
    names = ("qwen3", "quantised/w8a8", "quantised/w4a16", "quantised/w4a16_zeros", "quantised/gptq_v2_ordered")
    purposes = [order(str(GOLDENS / name), "auto").plan().purpose for name in names]
    assert len({purpose.spec for purpose in purposes}) == len(names)
    BundleWriter(tmp_path / "bundle", purposes[2])
    with pytest.raises(ValueError, match="it is of another model"):
        LLM(str(GOLDENS / "quantised" / "w4a16_zeros"), bundle=tmp_path / "bundle", require_bundle=True)
