"""Plans: what fits and the bounds of speed, against numbers counted by hand."""

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from ferrum_jax.__main__ import main
from ferrum_jax.cli.compile import _WITHOUT_DEVICE
from ferrum_jax.config import EngineConfig
from ferrum_jax.models.families.registry import abstract_tower, spec_of
from ferrum_jax.planning.meshes.choices import meshes_of, shapes_of
from ferrum_jax.planning.meshes.encoder_forecast import forecast_encoder
from ferrum_jax.planning.meshes.forecast import Lengths, forecast, least_time_s
from ferrum_jax.planning.offline.bundle_order import BundleOrder
from ferrum_jax.runtime.buckets import Bucket, Ladder
from ferrum_jax.runtime.compile.deferred import DeferredExecutable
from ferrum_jax.runtime.placing.fit import kv_bytes_left, temporaries_bytes
from pallas_kernels.target import Target
from scripts.published import config_of
from tests.support import GOLDENS, SMALL

LLAMA3_8B = config_of("Llama-3-8B")

FAMILIES = ("qwen3", "qwen3_moe")
FLAGS = ["--max-num-seqs=4", "--max-num-batched-tokens=16", "--max-model-len=256", "--num-blocks=80"]


@pytest.fixture(scope="module")
def layout():
    return BundleOrder(model=str(GOLDENS / "qwen3"), target="cpu", config=SMALL).laid_out().layout


def test_what_weights_slots_and_a_step_leave_is_for_blocks(layout):
    ledger = layout.ledger
    fixed = ledger.weights_bytes + ledger.slots_bytes + ledger.prompts_bytes + ledger.hidden_bytes + ledger.masks_bytes
    assert kv_bytes_left(layout, fixed + 1000 + 7 * ledger.block_bytes, 1000) == 7 * ledger.block_bytes
    with pytest.raises(ValueError, match=r"GiB too small: .* take more devices along tp, or lower max_num_batched"):
        kv_bytes_left(layout, fixed + 1000 + 2 * ledger.block_bytes - 1, 1000)


def temporaries_with(most_rows: int, sizes: tuple[int, ...], monkeypatch) -> int:
    """What is asked of a compiler that says these sizes of forwards, of what samples, and of a tile of scores."""
    buckets = [
        Bucket(num_tokens=tokens, num_rows=min(tokens, most_rows), table_width=4, decode_only=tokens <= most_rows)
        for tokens in (32, 64, 128, 256)
    ]
    shards = SimpleNamespace(size=1)
    options = SimpleNamespace(shards=shards)
    layout: Any = SimpleNamespace(ladder=Ladder(buckets=tuple(buckets)), images=None, options=options)

    def executable(size: int) -> Any:
        memory = SimpleNamespace(temp_size_in_bytes=size, output_size_in_bytes=9, alias_size_in_bytes=6)
        return DeferredExecutable.made(SimpleNamespace(memory_analysis=lambda: memory))

    keys = (*buckets, *layout.ladder.row_buckets, "score")
    parts = {key: SimpleNamespace(get=lambda _, s=s: executable(s)) for key, s in zip(keys, sizes, strict=True)}
    monkeypatch.setattr("ferrum_jax.runtime.placing.fit.programs_of", lambda layout: parts)
    return temporaries_bytes(layout, None)


@pytest.mark.parametrize("sizes", [(1, 50, 1, 20, 1, 9), (1, 20, 1, 50, 1, 9), (1, 20, 1, 9, 1, 50)])
def test_temporaries_are_those_of_the_part_that_needs_most_prefill_decode_or_sample(sizes, monkeypatch):
    """All rows of a decode are drawn at once, so a small model's sampling needs more than its prefill."""
    assert temporaries_with(64, (*sizes, 10), monkeypatch) == 53


def test_of_few_rows_a_tile_of_prompt_scores_needs_most(monkeypatch):
    assert temporaries_with(32, (1, 2, 3, 20, 9, 50), monkeypatch) == 53


