"""`ferrum-jax check`: every part runs without a chip, each fault is a line, and the page does not tell whose it is."""

import io
import itertools
import json
import re
import socket
from importlib.metadata import requires
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

import ferrum_jax
from ferrum_jax.__main__ import main
from ferrum_jax.cli.device_check import timing
from ferrum_jax.cli.device_check.engine_check import EngineOrder, check_engine, compare
from ferrum_jax.cli.device_check.estimates import beside_estimates, with_estimates
from ferrum_jax.cli.device_check.kernels import _shares
from ferrum_jax.cli.device_check.machine import Machine, look, misfits, why_no_chip
from ferrum_jax.cli.device_check.op_problems import OPS, problems
from ferrum_jax.cli.device_check.report import Report, page, scrubbed
from ferrum_jax.cli.device_check.run_check import CheckOptions, check_device, verdicts
from ferrum_jax.cli.device_check.timing import measure
from ferrum_jax.cli.device_check.tune import tuned
from ferrum_jax.core.outputs import Logprob, RequestOutput
from ferrum_jax.engine.startup.accelerators import Chips
from ferrum_jax.runtime.compile.verdicts import entry_of
from pallas_kernels.target import Target
from pallas_kernels.tolerance import difference
from tests.batch.fake_llm import output_of
from tests.rows import rows_beside
from tests.support import COMPILED, GOLDENS, ROOT

ROWS = rows_beside(__file__)

CPU = {"platform": "cpu", "kind": "cpu", "generation": None, "count": 1, "compiler": "cpu", "asked_for": None}
V6E = CPU | {
    "platform": "tpu",
    "kind": "TPU v6 lite",
    "generation": "v6e",
    "count": 8,
    "memory_bytes": 2**35,
    "memory_used_bytes": 0,
}
MACHINE = {"chips": [], "packages": {"jax": "0.10.2"}, "driver": None, "python": "3.11.1", "devices": V6E}
KERNEL = ROWS["kernel"] | {
    "num_bytes": 5 * 10**8,
    "flops": 2 * 10**9,
}


def report(**changes) -> Report:
    fields = {"machine": MACHINE, "rates": [], "kernels": [KERNEL], "engine": [], "problems": [], "notes": []}
    return Report(**(fields | {"seconds": 1.0} | changes))


@pytest.mark.slow
def test_the_whole_check_runs_without_a_chip_and_finds_all_right(tmp_path, capsys):
    assert main(["check", "--tune", "--output", str(tmp_path), "--compilation-cache-dir", str(COMPILED)]) == 0
    found = json.loads((tmp_path / "check.json").read_text())
    assert found["is_right"] and {line["op"] for line in found["kernels"]} == set(OPS)
    by = {(line["op"], line["implementation"]) for line in found["kernels"]}
    assert {("paged_attention", "mosaic_tpu"), ("kv_write", "mosaic_tpu"), ("gated_delta", "xla")} <= by
    assert ("state_space", "xla") in by
    assert all(line["error"] <= 1 for line in found["kernels"])
    assert [rate["what"] for rate in found["rates"]][:4] == [
        "copy",
        *(f"matmul in {d}" for d in ("bfloat16", "int8", "fp8")),
    ]
    assert [(line["run"], line["equal"], line["of"]) for line in found["engine"]] == [
        ("xla", 8, 8),
        ("xla, from the cache", 8, 8),
    ]
    both = (tmp_path / "check.html").read_text() + json.dumps(found)
    prompt = json.loads((ROOT / "scripts/demo_prompts.jsonl").read_text().splitlines()[0])["prompt"]
    assert not any(text in both for text in (str(tmp_path), str(ROOT), prompt.splitlines()[0][3:]))
    assert any("no tiles were tuned" in note for note in found["notes"])
    assert "all is right" in capsys.readouterr().out


