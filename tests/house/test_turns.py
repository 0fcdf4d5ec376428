"""Which slow tests .ci/run runs: every sixth in its turn, and those that the last changes touch."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.marks import few
from tests.rows import rows_beside
from tests.support import ROOT
from tests.turns import touched
from tests.turns.history import history
from tests.turns.sixths import sixths, unit_of
from tests.turns.touched import ALL_S, FOLDER_S, seconds_of, turn

GOLDENS = [f"tests/models/test_goldens.py::test_{what}[{name}]" for name in ("llama", "qwen3") for what in "ab"]
MANY = [f"tests/engine/test_many.py::test[{n}]" for n in range(200)]
IDS = [
    *GOLDENS,
    *MANY,
    "tests/scheduler/test_machine.py::test",
    "tests/serve/test_http.py::test",
    "tests/pallas_kernels/test_kv_write_tpu.py::test",
    "tests/pallas_kernels/test_low_rank.py::test",
    "tests/house/test_readme.py::test",
]
IMPORTS = {
    "tests/engine/test_many.py": {"ferrum_jax", "ferrum_jax.config"},
    "tests/serve/test_http.py": {"ferrum_jax.core.scheduler.plan"},
}


def files_of(units) -> set[str]:
    return {file for file, _ in units}


def others(changed: list[str], sixth: int = 0):
    """What runs only because of a change."""
    return turn(sixth, IDS, changed, IMPORTS)


def test_every_test_is_in_one_sixth_and_each_sixth_has_as_many_of_a_file():
    of_unit = sixths(IDS)
    assert set(of_unit) == {unit_of(node_id) for node_id in IDS}
    sizes = Counter(of_unit[unit_of(node_id)] for node_id in MANY)
    assert sorted(sizes) == [0, 1, 2, 3, 4, 5] and max(sizes.values()) - min(sizes.values()) <= 1
    assert sixths(reversed(IDS)) == of_unit
    seen = [turn(sixth, IDS, (), {}).kept for sixth in range(6)]
    assert sum(map(len, seen)) == len(of_unit) and set().union(*seen) == set(of_unit)


def test_tests_of_one_golden_in_a_file_are_one_unit():
    assert len({unit_of(node_id) for node_id in GOLDENS}) == 2
    assert unit_of("tests/a.py::test[5-quantised/w8a8-x]") != unit_of("tests/a.py::test[6-quantised/w8a8-x]")
    assert unit_of("tests/a.py::test[5-qwen3]") == unit_of("tests/a.py::test_other[qwen3-6]")


@pytest.mark.parametrize(("changed", "files"), rows_beside(__file__)["changes and the tests that they run"])
def test_a_change_runs_its_own_tests_those_of_its_name_and_those_that_import_it(changed, files):
    found = [turn(sixth, IDS, [changed], IMPORTS) for sixth in range(6)]
    files = set(files)
    assert files <= set().union(*(files_of(each.touched) for each in found))
    assert all(files <= files_of(each.kept) for each in found)
    assert not any(each.everybodys for each in found)
    if changed.startswith("tests/goldens/"):
        assert {unit for each in found for unit in each.touched} == {("tests/models/test_goldens.py", "llama")}


def test_tests_named_as_the_file_come_before_others_of_its_folder():
    kernels = [f"tests/pallas_kernels/test_{name}.py::test[{n}]" for name in ("aaa", "kv_write") for n in range(60)]
    found = turn(0, kernels, ["pallas_kernels/kv_write/tpu.py"], {})
    assert files_of(found.touched) == {"tests/pallas_kernels/test_kv_write.py"}


def test_a_change_of_what_all_import_is_left_to_the_sixths_and_said():
    for path in ("ferrum_jax/config.py", "ferrum_jax/__init__.py", "constraints.txt"):
        found = others([path])
        assert found.everybodys == [path] and not found.touched and not found.left_out


def test_what_changes_touch_has_a_limit_and_the_rest_is_said():
    found = others(["tests/engine/test_many.py"])
    assert 0 < sum(map(seconds_of, found.touched)) <= min(FOLDER_S, ALL_S)
    assert len(found.left_out) + sum(unit in found.kept for unit in sixths(MANY)) == len(MANY)
    of_unit = sixths(IDS)
    seen = [turn(sixth, IDS, ["tests/engine/test_many.py"], IMPORTS).kept for sixth in range(3)]
    assert len({of_unit[unit] for unit in set().union(*seen)}) == 6  # three turns see some of each


def test_a_sixth_has_a_limit_and_what_is_late_comes_in_a_later_lap(monkeypatch):
    monkeypatch.setattr(touched, "seconds_of", lambda unit: 50.0)
    laps = [turn(0, MANY, (), {}, lap) for lap in range(9)]
    own = {unit for unit, its in sixths(MANY).items() if its == 0}
    assert all(len(each.kept) == 13 and each.kept | {*each.late} == own for each in laps)
    assert set().union(*(each.kept for each in laps)) == own


def test_a_unit_that_takes_longer_than_a_folder_has_runs_first_of_its_folder(monkeypatch):
    monkeypatch.setattr(touched, "seconds_of", lambda unit: 2.0 * FOLDER_S)
    kept = {sixth: turn(sixth, MANY, ["tests/engine/test_many.py"], {}).touched for sixth in range(6)}
    assert {len(units) for units in kept.values()} == {1}


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.example")
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path) -> Path:
    """Three commits, and each adds a file of tests."""
    folder = tmp_path / "checkout"
    (folder / "tests").mkdir(parents=True)
    git(folder, "init", "-q")
    plugins = 'pytest_plugins = ("tests.histories", "tests.turns.plugin")\n'
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = slow\n aot\naddopts = -q --import-mode=importlib\n")
    (folder / "conftest.py").write_text(plugins)
    for name in ("a", "b", "c"):
        marker = "@pytest.mark.slow\n@pytest.mark.parametrize('i', range(12))\n"
        test = f"def test(i):\n    assert '{name}' != 'c' or i\n"
        (folder / f"tests/test_{name}.py").write_text(f"import pytest\n{marker}{test}")
        git(folder, "add", "-A")
        git(folder, "commit", "-q", "-m", name)
    return folder


def test_history_counts_commits_and_names_what_changed_since_a_tag(checkout):
    found = history(checkout)
    assert found.sixth == 3 and sorted(found.changed) == ["tests/test_b.py", "tests/test_c.py"]
    git(checkout, "tag", "v1", "HEAD~1")
    assert history(checkout).changed == ["tests/test_c.py"]
    assert history(checkout).said == "sixth 3 at commit 3; 1 files changed since v1"


def test_a_checkout_without_history_takes_the_first_sixth_and_says_so(checkout, tmp_path):
    git(tmp_path, "clone", "--depth", "1", f"file://{checkout}", "shallow")
    (tmp_path / "plain").mkdir()
    for folder in ("shallow", "plain"):
        found = history(tmp_path / folder)
        assert (found.sixth, found.changed) == (0, []) and "has no history" in found.said


def run(checkout: Path, *arguments: object) -> subprocess.CompletedProcess:
    """pytest in the checkout, in none of this one's processes."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", *map(str, arguments)]
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("num_processes", few([2, 0]))
def test_a_run_prints_what_it_selects_and_how_a_failure_runs_alone(checkout, num_processes):
    git(checkout, "tag", "v1", "HEAD~1")
    done = run(checkout, "-n", num_processes, "-m", "slow", "--sixth", "auto", "--seed", 7)
    assert "1 failed, 15 passed" in done.stdout, done.stdout + done.stderr
    assert (
        done.stderr.count("runs sixth 3: 16 of 36 tests\nand 10 of tests/test_c.py because of tests/test_c.py\n") == 1
    )
    assert "scripts/test -m \"\" --seed 7 'tests/test_c.py::test[0]'" in done.stdout
    assert done.stdout.count("histories from --seed 7") >= 2


@pytest.mark.parametrize("num_processes", few([2, 0]))
def test_no_test_begins_after_the_time_of_until_and_the_summary_counts_them(checkout, num_processes):
    done = run(checkout, "-n", num_processes, "--until", 1, "tests/test_a.py")
    assert "12 skipped" in done.stdout and "\n12 of tests/test_a.py\n" in done.stdout, done.stdout + done.stderr


def test_a_path_that_is_not_there_is_named_by_several_processes_too(checkout):
    done = run(checkout, "-n", 2, "tests/test_a.py", "tests/nope.py::test")
    assert done.returncode == 4 and "ERROR: file or directory not found: tests/nope.py::test\n" in done.stderr