def test_a_decode_step_reads_the_weights_once_and_the_context_of_every_row(layout):
    spec, ledger = layout.options.spec, layout.ledger
    found = forecast(layout, Target.named("cpu"), tokens_in=100, tokens_out=20)
    token_bytes = spec.num_hidden_layers * 2 * spec.attention.num_key_value_heads * spec.attention.head_dim * 4
    embedding = 0 if spec.tie_word_embeddings else spec.vocab_size * spec.hidden_size * 4
    read = ledger.weights_bytes - embedding + 4 * 110 * token_bytes
    assert (found.num_rows, found.decode_bound_by) == (4, "memory")
    assert found.decode_step_s == pytest.approx(read / Target.named("cpu").bandwidth_bytes_per_s)


def test_beyond_the_chosen_keys_a_context_costs_the_keys_of_indexers_alone():
    layout = BundleOrder(model=str(GOLDENS / "deepseek_v32"), target="cpu", config=SMALL).laid_out().layout
    spec, bandwidth = layout.options.spec, Target.named("cpu").bandwidth_bytes_per_s
    latent, own = spec.attention.latent, spec.attention.indexer
    assert latent is not None and own is not None

    def context_s(context: int) -> float:
        found = forecast(layout, Target.named("cpu"), tokens_in=context - 10, tokens_out=20)
        return found.decode.contexts_s / found.num_rows

    layers, kept = spec.num_hidden_layers, latent.kv_lora_rank + spec.attention.head_dim
    index_s = layers * own.head_dim * 4 / bandwidth
    assert context_s(200) - context_s(100) == pytest.approx(100 * index_s)
    assert context_s(100) == pytest.approx(100 * index_s + own.top_k * layers * kept * 4 / bandwidth)


def test_rows_are_as_many_as_the_pool_holds_at_their_full_length(layout):
    assert forecast(layout, Target.named("cpu"), tokens_in=250, tokens_out=6).num_rows == 4  # 80 blocks, 16 a row
    few = BundleOrder(model=str(GOLDENS / "qwen3"), target="cpu", config=dataclasses.replace(SMALL, num_blocks=40))
    assert forecast(few.laid_out().layout, Target.named("cpu"), tokens_in=250, tokens_out=6).num_rows == 2


def test_a_request_longer_than_the_model_serves_is_refused_with_both_numbers(layout):
    with pytest.raises(ValueError, match="250 tokens in and 7 out are 257, more than max_model_len, 256"):
        forecast(layout, Target.named("cpu"), tokens_in=250, tokens_out=7)


def test_experts_that_a_step_reads_are_those_that_its_rows_choose():
    order = BundleOrder(model=str(GOLDENS / "qwen3_moe"), target="cpu", config=SMALL)
    layout = order.laid_out().layout
    spec, target = layout.options.spec, Target.named("cpu")
    experts = sum(w.size * 4 for name, w in layout.targets.items() if ".experts." in name)
    others = sum(w.size * 4 for name, w in layout.targets.items() if ".experts." not in name)
    others -= 0 if spec.tie_word_embeddings else layout.targets["embed.weight"].size * 4
    found = forecast(layout, target, tokens_in=100, tokens_out=20)
    chosen = 1 - (1 - spec.experts.num_experts_per_tok / spec.experts.num_experts) ** 4
    context = 4 * 110 * layout.ledger.block_bytes / layout.ledger.block_size
    assert found.decode_step_s == pytest.approx((others + chosen * experts + context) / target.bandwidth_bytes_per_s)


def test_a_job_takes_at_least_its_weights_a_step_and_two_operations_a_prompt_token(layout):
    target, spec = Target.named("cpu"), layout.options.spec
    embedding = 0 if spec.tie_word_embeddings else spec.vocab_size * spec.hidden_size * 4
    weights = layout.ledger.weights_bytes - embedding
    steps_s = 30 / 4 * weights / target.bandwidth_bytes_per_s
    assert least_time_s(layout, target, tokens_in=0, tokens_out=30) == pytest.approx(steps_s)
    prefill_s = 1000 * 2 * weights / 4 / target.flops_per_s
    assert least_time_s(layout, target, tokens_in=1000, tokens_out=30) == pytest.approx(steps_s + prefill_s)