FAULTS = ROWS["faults"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_kernel_with_a_fault_is_a_line_and_the_others_are_checked_all_the_same(fault):
    silence_s = 45.0 if fault == "hang" else 240.0
    found = check_device(parts=("paged_attention", "causal_conv"), fault=fault, silence_s=silence_s)
    lines = {(line["case"], line["implementation"]): line["problem"] for line in found.kernels}
    assert lines["decode_gqa", "xla"] is None and lines["mixed", "xla"] is None  # of causal_conv
    for case in ("decode_gqa", "mixed_int8_h64_window"):
        assert FAULTS[fault] in lines[case, "mosaic_tpu"] and "\n" not in lines[case, "mosaic_tpu"]
    assert fault != "off_head" or "head 0" in lines["decode_gqa", "mosaic_tpu"]
    assert not found.is_right


def test_a_device_that_another_process_holds_is_said_with_its_number():
    found = check_device(fault="taken")
    (problem,) = found.all_problems
    assert problem == "the devices cannot be opened: the chip is held by process 4242; end it, or wait for it"
    assert not found.kernels and "no device" in page(found)


def test_a_libtpu_that_is_too_old_is_named_with_what_to_install():
    (problem,) = look(fault="old_libtpu").problems
    assert problem.startswith("libtpu 0.0.1 does not fit jax ") and "pip install -U 'jax[tpu]'" in problem
    assert misfits({"jax": "0.10.2", "jaxlib": "0.10.2", "libtpu": fitting_libtpu()}) == []
    (other,) = misfits({"jaxlib": "0.10.2", "jax-cuda13-plugin": "0.10.1"})
    assert "jax-cuda13-plugin 0.10.1 does not fit jaxlib 0.10.2" in other


def fitting_libtpu() -> str:
    """A version that the jax that is here asks for, whichever jax that is."""
    (asked,) = (line for line in requires("jax") if line.startswith("libtpu"))
    return re.match(r"libtpu==([0-9.]+)\.\*", asked)[1] + ".1"


def machine(platform: str, **packages: str) -> Machine:
    chips = Chips(platform=platform, ids=("a:b",) if platform else ())
    return Machine(chips=chips, packages=packages, driver=None, python="3", problems=tuple(misfits(packages)))


@pytest.mark.parametrize(
    ("here", "devices", "says"),
    [
        (machine(""), CPU, None),
        (machine("tpu", libtpu=fitting_libtpu()), V6E, None),
        (machine("tpu"), CPU, "libtpu is not installed; install it: pip install tpu"),
        (machine("gpu"), CPU, "jax-cuda13-plugin or jax-cuda12-plugin is not installed; install it: pip install gpu"),
        (machine("tpu", libtpu=fitting_libtpu()), CPU | {"asked_for": "cpu"}, "because JAX_PLATFORMS=cpu asks for it"),
        (machine("tpu", libtpu="0.0.1"), CPU, "libtpu 0.0.1 does not fit"),
        (machine("tpu", libtpu=fitting_libtpu()), None, "process 17 holds the chip"),
    ],
)
def test_why_jax_sees_only_the_cpu_is_said_in_a_sentence(here, devices, says, tmp_path):
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp/libtpu_lockfile").write_text("17")
    (tmp_path / "proc/17").mkdir(parents=True)
    found = why_no_chip(here, devices, "install it: pip install {}", root=tmp_path)
    assert found is None if says is None else says in found


@pytest.mark.parametrize("op", OPS)
def test_xla_gives_what_the_oracle_of_each_op_gives(op):
    """What each op's problems are put together from fits; the kernels beside them are run by the slow tests."""
    problem = next(problems(op, None, "cpu", full=False))
    result = problem.real(problem.begin("xla")(), "xla")
    assert difference(problem.take(result), problem.oracle(), problem.tolerance, problem.axes).problem is None


def test_a_share_of_more_than_the_data_sheet_allows_is_a_problem():
    (problem,) = [
        p for p in problems("paged_attention", Target.named("tpu:v6e"), "tpu", full=False) if "c128" in p.name
    ][:1]
    rates = {"copy": 1.5e12, "sheet of copy": 1.64e12, "matmul in bfloat16": 8e14, "sheet of matmul in bfloat16": 9e14}
    honest = _shares(problem, 6e-4, rates)
    assert "problem" not in honest and 0.5 < honest["of_copy"] < 0.9
    assert "of the data sheet's memory rate cannot be" in _shares(problem, 1e-5, rates)["problem"]


def test_verdicts_are_of_shape_classes_and_their_speeds_of_real_sizes():
    entry = entry_of(KERNEL["op"], KERNEL["dtype"], KERNEL["shape"])
    tiny = KERNEL | {"case": "tiny", "num_bytes": None, "speed": 0.1}
    assert verdicts([KERNEL, tiny, KERNEL | {"implementation": "xla"}])[entry].speed == pytest.approx(2.0)
    wrong = verdicts([KERNEL, tiny | {"problem": "it differs"}])[entry]
    assert not wrong.is_right and wrong.problem == "it differs"


def test_a_product_is_as_fast_as_its_slowest_and_proven_by_all_of_its_class():
    few, many = KERNEL | {"op": "quantized_matmul", "speed": 3.0}, KERNEL | {"op": "quantized_matmul", "speed": 0.5}
    entry = entry_of("quantized_matmul", KERNEL["dtype"], KERNEL["shape"])
    assert verdicts([few, many])[entry].speed == pytest.approx(0.5)
    left_out = {"left_out": "many", "op": "quantized_matmul", "dtype": KERNEL["dtype"], "shape": KERNEL["shape"]}
    assert entry not in verdicts([few, left_out])
    hung = {name: few[name] for name in ("op", "case", "implementation", "dtype", "shape", "device_kind")}
    assert verdicts([few, hung | {"problem": "it does not end"}, left_out])[entry].problem == "it does not end"


def test_tiles_that_were_tuned_are_in_the_verdict_of_their_shape():
    entry = entry_of(KERNEL["op"], KERNEL["dtype"], KERNEL["shape"])
    own, other = {"tile_kv": 512, "items": 1}, {"tile_kv": 512, "items": 2}
    ends = {"entry": entry, "own": own, "best": other, "device_kind": "TPU v6 lite", "problem": None}
    assert tuned([{"tiles": "items=2,tile_kv=512", "median_s": 1e-4}, ends])[entry].tiles == other
    assert tuned([ends | {"best": own}])[entry].tiles is None
    line = {"tiles": "items=2,tile_kv=512", "shape": "decode", "median_s": 1e-4, "problem": None, "is_best": True}
    assert "right, the fastest" in page(report(tiles=[line]))


@pytest.mark.slow
def test_tiles_of_a_model_are_tuned_by_an_interpreted_kernel():
    found = check_device(parts=(), tune=True, rehearsal="tpu:v5e")
    assert not found.all_problems and len(found.tiles) >= 2
    assert all(line["problem"] is None and line["median_s"] > 0 for line in found.tiles)
    assert sum(line["is_best"] for line in found.tiles) == 1


def output(*tokens: int, second: float = -5.0) -> RequestOutput:
    near = {-1: Logprob(logprob=second, rank=2), 1: Logprob(logprob=second, rank=2)}
    logprobs = tuple({t: Logprob(logprob=-0.1, rank=1)} | {t + by: other for by, other in near.items()} for t in tokens)
    return output_of(tokens, logprobs)


def test_the_first_token_that_differs_is_told_from_a_tie():
    same = compare([output(5, 6)], [output(5, 6)], 0.1)
    assert same == {"equal": 1, "difference": None, "problem": None}
    tie = compare([output(5, 7, second=-0.15)], [output(5, 6, second=-0.15)], 0.1)
    assert tie["equal"] == 0 and tie["problem"] is None and tie["difference"]["tokens"] == [7, 6]
    wrong = compare([output(5, 7)], [output(5, 6)], 0.1)
    assert "prompt 0, token 1: 7 where 6 is expected, 4.9 apart" in wrong["problem"]


def test_a_page_escapes_all_and_tells_no_path_and_no_machine():
    problem = f"<b>{Path.home()}/x</b> on {socket.gethostname()}"
    found = page(report(problems=[problem]))
    assert "<b>" not in found.replace("</b>", "") and "&lt;b&gt;" in found
    assert str(Path.home()) + "/" not in found and "1 thing is wrong" in found
    assert scrubbed({"a": [str(ROOT), 1.5, None]}) == {"a": ["...", 1.5, None]}


@pytest.mark.parametrize(("text", "told"), ROWS["a report tells no path anywhere"])
def test_a_report_tells_no_path_anywhere(text, told):
    assert scrubbed(text) == (text if told is None else told)


def test_a_report_that_cannot_be_written_is_refused_before_the_check(tmp_path, capsys):
    (tmp_path / "check.html").mkdir()
    assert main(["check", "--output", str(tmp_path)]) == 2
    assert "check.html, where the report belongs, is a folder" in capsys.readouterr().err


def test_the_folder_of_a_report_is_made(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("ferrum_jax.cli.device_check.run_check.check_device", lambda options, update: report())
    assert main(["check", "--output", str(tmp_path / "new" / "folder")]) == 0
    assert json.loads((tmp_path / "new" / "folder" / "check.json").read_text())["is_right"]
    (tmp_path / "file").write_text("")
    assert main(["check", "--output", str(tmp_path / "file" / "folder")]) == 2
    assert "where the report belongs, cannot be made (Not a directory)" in capsys.readouterr().err


def test_a_narrow_table_names_errors_as_shares_of_the_tolerance():
    console = Console(width=80, record=True, file=io.StringIO())
    other = KERNEL | {"op": "kv_write", "case": "decode", "error": 0.0}
    report(kernels=[KERNEL, KERNEL | {"case": "second"}, other]).show(console)
    shown = [line.split() for line in console.export_text().splitlines()]
    above, head = next(lines for lines in itertools.pairwise(shown) if "case" in lines[1])
    assert (above[:1], head[:5]) == (["of"], ["op,", "case", "by", "result", "tol."])
    names = [line[0] for line in shown if line and line[0] in ("paged_attention", "kv_write", KERNEL["case"], "second")]
    assert names == ["paged_attention", KERNEL["case"], "second", "kv_write"]
    assert ["decode", "mosaic_tpu", "right", "0%"] in [line[:4] for line in shown]


@pytest.mark.slow
def test_the_check_of_an_engine_says_how_far_it_is():
    sent = []
    prompts = tuple((5 + i, 6, 7) for i in range(3))
    order = EngineOrder(model=str(GOLDENS / "qwen3"), prompts=prompts, full=False, compilation_cache_dir=str(COMPILED))
    check_engine(order, sent.append)
    so_far = [line["so_far"] for line in sent if "so_far" in line]
    assert so_far[-6:] == [f"{n} of 3 prompts{note}" for note in ("", ", from the cache") for n in (1, 2, 3)]
    assert any(line.startswith("executables ") for line in so_far[:-6])
    assert [line["equal"] for line in sent if "run" in line] == [3, 3]


@pytest.mark.parametrize(("mesh", "says"), [("banana", "mesh is 'banana'"), ("tp=2", "add --tune")])
def test_a_mesh_that_nothing_follows_is_refused(mesh, says):
    with pytest.raises(ValueError, match=says):
        CheckOptions(mesh=mesh)


def test_cycles_that_were_counted_stand_beside_times():
    (line,) = with_estimates([KERNEL], "v6e")
    assert 3e-4 < line["predicted_s"] < 4e-4  # 537 MB at 1.64 TB/s
    assert with_estimates([KERNEL], None) == [KERNEL] == with_estimates([KERNEL], "h200")


def timed(case: str, times: float, **fields) -> dict:
    """A line of a TPU that takes so many times what was counted."""
    (line,) = with_estimates([KERNEL | {"case": case} | fields], "v6e")
    return line | {"median_s": times * line["predicted_s"]}


def test_a_report_says_which_estimates_were_wrong_and_by_how_much():
    product = {"op": "quantized_matmul"}
    lines = [timed("llama_8b_decode_c16", 1.1), timed("oss_decode", 2), timed("w8a16_64_rows", 0.5, **product)]
    (total, *rows) = beside_estimates(lines)
    assert total[-1] == "1 of 3 estimates right within a quarter; oss_decode is the furthest, 2.00 times"
    assert [(row[0], row[3], row[4].partition(",")[0]) for row in rows] == [
        ("oss_decode", "2.00", "wrong: it takes 2.00 times as long as was counted"),
        ("w8a16_64_rows", "0.50", "wrong: it takes 0.50 of what was counted"),
        ("llama_8b_decode_c16", "1.10", "right"),
    ]
    shown = page(report(kernels=lines))
    assert "<td>wrong: it takes 2.00 times as long as was counted" in shown and "Estimates" in shown
    assert beside_estimates([KERNEL]) == []


def test_a_product_is_estimated_by_the_share_of_its_outputs():
    """4,096 of the 14,336 outputs that were counted; at 1.64 TB/s their 16.8 MB take 10.2 us, and XLA has its part."""
    assert 10.2e-6 < timed("w8a16_64_rows", 1.0, op="quantized_matmul")["predicted_s"] < 12e-6


H200 = CPU | {"platform": "gpu", "kind": "NVIDIA H200", "generation": "h200", "memory_bytes": None}


def on_h200(case: str, seconds: float) -> dict:
    (line,) = with_estimates([KERNEL | {"case": case, "implementation": "mosaic_gpu", "median_s": seconds}], "h200")
    return line


def test_a_kernel_on_hopper_stands_beside_its_ceiling():
    line = on_h200("llama_8b_decode_c16", 1.4e-4)
    assert line["ceiling_unit"] == "hbm" and line["ceiling_s"] == pytest.approx(536870912 / 4.795e12, rel=1e-3)
    assert line["of_ceiling"] == pytest.approx(0.8, abs=0.01)
    shown = page(report(machine=MACHINE | {"devices": H200}, kernels=[line, on_h200("oss_decode", 4e-6)]))
    assert "<td>112 us hbm</td><td>80%</td>" in shown and "2 of 2 held; llama_8b_decode_c16 reached 80%" in shown
    assert "the ruler is wrong" not in shown
    assert "of_ceiling" not in with_estimates([KERNEL | {"implementation": "mosaic_gpu"}], "a100")[0]


def test_a_ceiling_that_is_beaten_is_a_wrong_ruler_and_no_wrong_kernel():
    found = report(machine=MACHINE | {"devices": H200}, kernels=[on_h200("llama_8b_decode_c16", 0.7e-4)])
    assert found.is_right
    assert "<td>1.60 times as fast as its ceiling allows: the ruler is wrong" in page(found)


def test_memory_bounds_no_launch_that_a_cache_may_hold():
    assert on_h200("llama_8b_decode_c16", 1e-3)["ceiling_unit"] == "hbm"
    assert on_h200("qwen3_30b_tp4_decode_c16", 1e-3)["ceiling_unit"] == "shared"


def test_benches_stand_in_the_page_with_those_of_vllm_and_those_that_were_cut():
    ours = {"shape": "qwen3-0.6b", "workload": "decode", "output_tok_s": 3000.0, "total_tok_s": 6000.0}
    theirs = ours | {"output_tok_s": 2000.0, "vllm": "0.15"}
    cut = {"shape": "llama-3-8b", "problem": "cut after 75 s"}
    found = Report.of_json(report(benches=[ours, theirs, cut]).as_json())
    assert found.as_json() == report(benches=[ours, theirs, cut]).as_json()
    rows = re.findall(r"<tr>(.*?)</tr>", page(found).partition("Benches")[2])
    head, *cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]
    assert [dict(zip(head, each, strict=True))["times vllm"] for each in cells] == ["1.50", "", ""]
    assert [each[-1] for each in cells] == ["right", "right", "cut after 75 s"] and cells[1][2] == "vllm 0.15"


def test_parts_that_find_no_time_are_named():
    found = check_device(seconds=1e-9, parts=("causal_conv", "engine"))
    assert not found.kernels and not found.engine and found.is_right
    assert [note.partition(" left")[0] for note in found.notes] == ["causal_conv", "engine"]


@pytest.mark.parametrize(
    ("options", "says"),
    [({"parts": ("attention",)}, r"parts has \['attention'\]; there are paged_attention"), ({"seconds": 0}, "than 0")],
)
def test_parts_and_seconds_that_mean_nothing_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        CheckOptions(**options)


def test_a_slow_call_is_timed_a_few_times(monkeypatch):
    calls = []
    clock = SimpleNamespace(perf_counter=lambda: len(calls) / 16)  # of the calls alone, however busy this machine is
    monkeypatch.setattr(timing, "time", clock)
    measure(lambda: calls.append(0))
    assert len(calls) == 2 + 16


def test_tables_say_what_is_wrong_in_eighty_columns():
    shown = io.StringIO()
    wrong = KERNEL | {"implementation": "mosaic_tpu", "problem": "0.5 where 0.1 is right (at token 3, head 0)"}
    report(kernels=[KERNEL, wrong]).show(Console(file=shown, width=80, markup=False))
    said = shown.getvalue()
    assert "wrong: paged_attention, llama_8b_decode_c16, mosaic_tpu: 0.5 where 0.1 is right" in " ".join(said.split())
    assert "1 things are wrong" not in said and "llama_8b_decode_c16" in said and max(map(len, said.splitlines())) <= 80


def test_a_difference_names_where_it_is_largest():
    tolerance = {"rtol": 0.01, "atol": 0.01}
    assert difference([1.0, 2.0], [1.0, 2.001], tolerance).problem is None
    assert "(at row 1" in difference([1.0, 3.0], [1.0, 2.0], tolerance, ("row",)).problem
    assert difference([float("nan")], [1.0], tolerance).error == float("inf")
    assert difference([1.0], [1.0], {"rtol": 0.0, "atol": 0.0}).error == 0


def test_the_check_is_a_function_of_the_package():
    assert ferrum_jax.check_device is check_device
