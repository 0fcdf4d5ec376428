"""Which mesh is taken: a named one always, else the fastest that fits, and why none where none does."""

import dataclasses
import io
import json

import pytest
from rich.console import Console

from ferrum_jax.__main__ import main
from ferrum_jax.cli.plan_tables import _mesh_table
from ferrum_jax.config import EngineConfig
from ferrum_jax.models.families.registry import encoder_spec_of, spec_of
from ferrum_jax.planning.meshes.choices import MeshFit, meshes_of
from ferrum_jax.planning.meshes.forecast import Forecast, Lengths
from ferrum_jax.planning.meshes.on_paper import Subject
from ferrum_jax.planning.meshes.settle import by_problem, choose_mesh
from scripts.published import PUBLISHED, config_of
from tests.meshes.described import V5E_4, V6E_8, V6E_16
from tests.runtime.test_layout import CPU
from tests.support import GOLDENS

LLAMA3_8B = config_of("Llama-3-8B")


def subject(name="Llama-3-8B", **fields):
    return Subject(spec=spec_of(PUBLISHED[name][0]), config=EngineConfig(**fields))


def test_a_named_mesh_is_taken_and_one_device_or_the_cpu_has_no_choice():
    assert choose_mesh(subject(mesh="tp=2"), V6E_8).mesh == "tp=2"
    for devices in (V6E_8[:1], [CPU] * 4):
        choice = choose_mesh(subject(), devices)
        assert (choice.mesh, choice.why) == ("tp=1", "")


@pytest.mark.parametrize(
    ("name", "devices", "mesh"),
    [
        ("Llama-3-70B", V6E_8, "tp=8"),
        ("Llama-3-8B", V5E_4, "tp=4"),
        ("Qwen3-0.6B", V6E_8, "dp=8,tp=1"),
        ("Qwen3-30B-A3B", V6E_8, "dp=8,tp=1"),
        ("Qwen1.5-MoE-A2.7B", V6E_8, "dp=2,tp=4,ep=4"),  # 60 experts are no multiple of 8
        ("Llama-3-8B", V6E_8[2:4], "tp=2"),
        ("Llama-3-8B", V6E_16, "dp=8,tp=2"),
    ],
)
def test_the_fastest_mesh_that_fits_is_taken_and_said(name, devices, mesh):
    found = meshes_of(subject(name), devices, Lengths())
    choice = choose_mesh(subject(name), devices)
    best = max(found, key=lambda each: each.rate)
    assert choice.mesh == best.mesh == mesh and not best.problem
    assert choice.why.startswith(f"mesh {mesh} is taken of {len(devices)} devices: ") and "\n" not in choice.why
    assert f"at most {best.rate:,.0f} output tokens/s; --mesh names another" in choice.why
    assert subject(name).with_mesh(choose_mesh(subject(name), devices).mesh).config.mesh_shape.size <= len(devices)


