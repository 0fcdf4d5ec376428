"""Plans: what fits and the bounds of speed, against numbers counted by hand."""

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from ferrum_jax.__main__ import main
from ferrum_jax.bundling import BundleOrder
from ferrum_jax.forecast import forecast
from ferrum_jax.meshes import meshes_of, shapes_of
from ferrum_jax.runtime.buckets import Bucket, Ladder
from ferrum_jax.runtime.fit import kv_bytes_left, temporaries_bytes
from ferrum_jax.runtime.later import Later
from pallas_kernels.target import Target
from tests.support import GOLDENS, SMALL

FLAGS = ["--max-num-seqs=4", "--max-num-batched-tokens=16", "--max-model-len=256", "--num-blocks=80"]


@pytest.fixture(scope="module")
def layout():
    return BundleOrder(model=str(GOLDENS / "qwen3"), target="cpu", config=SMALL).lay_out()


def test_what_weights_slots_and_a_step_leave_is_for_blocks(layout):
    ledger = layout.ledger
    fixed = ledger.weights_bytes + ledger.slots_bytes + ledger.prompts_bytes
    assert kv_bytes_left(layout, fixed + 1000 + 7 * ledger.block_bytes, 1000) == 7 * ledger.block_bytes
    with pytest.raises(ValueError, match=r"GiB too small: .* take more devices along tp, or lower max_num_batched"):
        kv_bytes_left(layout, fixed + 1000 + 2 * ledger.block_bytes - 1, 1000)


def test_temporaries_are_those_of_the_step_that_needs_most_prefill_or_decode(monkeypatch):
    """Decode draws for all of its rows at once, so a small model's largest decode step needs more than its prefill."""
    buckets = [
        Bucket(num_tokens=tokens, num_rows=64, table_width=4, decode_only=tokens <= 64) for tokens in (32, 64, 128, 256)
    ]
    layout: Any = SimpleNamespace(ladder=Ladder(buckets=tuple(buckets)))

    def with_sizes(*sizes: int) -> int:
        def executable(size: int) -> Any:
            memory = SimpleNamespace(temp_size_in_bytes=size, output_size_in_bytes=9, alias_size_in_bytes=6)
            return Later.made(SimpleNamespace(memory_analysis=lambda: memory))

        parts = {b: SimpleNamespace(get=lambda _, s=s: executable(s)) for b, s in zip(buckets, sizes, strict=True)}
        monkeypatch.setattr("ferrum_jax.runtime.fit.parts_of", lambda layout: (parts, {}))
        return temporaries_bytes(layout, None)

    assert with_sizes(1, 50, 1, 20) == 53 and with_sizes(1, 20, 1, 50) == 53


def test_a_decode_step_reads_the_weights_once_and_the_context_of_every_row(layout):
    spec, ledger = layout.options.spec, layout.ledger
    found = forecast(layout, Target.named("cpu"), tokens_in=100, tokens_out=20)
    token_bytes = spec.num_hidden_layers * 2 * spec.num_key_value_heads * spec.head_dim * 4
    embedding = 0 if spec.tie_word_embeddings else spec.vocab_size * spec.hidden_size * 4
    read = ledger.weights_bytes - embedding + 4 * 110 * token_bytes
    assert (found.num_rows, found.decode_bound_by) == (4, "memory")
    assert found.decode_step_s == pytest.approx(read / Target.named("cpu").bandwidth_bytes_per_s)


def test_rows_are_as_many_as_the_pool_holds_at_their_full_length(layout):
    assert forecast(layout, Target.named("cpu"), tokens_in=250, tokens_out=6).num_rows == 4  # 80 blocks, 16 a row
    few = BundleOrder(model=str(GOLDENS / "qwen3"), target="cpu", config=dataclasses.replace(SMALL, num_blocks=40))
    assert forecast(few.lay_out(), Target.named("cpu"), tokens_in=250, tokens_out=6).num_rows == 2


def test_a_request_longer_than_the_model_serves_is_refused_with_both_numbers(layout):
    with pytest.raises(ValueError, match="250 tokens in and 7 out are 257, more than max_model_len, 256"):
        forecast(layout, Target.named("cpu"), tokens_in=250, tokens_out=7)


def test_experts_that_a_step_reads_are_those_that_its_rows_choose():
    order = BundleOrder(model=str(GOLDENS / "qwen3_moe"), target="cpu", config=SMALL)
    layout = order.lay_out()
    spec, target = layout.options.spec, Target.named("cpu")
    experts = sum(w.size * 4 for name, w in layout.targets.items() if ".experts." in name)
    others = sum(w.size * 4 for name, w in layout.targets.items() if ".experts." not in name)
    others -= 0 if spec.tie_word_embeddings else layout.targets["embed.weight"].size * 4
    found = forecast(layout, target, tokens_in=100, tokens_out=20)
    chosen = 1 - (1 - spec.num_experts_per_tok / spec.num_experts) ** 4
    context = 4 * 110 * layout.ledger.block_bytes / layout.ledger.block_size
    assert found.decode_step_s == pytest.approx((others + chosen * experts + context) / target.bandwidth_bytes_per_s)


def test_meshes_are_parts_of_the_devices_along_tp_and_all_of_them_as_data_shards():
    assert [str(shape) for shape in shapes_of(4)] == ["tp=1", "tp=2", "tp=4", "dp=4,tp=1", "dp=2,tp=2"]


def test_the_cpu_has_no_choice_of_meshes(layout):
    order = BundleOrder(model=str(GOLDENS / "qwen3"), target="cpu", config=SMALL)
    assert meshes_of(order, layout) == [] and jax.default_backend() == "cpu"


@pytest.mark.slow
def test_the_command_prints_the_ledger_and_the_bounds(capsys):
    arguments = [
        "plan",
        "--model",
        str(GOLDENS / "qwen3"),
        "--target=cpu",
        "--tokens-in=100",
        "--tokens-out=20",
        *FLAGS,
    ]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kv_tokens"] == 80 * 16 and found["forecast"]["num_rows"] == 4
    assert found["ledger"]["temporaries_bytes"] > 0 and found["scalar_bytes"] is None
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "80 blocks of 16: 1,280 tokens" in printed and "bounds from the data sheet, not measurements" in printed


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("gpu:x1", "it must be tpu:GENERATION:SHAPE"),
        ("cpu:2", "it must be tpu:GENERATION:SHAPE"),
        ("tpu", "it must be tpu:GENERATION:SHAPE"),
    ],
)
def test_a_target_that_is_none_is_refused_with_those_that_are(capsys, target, message):
    assert main(["plan", "--model", str(GOLDENS / "qwen3"), "--target", target]) == 2
    assert message in capsys.readouterr().err
