"""Which attention an engine runs: what a check finds on this chip decides, and each fault of a chip is found."""

import dataclasses
import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import time
import types

import jax
import pytest

from ferrum_jax import LLM, SamplingParams
from ferrum_jax.config import EngineConfig
from ferrum_jax.engine.startup import choose_attention as module
from ferrum_jax.engine.startup.accelerators import Chips, explain, holder
from ferrum_jax.engine.startup.check_attention import Rehearsal
from ferrum_jax.engine.startup.choose_attention import (
    AttentionChoice,
    choose_attention,
    for_unfamiliar,
)
from ferrum_jax.engine.startup.open import Opening
from ferrum_jax.inputs.sizes.mesh_shape import MeshShape
from ferrum_jax.io.child import run_child
from ferrum_jax.models.families import registry
from ferrum_jax.models.sharding import make_mesh
from ferrum_jax.runtime.compile.verdicts import Verdict, VerdictKey, VerdictStore, entry_of, together
from scripts.shapes import random_source
from tests.models.tiny import TINY
from tests.rows import rows_beside
from tests.support import COMPILED, ROOT, is_running, raising

CONFIG = EngineConfig(
    max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64, num_blocks=16, compilation_cache_dir=None
)
TPU = Chips(platform="tpu", ids=("1ae0:006f",))
QWEN3 = TINY | {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
QWEN3 |= {"max_position_embeddings": 64, "torch_dtype": "float32"}


@functools.cache
def spec():
    return registry.spec_of(QWEN3)


def choose(fault: str | None, config: EngineConfig = CONFIG, silence_s: float = 120.0) -> AttentionChoice:
    return choose_attention(spec(), config, chips=TPU, rehearsal=Rehearsal(fault=fault), silence_s=silence_s)


@pytest.mark.slow
def test_a_kernel_that_is_right_is_taken_and_said_to_be():
    choice = choose(None)
    assert choice.implementation == "mosaic_tpu" and not choice.is_set_aside, choice.why
    assert "the check found it right" in choice.why


FOUND = rows_beside(__file__)["what is said of each fault"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FOUND)
def test_each_fault_is_said_in_one_sentence_and_the_engine_serves_through_xla(fault, monkeypatch):
    """From the order to the answer: the kernel is interpreted in a child, found wrong and set aside."""
    silent = functools.partial(choose_attention, chips=TPU, silence_s=25.0 if fault == "hang" else 200.0)
    monkeypatch.setattr("ferrum_jax.engine.startup.chosen.choose_attention", silent)
    config = dataclasses.replace(CONFIG, compilation_cache_dir=str(COMPILED))
    opening = Opening(source=random_source(QWEN3), config=config, rehearsal=Rehearsal(fault=fault))
    llm = LLM.__new__(LLM)
    with pytest.warns(RuntimeWarning) as warned:
        llm._take(opening)
    (said,) = [str(w.message) for w in warned if "attention" in str(w.message)]
    assert FOUND[fault] in said and "it is set aside for 'xla'" in said and "`ferrum-jax check`" in said
    assert "\n" not in said and len(said) < 450
    kept = re.search(r"; (\S+) holds the traceback$", said)
    assert (kept is not None) == (fault in ("compile", "abort", "old_libtpu", "hang"))
    if kept is not None:
        report = pathlib.Path(kept[1])
        stands = {"abort": "Fatal Python error: Aborted", "hang": "most recent call first"}
        assert stands.get(fault, "Traceback") in report.read_text()
        report.unlink()
    assert llm.attention.why == said and llm.loaded.layout.options.implementation == "xla"
    (answer,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True), progress=False)
    assert len(answer.token_ids) == 4


@pytest.mark.slow
def test_a_job_goes_on_with_the_attention_it_began_with_whatever_a_check_says_now(monkeypatch):
    monkeypatch.setattr(
        "ferrum_jax.engine.startup.chosen.choose_attention", lambda *_, **__: AttentionChoice("mosaic_tpu")
    )
    config = dataclasses.replace(CONFIG, invariant=True, compilation_cache_dir=str(COMPILED))
    opened, engine = Opening(source=random_source(QWEN3), config=config, begun_with={"cpu": "xla"}).run()
    assert opened.chosen.attention == AttentionChoice(implementation="xla")
    assert opened.identity.environment["implementation"] == "xla"
    engine.close()


def test_a_kernel_that_is_named_by_hand_is_refused_where_it_is_wrong():
    with pytest.raises(ValueError, match=r"not right on this chip.*leave implementation out"):
        choose("compile", dataclasses.replace(CONFIG, implementation="mosaic_tpu"))


@pytest.mark.parametrize("change", [{"check": "off"}, {"implementation": "xla"}])
def test_nothing_is_checked_that_is_not_asked_for(change, monkeypatch):
    monkeypatch.setattr(module, "run_child", None)
    config = dataclasses.replace(CONFIG, **change)
    assert choose("compile", config) == AttentionChoice(implementation=config.implementation)


