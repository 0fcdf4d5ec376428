"""Names that the version before showed are taken with a warning that says the new one."""

import importlib
import re
from typing import Any

import pytest

from ferrum_jax.__main__ import main
from ferrum_jax.batch.journal.keeper import JobOptions
from ferrum_jax.io.old_names import COMMANDS, FIELDS, MODULES


@pytest.mark.parametrize(("old", "new"), MODULES.items())
def test_an_old_module_holds_what_the_new_one_holds(old, new):
    with pytest.warns(FutureWarning, match=re.escape(f"ferrum_jax.{old} is ferrum_jax.{new} now")) as warned:
        found = vars(importlib.import_module(f"ferrum_jax.{old}"))
    expected = vars(importlib.import_module(f"ferrum_jax.{new}"))
    assert warned[0].filename == importlib.__file__, "the importer's line is shown"
    assert all(found[name] is value for name, value in expected.items() if not name.startswith("__"))


@pytest.mark.parametrize(("old", "new"), FIELDS.items())
def test_an_old_field_sets_the_new_one(old, new):
    given: dict[str, Any] = {old.split(".")[1]: print}
    with pytest.warns(FutureWarning, match=f"{re.escape(old)} is {new} now") as warned:
        assert getattr(JobOptions(**given), new) is print
    assert warned[0].filename == __file__


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_is_gone_says_what_to_take(name, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*name.split(), "--url", "http://here"])
    assert COMMANDS[name] in capsys.readouterr().err