def test_a_mesh_that_leaves_a_host_or_a_process_idle_is_not_taken():
    assert {each.mesh for each in meshes_of(subject(), V6E_16, Lengths())} == {
        *("tp=16", "dp=16,tp=1", "dp=8,tp=2", "dp=4,tp=4", "dp=2,tp=8")
    }
    apart = [dataclasses.replace(device, process_index=number // 2) for number, device in enumerate(V5E_4)]
    assert {each.mesh for each in meshes_of(subject(), apart, Lengths())} == {"tp=4", "dp=4,tp=1", "dp=2,tp=2"}


def test_where_none_fits_one_sentence_says_by_how_much_and_what_would_do():
    with pytest.raises(
        ValueError, match=r"the nearest mesh, tp=4, is [\d.]+ GiB too small a device.*; it would fit me"
    ):
        choose_mesh(subject("Llama-3-70B"), V5E_4)
    with pytest.raises(
        ValueError, match=r"^no mesh of these 4 devices runs it: max_model_len is 9000, more than the mo"
    ):
        choose_mesh(subject(max_model_len=9000), V5E_4)


def test_weights_of_8_bits_are_offered_where_they_fit_and_none_were_asked_for():
    with pytest.raises(ValueError, match=r"; with --weights int8 it fits these, on mesh tp=4$"):
        choose_mesh(subject("Llama-3-70B"), V6E_8[:4])
    for devices, weights in ((V5E_4, "auto"), (V5E_4, "fp8")):  # too little for any, or another form is asked for
        with pytest.raises(ValueError) as refused:
            choose_mesh(subject("Llama-3-70B", weights=weights), devices)
        assert "--weights int8" not in str(refused.value)


def test_the_names_of_ten_meshes_are_whole_at_80_columns():
    (fit, *_) = [each for each in meshes_of(subject(), V6E_8, Lengths()) if not each.problem]
    names = [f"dp={2**k},tp={2 ** (9 - k)},ep=512,cp=2" for k in range(10)]
    console = Console(width=80, file=io.StringIO())
    console.print(_mesh_table([dataclasses.replace(fit, mesh=name, kv_tokens=10**9) for name in names]))
    lines = console.file.getvalue().splitlines()
    assert all(any(line.split()[:1] == [name] for line in lines) for name in names)
    assert max(map(len, lines)) <= 80


def test_rows_are_halved_where_more_of_them_leave_no_memory():
    """A record of a row has a word for each position, and Llama 4 Scout has ten million."""
    (found,) = (each for each in meshes_of(subject("Llama-4-Scout"), V6E_8, Lengths()) if each.mesh == "tp=8")
    assert not found.problem and isinstance(found.forecast, Forecast) and found.forecast.num_rows == 64
    assert found.why_bounded == "64 rows run at once: 256 leave no memory for keys and values"
    named = subject("Llama-4-Scout", max_num_seqs=256, mesh="tp=8")
    (refused,) = (each for each in meshes_of(named, V6E_8, Lengths()) if each.mesh == "tp=8")
    assert "GiB too small" in refused.problem


def test_an_encoder_takes_data_shards():
    spec = encoder_spec_of(json.loads((GOLDENS / "encoders" / "bert" / "config.json").read_text()))
    choice = choose_mesh(Subject(spec=spec, config=EngineConfig()), V6E_8)
    assert choice.mesh == "dp=8,tp=1" and "texts/s" in choice.why


def test_a_problem_stands_once_behind_the_meshes_that_have_it_and_alone_where_all_do():
    alike = [MeshFit(mesh=mesh, problem=f"mesh is {mesh!r}: no") for mesh in ("tp=1", "tp=2")]
    other = MeshFit(mesh="tp=4", problem="2 GiB too small")
    assert by_problem(alike) == ["no"]
    assert by_problem([*alike, other, MeshFit(mesh="tp=8")]) == ["tp=1, tp=2: no", "tp=4: 2 GiB too small"]


@pytest.fixture
def described(monkeypatch, tmp_path):
    """A model's folder, and `--target` means V6E_8."""
    for module in ("ferrum_jax.runtime.compile.topology", "ferrum_jax.planning.offline.bundle_order"):
        monkeypatch.setattr(f"{module}.target_devices", lambda target: V6E_8)
    monkeypatch.setattr("ferrum_jax.cli.plan.without_device", lambda target: None)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA3_8B))
    return str(tmp_path)


def test_a_plan_without_a_mesh_has_the_best_and_says_what_limits_it(described, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", "--model", described, "--target=v6e-8"]) == 0
    printed = capsys.readouterr().out
    assert "mesh dp=4,tp=2 is taken of 8 devices" in printed and "Memory of one device of v6e-8, mesh dp=4" in printed
    assert "limited by " in printed and "…" not in printed, "no column is cut in 80 columns"
    assert main(["plan", "--model", described, "--target=v6e-8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mesh"] == "dp=4,tp=2" and found["forecast"]["limited_by"] in printed
    assert main(["plan", "--model", described, "--target=v6e-8", "--mesh=tp=8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mesh"] == "tp=8", "a named one is taken"


def test_a_refusal_that_all_meshes_share_is_printed_once(described, capsys):
    assert main(["plan", "--model", described, "--target=v6e-8", "--max-model-len=9000"]) == 2
    printed = "".join(capsys.readouterr())
    assert printed.count("max_model_len is 9000") == 1


def test_the_meshes_are_drawn(described, capsys, tmp_path, monkeypatch):
    path = tmp_path / "meshes.png"
    assert main(["plan", "--model", described, "--target=v6e-8", "--plot", str(path)]) == 0
    assert path.read_bytes()[:4] == b"\x89PNG"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["plan", "--model", described, "--target=v6e-8", "--plot", str(path)]) == 2
    assert "--plot needs matplotlib; pip install" in capsys.readouterr().err
