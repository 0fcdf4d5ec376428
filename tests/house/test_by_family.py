"""A test whose process dies fails, and the others run to their end."""

import os
import subprocess
import sys

from tests.support import ROOT

CONFTEST = """
from tests.by_family import ByFamily

def pytest_xdist_make_scheduler(config, log):
    return ByFamily(config, log)
"""
TESTS = """
import os
import pytest

@pytest.mark.parametrize("i", range(20))
def test(i):
    if i in (5, 19):
        os._exit(75)
"""


def test_a_process_that_dies_costs_the_test_that_it_ran_alone(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "2 failed, 18 passed" in done.stdout, done.stdout
    for i in (5, 19):
        assert f"crashed while running 'test_it.py::test[{i}]'" in done.stdout
