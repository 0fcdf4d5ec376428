"""Names that the version before showed are taken with a warning that says the new one."""

import importlib
import subprocess
import sys

import pytest

from ferrum_jax.__main__ import main
from ferrum_jax.batch.journal.keeper import JobOptions
from ferrum_jax.io.old_names import COMMANDS, FIELDS, MODULES
from tests.support import ROOT


def test_old_modules_hold_what_the_new_ones_hold():
    lines = [f"from ferrum_jax.{name} import *; import ferrum_jax.{name}" for name in MODULES]
    named = [sys.executable, "-W", "always", "-c", "\n".join(lines)]
    said = subprocess.run(named, capture_output=True, text=True, cwd=ROOT).stderr
    for name, new in MODULES.items():
        assert f"ferrum_jax.{name} is ferrum_jax.{new} now" in said
    with pytest.warns(FutureWarning, match=r"ferrum_jax\.outputs is ferrum_jax\.core\.outputs now") as warned:
        old = importlib.import_module("ferrum_jax.outputs")
    assert warned[0].filename == importlib.__file__ and "RequestOutput" in vars(old)
    assert old.RequestOutput is importlib.import_module("ferrum_jax.core.outputs").RequestOutput
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("ferrum_jax.another")


def test_old_fields_set_the_new_ones():
    assert FIELDS == {"JobOptions.on_pace": "on_throughput"}
    with pytest.warns(FutureWarning, match=r"JobOptions\.on_pace is on_throughput now") as warned:
        assert JobOptions(on_pace=print).on_throughput is print
    assert warned[0].filename == __file__


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_is_gone_says_what_to_take(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*name.split(), "--url", "http://here"])
    assert ended.value.code == 2 and COMMANDS[name] in capsys.readouterr().err