def test_a_job_s_least_time_counts_the_experts_that_its_tokens_choose():
    layout = BundleOrder(model=str(GOLDENS / "qwen3_moe"), target="cpu", config=SMALL).laid_out().layout
    target, spec = Target.named("cpu"), layout.options.spec
    sizes = {name: w.size for name, w in layout.targets.items() if name != "embed.weight" or spec.tie_word_embeddings}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    active = sum(sizes.values()) - experts + experts * spec.experts.num_experts_per_tok / spec.experts.num_experts
    found = least_time_s(layout, target, tokens_in=1000, tokens_out=0)
    assert found == pytest.approx(1000 * 2 * active / target.flops_per_s)


def test_a_job_that_hears_takes_at_least_the_products_of_its_encoder_for_each_window():
    layout = BundleOrder(model=str(GOLDENS / "whisper_words"), target="cpu", config=EngineConfig()).laid_out().layout
    target, sound = Target.named("cpu"), layout.spec.sound
    width, inner = sound.hidden_size, sound.intermediate_size
    each_layer = 4 * width**2 + 2 * width * inner
    whole = 3 * width * (sound.num_mels + width) + sound.num_layers * each_layer
    whole += sound.num_readers * 2 * width * sound.out_size
    found = least_time_s(layout, target, tokens_in=0, tokens_out=0, num_clips=10)
    assert found == pytest.approx(10 * 2 * sound.num_positions * whole / target.flops_per_s)


def test_meshes_are_parts_of_the_devices_along_tp_and_all_of_them_as_data_shards():
    dense, routed = (
        BundleOrder(model=str(GOLDENS / name), target="cpu", config=SMALL).subject.spec for name in FAMILIES
    )
    plain = ["tp=1", "tp=2", "tp=4", "dp=4,tp=1", "dp=2,tp=2"]
    assert [str(shape) for shape in shapes_of(dense, 4)] == plain
    assert [str(shape) for shape in shapes_of(routed, 4)] == [*plain, "dp=4,tp=1,ep=1", "dp=2,tp=2,ep=2"]


def test_the_cpu_has_no_choice_of_meshes():
    order = BundleOrder(model=str(GOLDENS / "qwen3"), target="cpu", config=SMALL)
    assert meshes_of(order.subject, jax.devices(), Lengths()) == [] and jax.default_backend() == "cpu"
    assert order.settled().config.mesh == "tp=1" and order.settled().why_mesh == ""


def test_lengths_that_are_left_open_fit_the_model_and_those_that_are_named_stay():
    assert Lengths().within(8192) == (1024, 256) and Lengths().within(500) == (400, 100)
    assert Lengths(tokens_in=9000).within(500) == (9000, 100) and Lengths(tokens_out=7).within(500) == (493, 7)


@pytest.mark.parametrize("tokens", [0, -5])
def test_lengths_below_one_token_are_refused(tokens):
    with pytest.raises(ValueError, match=f"tokens_in is {tokens}; it must be 1 or more"):
        Lengths(tokens_in=tokens)
    with pytest.raises(ValueError, match=f"tokens_out is {tokens}; it must be 1 or more"):
        Lengths(tokens_out=tokens)


