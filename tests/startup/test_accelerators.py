"""A machine without a chip is told apart from one that may have one, and commands say so in one sentence."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ferrum_jax import __main__ as cli
from ferrum_jax.engine.startup import accelerators
from ferrum_jax.engine.startup.accelerators import idle_packages
from tests.rows import rows_beside
from tests.support import ROOT

NETWORK = {"sys/bus/pci/devices/0/vendor": "0x1ae0\n", "sys/bus/pci/devices/0/class": "0x020000\n"}
DISPLAY = {"sys/bus/pci/devices/1/vendor": "0x1234\n", "sys/bus/pci/devices/1/class": "0x030000\n"}


def host(root: Path, *files: dict[str, str]) -> Path:
    for name, text in {
        k: v for part in ({"dev/null": "", "dev/vfio/vfio": ""}, *files) for k, v in part.items()
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def installed(monkeypatch):
    """Both packages are there."""
    monkeypatch.setattr(accelerators, "_is_installed", lambda name: name in ("libtpu", "jax-cuda13-plugin"))
    monkeypatch.setattr(accelerators, "_has_other_plugins", lambda: False)


def test_packages_are_idle_where_no_chip_can_be_seen(tmp_path, installed):
    assert idle_packages(host(tmp_path, NETWORK, DISPLAY)) == ["libtpu", "jax-cuda13-plugin"]
    assert idle_packages(tmp_path / "nothing") == ["libtpu", "jax-cuda13-plugin"]


@pytest.mark.parametrize("chip", rows_beside(__file__)["wherever there may be a chip jax is left alone"])
def test_wherever_there_may_be_a_chip_jax_is_left_alone(tmp_path, installed, chip):
    assert idle_packages(host(tmp_path, NETWORK, DISPLAY, chip)) == []


def test_plugins_of_other_makers_and_machines_without_packages_are_left_alone(tmp_path, installed, monkeypatch):
    monkeypatch.setattr(accelerators, "_has_other_plugins", lambda: True)
    assert idle_packages(host(tmp_path)) == []
    monkeypatch.undo()
    monkeypatch.setattr(accelerators, "_is_installed", lambda name: False)
    assert idle_packages(host(tmp_path)) == []


PROGRAM = """
import sys
from ferrum_jax import __main__ as cli
from ferrum_jax.engine.startup import accelerators
accelerators._may_have_chip = lambda root: False
code = cli.main(sys.argv[1:])
import jax
print(code, jax.devices()[0].platform)
"""


@pytest.mark.parametrize("runs", [True, False])
def test_a_command_without_a_chip_says_one_sentence_in_place_of_tracebacks(tmp_path, runs):
    """With a package that fails as jax's CUDA plugin does where there is no GPU."""
    plugin, about = tmp_path / "jax_plugins/xla_cuda13", tmp_path / "jax_cuda13_plugin-0.0.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text(
        "import os\ndef initialize():\n    assert os.environ.get('JAX_PLATFORMS') == 'cpu', 'no GPU'\n"
    )
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: jax-cuda13-plugin\nVersion: 0.0\n")
    commands = ["generate", "--model", "nowhere", "x"] if runs else ["cache", "simulate", "--request-log", "nowhere"]
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *commands],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": f"{ROOT}:{tmp_path}"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "2 cpu\n" and "Traceback" not in done.stderr, done.stderr
    said = [line for line in done.stderr.splitlines() if "jax-cuda13-plugin" in line]
    assert len(said) == runs and all(
        "no GPU or TPU was found: this runs on the CPU (JAX_PLATFORMS=cpu" in s for s in said
    )


def test_a_user_s_own_choice_of_platform_stands(monkeypatch, capsys):
    monkeypatch.setattr(cli, "idle_packages", lambda: ["libtpu"])
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    cli.main(["cache", "simulate", "--request-log", "nowhere"])
    assert os.environ["JAX_PLATFORMS"] == "tpu" and "libtpu" not in capsys.readouterr().err
