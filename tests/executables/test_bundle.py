"""Bundles: what was made elsewhere runs the same, and whatever does not fit is said and never crashes."""

import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ferrum_jax import EngineConfig
from ferrum_jax.runtime.compile.bundle import Bundle, BundledExecutables, BundleWriter, Purpose, config_for, purpose_of
from ferrum_jax.runtime.compile.environment import Environment
from ferrum_jax.runtime.compile.executable_store import ExecutableStore, serialize
from ferrum_jax.runtime.compile.lowered import Lowered

X = np.arange(3, dtype=np.float32)
DOUBLE, TRIPLE = "double\nshapes", "triple\nshapes"


def lowered(factor) -> Lowered:
    return Lowered(jax.jit(lambda x: factor * x).lower(jax.ShapeDtypeStruct((3,), jnp.float32)))


def refuse():
    raise AssertionError("compiled what is in the bundle")


def purpose(**changes):
    own = Purpose(
        target="cpu",
        device_ids=[0],
        spec="model a",
        config={"num_blocks": 80, "max_num_seqs": 4},
        environment=Environment.of_device(jax.devices()[0]),
    )
    return dataclasses.replace(own, **changes)


@pytest.fixture(scope="module")
def payload():
    return serialize(lowered(2).compile())


@pytest.fixture
def folder(tmp_path, payload):
    """A bundle with one part."""
    BundleWriter(tmp_path / "bundle", purpose()).put(DOUBLE, payload)
    return tmp_path / "bundle"


def executables(folder, *, required=False, fallback=None, spec="model a"):
    return BundledExecutables(Bundle.open(folder), jax.devices()[:1], spec=spec, fallback=fallback, required=required)


def part_of(folder):
    (path,) = (folder / "parts").iterdir()
    return path


def change_manifest(folder, change):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def test_what_is_in_the_bundle_is_loaded_and_not_lowered(folder):
    source = executables(folder, required=True)
    np.testing.assert_array_equal(source.get(DOUBLE, refuse).result()(X), 2 * X)
    assert (source.hits, source.found, source.misses, source.problems) == (1, ["double"], 0, [])


def test_what_it_lacks_is_compiled_and_said_by_name(folder):
    source = executables(folder)
    np.testing.assert_array_equal(source.get(TRIPLE, lambda: lowered(3)).result()(X), 3 * X)
    assert (source.hits, source.misses) == (0, 1)
    assert source.problems == [f"bundle {folder}: it has no triple for this config"]


def test_what_it_lacks_comes_from_the_store_where_there_is_one(folder, tmp_path):
    store = ExecutableStore(str(tmp_path / "store"))
    source = executables(folder, fallback=store)
    source.get(TRIPLE, lambda: lowered(3))
    source.get(TRIPLE, refuse)
    assert (store.hits, store.misses) == (1, 1)


def test_what_it_lacks_is_refused_where_the_bundle_is_required(folder):
    with pytest.raises(ValueError, match=r"it has no triple for this config; make the bundle anew"):
        executables(folder, required=True).get(TRIPLE, refuse)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-9], "double: its file has .* bytes instead of"),
        (lambda data: data[:50] + bytes([data[50] ^ 1]) + data[51:], "double: its file is damaged"),
        (None, "double: its file .* is missing"),
    ],
    ids=["truncated", "flipped", "missing"],
)
def test_a_damaged_part_is_said_and_compiled_instead(folder, damage, message):
    path = part_of(folder)
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    source = executables(folder)
    np.testing.assert_array_equal(source.get(DOUBLE, lambda: lowered(2)).result()(X), 2 * X)
    (problem,) = source.problems
    with pytest.raises(ValueError, match=message):
        raise ValueError(problem)


def test_a_whole_part_that_cannot_be_loaded_is_named_and_lowered(folder):
    BundleWriter(folder, purpose()).put(DOUBLE, b"no executable")
    source = executables(folder)
    later = source.get(DOUBLE, lambda: lowered(2))
    assert (source.hits, source.misses, source.problems) == (1, 0, [])
    np.testing.assert_array_equal(later.result()(X), 2 * X)
    assert (source.hits, source.misses) == (0, 1)
    assert "double: it cannot be loaded: UnpicklingError" in source.problems[0]
    with pytest.raises(ValueError, match=r"double: it cannot be loaded: .*make the bundle anew"):
        executables(folder, required=True).get(DOUBLE, refuse).result()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("jax", "0.1.0", "made with jax '0.1.0', here '"),
        ("platform", "tpu", "made with platform 'tpu', here 'cpu'"),
        ("device_kind", "TPU v6 lite", "made with device kind 'TPU v6 lite', here 'cpu'"),
        ("instruction_set", "flags: none", "made with instruction set 'flags: none', here "),
    ],
)
def test_a_bundle_of_another_version_or_target_is_named_and_not_loaded(folder, field, value, message):
    change_manifest(folder, lambda manifest: manifest["purpose"]["environment"].update({field: value}))
    source = executables(folder)
    np.testing.assert_array_equal(source.get(DOUBLE, lambda: lowered(2)).result()(X), 2 * X)
    assert source.hits == 0 and message in source.problems[0]
    with pytest.raises(ValueError, match="none of its executables can run here"):
        executables(folder, required=True).get(DOUBLE, refuse)