@pytest.mark.aot
def test_every_mesh_of_a_slice_has_its_memory_and_speed_without_a_compile(capsys, monkeypatch, tmp_path):
    for name, value in _WITHOUT_DEVICE.items():  # which the command leaves in the environment
        monkeypatch.setenv(name, value)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA3_8B))
    assert main(["plan", "--model", str(tmp_path), "--target=tpu:v5e:2x2", "--mesh=tp=4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    meshes = {mesh["mesh"]: mesh for mesh in found["meshes"]}
    assert list(meshes) == ["tp=1", "tp=2", "tp=4", "dp=4,tp=1", "dp=2,tp=2"]
    assert "GiB too small" in meshes["tp=1"]["problem"] and meshes["tp=1"]["weights_bytes"] > 14 << 30
    assert meshes["tp=4"]["forecast"]["prefill_tokens_per_s"] == found["forecast"]["prefill_tokens_per_s"]
    assert meshes["tp=4"]["kv_tokens"] == found["kv_tokens"] > meshes["tp=2"]["kv_tokens"] > 0
    assert main(["plan", "--model", str(tmp_path), "--target=tpu:v5e:2x2", "--mesh=tp=1"]) == 2
    printed, error = capsys.readouterr()
    assert "tp=1: " in printed and "dp=2,tp=2" in printed and "Any one of these would do: mesh tp=2" in error


def test_an_encoder_takes_what_its_layers_multiply_or_read(capsys):
    bert = str(GOLDENS / "encoders" / "bert")
    order = BundleOrder(model=bert, target="cpu", config=EngineConfig(max_num_batched_tokens=256))
    layout, target = order.laid_out().layout, Target.named("cpu")
    layers = sum(weight.size for name, weight in layout.targets.items() if name.startswith("layers."))
    width = layout.spec.hidden_size * layout.spec.num_hidden_layers
    fast = dataclasses.replace(target, bandwidth_bytes_per_s=1e30)
    found = forecast_encoder(layout, fast, tokens_in=16)
    assert (found.num_rows, found.bound_by) == (16, "arithmetic")
    assert found.step_s == pytest.approx(256 * (2 * layers + 4 * 16 * width) / target.flops_per_s)
    strong = dataclasses.replace(target, flops_per_s=1e30)
    found = forecast_encoder(layout, strong, tokens_in=16)
    assert found.step_s == pytest.approx(4 * layers / target.bandwidth_bytes_per_s)
    assert found.tokens_per_s == pytest.approx(256 / found.step_s) and found.bound_by == "memory"
    with pytest.raises(ValueError, match="tokens in are more than max_model_len"):
        forecast_encoder(layout, target, tokens_in=layout.max_model_len + 1)
    assert main(["plan", "--model", bert, "--target=cpu", "--tokens-in=16"]) == 0
    printed = capsys.readouterr().out
    assert "16 tokens a text" in printed and "no pools" in printed and "bounds from the data sheet" in printed
    for flag in ("--tokens-out=3", "--compile"):
        assert main(["plan", "--model", bert, "--target=cpu", flag]) == 2
        assert flag.partition("=")[0] in capsys.readouterr().err


def test_the_ledger_says_how_much_of_the_weights_is_a_tower(capsys):
    folder = GOLDENS / "vision" / "gemma3_vision"
    spec = spec_of(json.loads((folder / "config.json").read_text()))
    tower = 4 * sum(weight.size for weight in abstract_tower(spec.vision)[1].values())
    assert main(["plan", "--model", str(folder), "--target=cpu", *FLAGS, "--max-num-batched-tokens=32"]) == 0
    assert f"{tower / 2**20:,.1f} MiB of them are the tower's" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", "--model", str(folder), "--target=cpu", *FLAGS, "--max-image-tokens=0"]) == 0
    assert "tower" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "says"), [("fp8_blocks", "fp8 52%, float32 48%"), ("mixed", "float32 54%, int8 28%, int4 17%")]
)
def test_the_ledger_names_what_weights_are_kept_in(capsys, name, says):
    assert main(["plan", "--model", str(GOLDENS / "quantised" / name), "--target=cpu", *FLAGS]) == 0
    assert says in capsys.readouterr().out


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_command_prints_the_ledger_and_the_bounds(capsys, compiles):
    arguments = [
        "plan",
        "--model",
        str(GOLDENS / "qwen3"),
        "--target=cpu",
        "--tokens-in=100",
        "--tokens-out=20",
        *(["--compile"] if compiles else []),
        *FLAGS,
    ]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kv_tokens"] == 80 * 16 and found["forecast"]["num_rows"] == 4
    assert found["ledger"]["temporaries_bytes"] > 0 and found["scalar_bytes"] is None
    assert (found["is_compiled"], found["meshes"]) == (compiles, [])
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "80 blocks of 16: 1,280 tokens" in printed and "bounds from the data sheet, not measurements" in printed


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("gpu:x1", "it must be GENERATION:SHAPE of TPUs"),
        ("cpu:2", "it must be GENERATION:SHAPE of TPUs"),
        ("tpu", "it must be GENERATION:SHAPE of TPUs"),
    ],
)
def test_a_target_that_is_none_is_refused_with_those_that_are(capsys, target, message):
    assert main(["plan", "--model", str(GOLDENS / "qwen3"), "--target", target]) == 2
    assert message in capsys.readouterr().err