def test_on_the_cpu_nothing_is_checked(monkeypatch):
    monkeypatch.setattr(module, "run_child", None)
    assert choose_attention(spec(), CONFIG, chips=TPU) == AttentionChoice(
        implementation=None
    )  # the tests ask for the CPU
    assert choose_attention(spec(), CONFIG, chips=Chips(platform="", ids=())) == AttentionChoice(implementation=None)


@pytest.mark.parametrize(
    ("platform", "verdict", "bundled", "expected"), rows_beside(__file__)["an engine follows a verdict that is kept"]
)
def test_an_engine_follows_a_verdict_that_is_kept(platform, verdict, bundled, expected, tmp_path, monkeypatch):
    """Right and slower is no reason to leave what a bundle was compiled for."""
    monkeypatch.setattr(module, "_platform", lambda chips: platform)
    config, chips = (
        dataclasses.replace(CONFIG, compilation_cache_dir=str(tmp_path / "executables")),
        Chips(platform=platform, ids=("1:2",)),
    )
    found = None if verdict is None else Verdict(implementation="k", device_kind="a", **verdict)
    monkeypatch.setattr(module, "_check", lambda order, store, silence_s: (found, None))
    assert choose_attention(spec(), config, chips=chips, is_bundled=bundled).implementation == expected