def test_a_bundle_of_another_model_or_of_other_devices_is_not_loaded(folder):
    assert "it is of another model" in executables(folder, spec="model b").problems[0]
    change_manifest(folder, lambda manifest: manifest["purpose"].update(device_ids=[1, 0]))
    assert "its mesh is of devices [1, 0], here of [0]" in executables(folder).problems[0]


@pytest.mark.parametrize("place", ["", "manifest.json", "parts"])
def test_a_bundle_that_others_may_write_to_is_refused(folder, place):
    (folder / place).chmod(0o777)
    with pytest.raises(ValueError, match=r"others can write to .*chmod"):
        Bundle.open(folder)


def test_a_part_that_others_may_write_to_is_not_loaded(folder):
    part_of(folder).chmod(0o666)
    with pytest.raises(ValueError, match=r"double: others can write to its file"):
        executables(folder, required=True).get(DOUBLE, refuse)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(format=2), "its format is 2, and this version reads 1"),
        (lambda m: m["purpose"].pop("target"), "cannot be read"),
        (lambda m: m["purpose"]["environment"].pop("jax"), "cannot be read: an environment has"),
        (lambda m: next(iter(m["parts"].values())).update(sha256="../../x"), "names the file '../../x'"),
        (lambda m: m.pop("parts"), "cannot be read: 'parts'.*another version made it, or it is damaged"),
        (lambda m: m["purpose"]["config"].update(colour=1), "cannot be read: .*'colour'.*`ferrum-jax compile`"),
        (lambda m: m["purpose"]["config"].update(num_blocks="x"), "cannot be read: num_blocks is 'x'"),
        (lambda m: m["purpose"].update(config=[]), "cannot be read"),
        (lambda m: m["purpose"].update(colour=1), "cannot be read: .*'colour'"),
    ],
)
def test_a_manifest_that_cannot_be_read_is_an_error_that_names_the_bundle(folder, change, message):
    change_manifest(folder, change)
    with pytest.raises(ValueError, match=message):
        Bundle.open(folder)


def test_a_folder_without_a_manifest_is_a_place_for_a_bundle_only_if_empty(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(
        ValueError, match=r"is not a bundle: it has no manifest.json; make one with `ferrum-jax compile`"
    ):
        Bundle.open(tmp_path)
    with pytest.raises(ValueError, match="name a folder that does not exist or is empty"):
        BundleWriter(tmp_path, purpose())


def test_an_interrupted_bundle_goes_on_and_damaged_parts_are_made_again(folder, payload):
    writer = BundleWriter(folder, purpose())
    assert writer.has(DOUBLE) and not writer.has(TRIPLE)
    part_of(folder).write_bytes(payload[:-1])
    assert not BundleWriter(folder, purpose()).has(DOUBLE)
    BundleWriter(folder, purpose()).put(DOUBLE, payload)
    assert executables(folder, required=True).get(DOUBLE, refuse) is not None


def test_a_bundle_is_not_gone_on_with_for_another_purpose(folder):
    with pytest.raises(ValueError, match=r"another purpose \(its num_blocks is 80, not 81\)"):
        BundleWriter(folder, purpose(config={"num_blocks": 81, "max_num_seqs": 4}))
    with pytest.raises(ValueError, match=r"its target is cpu, not tpu:v6e:2x2"):
        BundleWriter(folder, purpose(target="tpu:v6e:2x2"))


def test_an_engine_takes_the_bundles_config_or_at_least_the_size_of_its_pool(folder):
    bundle = Bundle.open(folder)
    assert config_for(None, bundle) == EngineConfig(num_blocks=80, max_num_seqs=4)
    assert config_for(EngineConfig(max_num_seqs=4), bundle).num_blocks == 80
    assert config_for(EngineConfig(num_blocks=7), bundle).num_blocks == 7
    on_mesh = dataclasses.replace(bundle, purpose=purpose(config={"mesh": "tp=2"}))
    assert (
        config_for(EngineConfig(), on_mesh).mesh == "tp=2"
        and config_for(EngineConfig(mesh="dp=2"), on_mesh).mesh == "dp=2"
    )
    assert config_for(None, None) == EngineConfig()


def test_how_tokens_are_drafted_is_kept_in_a_bundle(tmp_path):
    config = EngineConfig(num_blocks=80, max_num_seqs=4, speculative_config={"method": "suffix"})
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("x",))
    spec = types.SimpleNamespace(digest_text=lambda: "model a")
    own = purpose_of("cpu", config, mesh, spec)
    BundleWriter(tmp_path / "bundle", own)
    found = Bundle.open(tmp_path / "bundle")
    assert config_for(None, found) == dataclasses.replace(EngineConfig(), **own.config) == config
    BundleWriter(tmp_path / "bundle", own)  # goes on
    other = purpose_of("cpu", dataclasses.replace(config, speculative_config=None), mesh, spec)
    with pytest.raises(ValueError, match=r"its speculative_config is \{'method': 'suffix', .*, not None"):
        BundleWriter(tmp_path / "bundle", other)