def test_tiles_of_a_verdict_are_those_of_the_engine_and_of_its_job(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_platform", lambda chips: "tpu")
    tuned = Verdict(implementation="mosaic_tpu", device_kind="a", tiles={"tile_kv": 256, "items": 2})
    monkeypatch.setattr(module, "_check", lambda order, store, silence_s: (tuned, None))
    choice = choose_attention(spec(), CONFIG, chips=TPU)
    assert choice.tiles == "items=2,tile_kv=256" and "tiles items=2,tile_kv=256 fastest" in choice.why
    recorded = AttentionChoice.recorded(f"mosaic_tpu {choice.tiles}")
    assert (recorded.implementation, recorded.tiles) == ("mosaic_tpu", choice.tiles)
    assert AttentionChoice.recorded("xla").tiles is None
    assert choose_attention(spec(), CONFIG, chips=TPU, is_bundled=True).tiles is None  # it was compiled for its own
    named = dataclasses.replace(CONFIG, attention_tiles="items=4")
    assert choose_attention(spec(), named, chips=TPU).tiles == "items=4"
    assert together([dataclasses.replace(tuned, tiles=None), tuned]).tiles == tuned.tiles


def test_tiles_that_are_named_twice_are_refused():
    with pytest.raises(ValueError, match="it must name each tile once"):
        EngineConfig(attention_tiles="items=2,items=4")


def test_a_verdict_is_kept_for_the_next_start_and_for_no_other_chip(tmp_path):
    key = VerdictKey.here("1ae0:006f")
    store = VerdictStore(str(tmp_path / "executables"), key)
    verdict, entry = Verdict(implementation="mosaic_tpu", device_kind="TPU v6 lite", speed=2.0), entry_of("a", "b", "c")
    assert store.find(entry) is None
    store.keep({entry: verdict})
    assert VerdictStore(str(tmp_path / "executables"), key).find(entry) == verdict
    other = dataclasses.replace(key, chip="1ae0:0063")
    assert VerdictStore(str(tmp_path / "executables"), other).find(entry) is None
    (path,) = (tmp_path / "verdicts").iterdir()
    kept = json.loads(path.read_text())
    for name, value in (("speed", "fast"), ("speed", 0), ("tiles", [1]), ("tiles", {"items": "2"}), ("problem", 5)):
        changed = kept["entries"][entry] | {name: value}
        path.write_text(json.dumps(kept | {"entries": {entry: changed}}))
        assert store.find(entry) is None, (name, value)
    for text in ("{", "[" * 100_000, '"key"'):
        path.write_text(text)
        assert store.find(entry) is None
    wrong = Verdict(implementation="mosaic_tpu", device_kind="TPU v6 lite", problem="no")
    assert not together([verdict, wrong]).is_right and together([verdict]).speed == pytest.approx(2.0)


def test_a_choice_of_another_kind_of_device_is_none(monkeypatch):
    class Device:
        device_kind = "TPU v5e"

    assert AttentionChoice(implementation="xla", device_kind="TPU v6e").on(Device) == AttentionChoice(
        implementation=None
    )
    assert AttentionChoice(implementation="xla", device_kind="TPU v5e").on(Device).implementation == "xla"


def with_others(folder, fault: str | None = None, **changes) -> AttentionChoice:
    config = dataclasses.replace(CONFIG, compilation_cache_dir=str(folder / "executables"), **changes)
    mesh = make_mesh(MeshShape(), jax.devices("cpu"))
    return choose_attention(spec(), config, mesh=mesh, rehearsal=Rehearsal(fault=fault))


def test_process_0_checks_for_all_and_a_broken_kernel_is_set_aside(tmp_path):
    choice = with_others(tmp_path, "compile")
    assert choice.implementation == "xla" and choice.is_set_aside
    assert FOUND["compile"] in choice.why and "holds the traceback" in choice.why
    pathlib.Path(re.search(r"; (\S+) holds", choice.why)[1]).unlink()
    assert with_others(tmp_path, "compile").implementation == "xla"  # as it was kept
    assert with_others(tmp_path, "compile", check="off").implementation is None


def test_a_check_that_ended_its_process_is_known_to_the_next_start(tmp_path, monkeypatch):

    monkeypatch.setattr(module, "verdict_of", raising(SystemExit))
    monkeypatch.setattr(VerdictStore, "forget", lambda self, prefix: None)  # as nothing that is killed does
    with pytest.raises(SystemExit):
        with_others(tmp_path)
    choice = with_others(tmp_path)
    assert choice.implementation == "xla" and "a start that checked it did not come to its end" in choice.why


def test_an_interrupted_check_says_nothing_of_the_kernel(tmp_path, monkeypatch):

    monkeypatch.setattr(module, "verdict_of", raising(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        with_others(tmp_path)
    right = Verdict(implementation="mosaic_tpu", device_kind="cpu")
    monkeypatch.setattr(module, "verdict_of", lambda layout, order: right)
    assert with_others(tmp_path).implementation == "mosaic_tpu"


def test_an_accelerator_without_a_kernel_is_said_to_run_on_xla_in_one_sentence():
    l4 = types.SimpleNamespace(
        platform="gpu", device_kind="NVIDIA L4", memory_stats=lambda: {"bytes_limit": 18 * 2**30}
    )
    choice = for_unfamiliar(l4)
    assert choice.implementation is None and choice.is_set_aside
    assert choice.why == "NVIDIA L4 runs on 'xla': no kernel was made for it, and jax says that it has 18.0 GiB"
    v4 = types.SimpleNamespace(platform="tpu", device_kind="TPU v4")
    assert for_unfamiliar(v4).why == "TPU v4 runs on 'xla': no kernel was made for it"
    for platform, kind in (("tpu", "TPU v6 lite"), ("gpu", "NVIDIA H200"), ("cpu", "cpu")):
        assert for_unfamiliar(types.SimpleNamespace(platform=platform, device_kind=kind)).why == ""


def chip(root, number: str, **files: str):
    for name, text in files.items():
        (root / f"sys/bus/pci/devices/{number}/{name}").parent.mkdir(parents=True, exist_ok=True)
        (root / f"sys/bus/pci/devices/{number}/{name}").write_text(text + "\n")


def test_chips_are_known_by_their_bus_before_a_device_is_opened(tmp_path):
    assert Chips.here(tmp_path) == Chips(platform="", ids=())
    for number in "01":
        chip(tmp_path, number, vendor="0x1ae0", device="0x006f", **{"class": "0x088000"})
    chip(tmp_path, "2", vendor="0x1ae0", device="0x0042", **{"class": "0x020000"})  # a network card
    assert Chips.here(tmp_path) == Chips(platform="tpu", ids=("1ae0:006f", "1ae0:006f"))
    assert Chips.here(tmp_path).name == "1ae0:006f"


def test_who_holds_a_tpu_is_found_by_open_files_and_by_the_lock_file(tmp_path):
    assert holder(tmp_path) is None
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/accel0").touch()
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp/libtpu_lockfile").write_text("17\n")
    assert holder(tmp_path) is None  # it has ended
    (tmp_path / "proc/17").mkdir(parents=True)
    assert holder(tmp_path) == 17
    (tmp_path / "proc/23/fd").mkdir(parents=True)
    (tmp_path / "proc/23/fd/4").symlink_to(tmp_path / "dev/accel0")
    assert holder(tmp_path) == 23
    assert "held by process 99" in explain("ABORTED: The TPU is already in use by process with pid 99.")


def test_a_child_s_words_are_kept_where_it_ends_in_an_error():
    ended = run_child("tests.startup.children:fails", 3, silence_s=60)
    assert ended.sent == (3, [4]) and ended.problem == "ValueError: three lines" and "Traceback" in ended.text


_PARENT = """
from ferrum_jax.io.child import run_child
run_child("tests.startup.children:waits_for_ever", 0, silence_s=600, on_sent=lambda pid: print(pid, flush=True))
"""


def test_a_child_that_hangs_ends_with_a_parent_that_is_killed():
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-c", _PARENT]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    until = time.monotonic() + 30
    while is_running(child) and time.monotonic() < until:
        time.sleep(0.01)
    assert not is_running(child)


def test_a_child_that_takes_a_large_order_and_answers_ends_well():
    seen: list = []
    ended = run_child("tests.startup.children:counts", "x" * 300_000, silence_s=60, on_sent=seen.append)
    assert ended.problem is None and ended.sent == (300_000,) and seen == [300_000]
