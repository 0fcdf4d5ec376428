"""Imports go downward only, as docs/architecture.md draws it, and light parts bring no heavy library.

A room is a folder. In the root of ferrum_jax the nouns are one room together, a folder of them too, and each other
file is one of its own.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import pathlib
import re
import subprocess
import sys

import pytest

from ferrum_jax.executables.environment import TRACED
from tests.support import ROOT

PACKAGES = ("ferrum_jax", "pallas_kernels", "checkpoints")
NOUNS = (
    "asked",
    "config",
    "delta",
    "ints",
    "metrics",
    "outputs",
    "paths",
    "plan",
    "prompt",
    "request",
    "setting",
    "sizes",
    "spec",
)
FILES = ("checkpoints.rules",)  # a room below its folder: what models say of their weights, and checkpoints read
HEAVY = (
    "ray",
    "pyarrow",
    "fsspec",
    "matplotlib",
    "PIL",
    "av",
    "soundfile",
    "soxr",
    "llguidance",
    "jax",
    "flax",
    "orbax",
    "tensorstore",
    "safetensors",
    "huggingface_hub",
    "tokenizers",
    "jinja2",
    "rich",
)
SHOWS = ("ferrum_jax.batch.job", "ferrum_jax.offline.simulate_cache")  # what they write on the terminal is rich's

# The rooms that modules of a room import, all of them and no others; "nouns" stands for those of the root.
MAY_IMPORT = {
    "checkpoints.names": (),
    "checkpoints.rules": ("checkpoints.names",),
    "nouns": ("ferrum_jax.quoting",),
    "pallas_kernels": (),
    "checkpoints.formats": (
        "checkpoints.names",
        "ferrum_jax.quoting",
        "nouns",
    ),
    "checkpoints.adapters": (
        "checkpoints.names",
        "checkpoints.rules",
        "ferrum_jax.quoting",
    ),
    "checkpoints": (
        "checkpoints.adapters",
        "checkpoints.formats",
        "checkpoints.names",
        "checkpoints.rules",
        "ferrum_jax.files",
        "nouns",
    ),
    "ferrum_jax.openai": (
        "ferrum_jax.quoting",
        "nouns",
    ),
    "ferrum_jax.batch.input": (
        "ferrum_jax.openai",
        "ferrum_jax.processes",
        "ferrum_jax.quoting",
        "nouns",
    ),
    "ferrum_jax.quoting": (),
    "ferrum_jax.confined": (),
    "ferrum_jax.pages": (),
    "ferrum_jax.files": ("nouns",),
    "ferrum_jax.media": ("nouns",),
    "ferrum_jax.prefix_cache": ("nouns",),
    "ferrum_jax.processes": ("ferrum_jax.sound", "ferrum_jax.vision", "nouns"),
    "ferrum_jax.progress": ("nouns",),
    "ferrum_jax.sampling": ("nouns",),
    "ferrum_jax.sharding": ("checkpoints.rules", "nouns"),
    "ferrum_jax.speculation": ("nouns",),
    "ferrum_jax.text": (
        "ferrum_jax.files",
        "ferrum_jax.sound",
        "ferrum_jax.vision",
        "nouns",
    ),
    "ferrum_jax.vision": (
        "ferrum_jax.confined",
        "ferrum_jax.files",
        "ferrum_jax.media",
        "ferrum_jax.quoting",
        "nouns",
    ),
    "ferrum_jax.sound": (
        "ferrum_jax.confined",
        "ferrum_jax.files",
        "ferrum_jax.media",
        "ferrum_jax.quoting",
        "nouns",
    ),
    "ferrum_jax.transcribing": (
        "ferrum_jax.files",
        "ferrum_jax.quoting",
        "ferrum_jax.sound",
        "ferrum_jax.text",
        "nouns",
    ),
    "ferrum_jax.structured.forms": (),
    "ferrum_jax.structured.reading": ("ferrum_jax.structured.forms", "nouns"),
    "ferrum_jax.structured": (
        "ferrum_jax.confined",
        "ferrum_jax.processes",
        "ferrum_jax.quoting",
        "ferrum_jax.structured.forms",
        "ferrum_jax.text",
        "nouns",
    ),
    "pallas_kernels.causal_conv": ("pallas_kernels",),
    "pallas_kernels.low_rank": ("pallas_kernels",),
    "pallas_kernels.quantized_matmul.tpu": ("pallas_kernels",),
    "pallas_kernels.quantized_matmul.gpu": ("pallas_kernels",),
    "pallas_kernels.quantized_matmul": (
        "pallas_kernels",
        "pallas_kernels.quantized_matmul.gpu",
        "pallas_kernels.quantized_matmul.tpu",
    ),
    "pallas_kernels.grouped_matmul": (
        "pallas_kernels",
        "pallas_kernels.low_rank",
        "pallas_kernels.quantized_matmul",
        "pallas_kernels.quantized_matmul.gpu",
        "pallas_kernels.quantized_matmul.tpu",
    ),
    "pallas_kernels.kv_write": ("pallas_kernels",),
    "pallas_kernels.paged_attention.tpu.prefill": ("pallas_kernels",),
    "ferrum_jax.batch.ending": ("ferrum_jax.progress",),
    "ferrum_jax.batch.journal": (
        "ferrum_jax.batch.ending",
        "ferrum_jax.batch.input",
        "ferrum_jax.files",
        "ferrum_jax.openai",
        "ferrum_jax.transcribing",
        "nouns",
    ),
    "ferrum_jax.batch.report": (
        "ferrum_jax.pages",
        "ferrum_jax.progress",
        "nouns",
    ),
    "ferrum_jax.adapters": (
        "checkpoints",
        "checkpoints.adapters",
        "ferrum_jax.sharding",
        "nouns",
        "pallas_kernels.low_rank",
    ),
    "ferrum_jax.pools": ("ferrum_jax.sharding", "nouns", "pallas_kernels"),
    "ferrum_jax.engine.of_tokens": ("ferrum_jax.sampling", "nouns"),
    "ferrum_jax.scheduling": ("ferrum_jax.prefix_cache", "ferrum_jax.speculation", "nouns"),
    "pallas_kernels.row_recurrence": ("pallas_kernels",),
    "pallas_kernels.gated_delta": ("pallas_kernels", "pallas_kernels.row_recurrence"),
    "pallas_kernels.state_space": ("pallas_kernels", "pallas_kernels.row_recurrence"),
    "pallas_kernels.paged_attention.gpu": ("pallas_kernels", "pallas_kernels.kv_write"),
    "pallas_kernels.paged_attention.gpu.latent": (
        "pallas_kernels",
        "pallas_kernels.kv_write",
        "pallas_kernels.paged_attention.gpu",
    ),
    "pallas_kernels.paged_attention.tpu.decode": ("pallas_kernels", "pallas_kernels.paged_attention.tpu.prefill"),
    "pallas_kernels.paged_attention.tpu.latent": (
        "pallas_kernels",
        "pallas_kernels.kv_write",
        "pallas_kernels.paged_attention.tpu.decode",
        "pallas_kernels.paged_attention.tpu.prefill",
    ),
    "ferrum_jax.batch": (
        "checkpoints",
        "ferrum_jax.batch.ending",
        "ferrum_jax.batch.input",
        "ferrum_jax.batch.journal",
        "ferrum_jax.batch.report",
        "ferrum_jax.files",
        "ferrum_jax.scheduling",
        "ferrum_jax.transcribing",
        "nouns",
    ),
    "ferrum_jax.batch.verify": (
        "ferrum_jax.batch",
        "ferrum_jax.batch.input",
        "ferrum_jax.batch.journal",
        "ferrum_jax.files",
        "ferrum_jax.progress",
        "ferrum_jax.quoting",
        "ferrum_jax.sampling",
        "nouns",
    ),
    "ferrum_jax.layers": (
        "ferrum_jax.sharding",
        "nouns",
        "pallas_kernels",
        "pallas_kernels.grouped_matmul",
        "pallas_kernels.low_rank",
        "pallas_kernels.quantized_matmul",
    ),
    "ferrum_jax.layers.recurrent": (
        "ferrum_jax.layers",
        "ferrum_jax.sharding",
        "nouns",
        "pallas_kernels",
        "pallas_kernels.causal_conv",
        "pallas_kernels.gated_delta",
        "pallas_kernels.state_space",
    ),
    "pallas_kernels.indexer": (
        "pallas_kernels",
        "pallas_kernels.indexer.tpu",
        "pallas_kernels.paged_attention",
        "pallas_kernels.paged_attention.tpu.latent",
    ),
    "pallas_kernels.indexer.tpu": (
        "pallas_kernels",
        "pallas_kernels.paged_attention.tpu.decode",
        "pallas_kernels.paged_attention.tpu.latent",
    ),
    "pallas_kernels.paged_attention.tpu": (
        "pallas_kernels",
        "pallas_kernels.kv_write",
        "pallas_kernels.paged_attention.tpu.decode",
        "pallas_kernels.paged_attention.tpu.prefill",
    ),
    "ferrum_jax.models": (
        "checkpoints.formats",
        "checkpoints.rules",
        "ferrum_jax.layers",
        "ferrum_jax.layers.recurrent",
        "ferrum_jax.sharding",
        "nouns",
    ),
    "pallas_kernels.paged_attention": (
        "pallas_kernels",
        "pallas_kernels.kv_write",
        "pallas_kernels.paged_attention.gpu",
        "pallas_kernels.paged_attention.gpu.latent",
        "pallas_kernels.paged_attention.tpu",
        "pallas_kernels.paged_attention.tpu.latent",
        "pallas_kernels.paged_attention.tpu.prefill",
    ),
    "ferrum_jax.towers": (
        "ferrum_jax.layers",
        "ferrum_jax.models",
        "ferrum_jax.pools",
        "ferrum_jax.sharding",
        "nouns",
        "pallas_kernels",
        "pallas_kernels.kv_write",
    ),
    "ferrum_jax.executables": (
        "checkpoints",
        "ferrum_jax.files",
        "ferrum_jax.models",
        "nouns",
    ),
    "ferrum_jax.runtime.placing": (
        "checkpoints",
        "ferrum_jax.executables",
        "ferrum_jax.pools",
        "ferrum_jax.processes",
        "ferrum_jax.runtime",
        "ferrum_jax.sharding",
        "nouns",
        "pallas_kernels",
        "pallas_kernels.paged_attention",
    ),
    "ferrum_jax.runtime": (
        "ferrum_jax.adapters",
        "ferrum_jax.executables",
        "ferrum_jax.layers",
        "ferrum_jax.models",
        "ferrum_jax.pools",
        "ferrum_jax.processes",
        "ferrum_jax.sampling",
        "ferrum_jax.sharding",
        "ferrum_jax.towers",
        "nouns",
        "pallas_kernels",
        "pallas_kernels.indexer",
        "pallas_kernels.low_rank",
        "pallas_kernels.paged_attention",
        "pallas_kernels.row_recurrence",
    ),
    "ferrum_jax.embeddings": (
        "checkpoints",
        "ferrum_jax.executables",
        "ferrum_jax.layers",
        "ferrum_jax.models",
        "ferrum_jax.pools",
        "ferrum_jax.runtime",
        "ferrum_jax.runtime.placing",
        "ferrum_jax.sharding",
        "ferrum_jax.text",
        "ferrum_jax.transcribing",
        "nouns",
    ),
    "ferrum_jax.answers": (
        "ferrum_jax.structured.reading",
        "ferrum_jax.text",
        "nouns",
    ),
    "ferrum_jax.engine.calls": ("ferrum_jax.quoting", "ferrum_jax.text", "nouns"),
    "ferrum_jax.engine": (
        "checkpoints",
        "ferrum_jax.adapters",
        "ferrum_jax.answers",
        "ferrum_jax.engine.of_tokens",
        "ferrum_jax.executables",
        "ferrum_jax.pools",
        "ferrum_jax.prefix_cache",
        "ferrum_jax.processes",
        "ferrum_jax.runtime",
        "ferrum_jax.sampling",
        "ferrum_jax.scheduling",
        "ferrum_jax.structured",
        "ferrum_jax.structured.reading",
        "ferrum_jax.text",
        "nouns",
    ),
    "ferrum_jax.engine.prefixes": (
        "checkpoints",
        "ferrum_jax.engine",
        "ferrum_jax.engine.of_tokens",
        "ferrum_jax.prefix_cache",
        "ferrum_jax.processes",
        "ferrum_jax.runtime",
        "ferrum_jax.text",
        "nouns",
    ),
    "ferrum_jax.meshes": (
        "ferrum_jax.embeddings",
        "ferrum_jax.executables",
        "ferrum_jax.models",
        "ferrum_jax.pools",
        "ferrum_jax.runtime",
        "ferrum_jax.runtime.placing",
        "ferrum_jax.sharding",
        "nouns",
        "pallas_kernels",
    ),
    "ferrum_jax.offline": (
        "checkpoints",
        "ferrum_jax.executables",
        "ferrum_jax.files",
        "ferrum_jax.meshes",
        "ferrum_jax.models",
        "ferrum_jax.prefix_cache",
        "ferrum_jax.runtime",
        "ferrum_jax.runtime.placing",
        "ferrum_jax.scheduling",
        "ferrum_jax.sharding",
        "nouns",
    ),
    "ferrum_jax.startup": (
        "checkpoints",
        "ferrum_jax.answers",
        "ferrum_jax.embeddings",
        "ferrum_jax.engine",
        "ferrum_jax.engine.calls",
        "ferrum_jax.engine.of_tokens",
        "ferrum_jax.engine.prefixes",
        "ferrum_jax.executables",
        "ferrum_jax.meshes",
        "ferrum_jax.models",
        "ferrum_jax.pools",
        "ferrum_jax.prefix_cache",
        "ferrum_jax.processes",
        "ferrum_jax.quoting",
        "ferrum_jax.runtime",
        "ferrum_jax.runtime.placing",
        "ferrum_jax.scheduling",
        "ferrum_jax.sharding",
        "ferrum_jax.sound",
        "ferrum_jax.structured.reading",
        "ferrum_jax.text",
        "ferrum_jax.transcribing",
        "ferrum_jax.vision",
        "nouns",
        "pallas_kernels",
        "pallas_kernels.grouped_matmul",
        "pallas_kernels.paged_attention",
        "pallas_kernels.quantized_matmul",
        "pallas_kernels.row_recurrence",
    ),
    "ferrum_jax.llm": (
        "ferrum_jax.answers",
        "ferrum_jax.embeddings",
        "ferrum_jax.engine",
        "ferrum_jax.engine.calls",
        "ferrum_jax.processes",
        "ferrum_jax.progress",
        "ferrum_jax.startup",
        "ferrum_jax.text",
        "ferrum_jax.transcribing",
        "nouns",
    ),
    "ferrum_jax.device_check": (
        "ferrum_jax.engine",
        "ferrum_jax.executables",
        "ferrum_jax.files",
        "ferrum_jax.llm",
        "ferrum_jax.models",
        "ferrum_jax.pages",
        "ferrum_jax.processes",
        "ferrum_jax.runtime",
        "ferrum_jax.runtime.placing",
        "ferrum_jax.sharding",
        "ferrum_jax.startup",
        "ferrum_jax.text",
        "ferrum_jax.transcribing",
        "nouns",
        "pallas_kernels",
        "pallas_kernels.causal_conv",
        "pallas_kernels.gated_delta",
        "pallas_kernels.grouped_matmul",
        "pallas_kernels.kv_write",
        "pallas_kernels.paged_attention",
        "pallas_kernels.paged_attention.gpu",
        "pallas_kernels.paged_attention.tpu.decode",
        "pallas_kernels.quantized_matmul",
        "pallas_kernels.row_recurrence",
        "pallas_kernels.state_space",
    ),
    "ferrum_jax.serve.link": (
        "ferrum_jax.sound",
        "ferrum_jax.vision",
        "nouns",
    ),
    "ferrum_jax.serve.bodies": (
        "ferrum_jax.openai",
        "ferrum_jax.quoting",
        "nouns",
    ),
    "ferrum_jax.serve.http": (
        "ferrum_jax.answers",
        "ferrum_jax.files",
        "ferrum_jax.openai",
        "ferrum_jax.quoting",
        "ferrum_jax.serve.bodies",
        "ferrum_jax.serve.link",
        "ferrum_jax.sound",
        "ferrum_jax.structured.reading",
        "ferrum_jax.text",
        "ferrum_jax.transcribing",
        "ferrum_jax.vision",
        "nouns",
    ),
    "ferrum_jax.serve.batches": (
        "ferrum_jax.answers",
        "ferrum_jax.batch",
        "ferrum_jax.batch.input",
        "ferrum_jax.batch.journal",
        "ferrum_jax.files",
        "ferrum_jax.openai",
        "ferrum_jax.progress",
        "ferrum_jax.quoting",
        "ferrum_jax.serve.http",
        "ferrum_jax.serve.link",
        "ferrum_jax.structured.reading",
        "ferrum_jax.text",
        "ferrum_jax.transcribing",
        "nouns",
    ),
    "ferrum_jax.serve.app": (
        "ferrum_jax.answers",
        "ferrum_jax.openai",
        "ferrum_jax.pages",
        "ferrum_jax.quoting",
        "ferrum_jax.serve.batches",
        "ferrum_jax.serve.bodies",
        "ferrum_jax.serve.http",
        "ferrum_jax.serve.link",
        "ferrum_jax.text",
        "ferrum_jax.transcribing",
        "nouns",
    ),
    "ferrum_jax.serve": (
        "ferrum_jax.answers",
        "ferrum_jax.embeddings",
        "ferrum_jax.engine",
        "ferrum_jax.engine.calls",
        "ferrum_jax.llm",
        "ferrum_jax.processes",
        "ferrum_jax.serve.app",
        "ferrum_jax.serve.batches",
        "ferrum_jax.serve.http",
        "ferrum_jax.serve.link",
        "ferrum_jax.transcribing",
        "ferrum_jax.vision",
        "nouns",
    ),
    "ferrum_jax": (
        "ferrum_jax.device_check",
        "ferrum_jax.llm",
        "ferrum_jax.serve",
        "nouns",
    ),
    "ferrum_jax.bench": (
        "checkpoints",
        "ferrum_jax.layers",
        "ferrum_jax.llm",
        "ferrum_jax.models",
        "nouns",
        "pallas_kernels",
    ),
    "ferrum_jax.integrations": ("ferrum_jax.llm", "ferrum_jax.models", "ferrum_jax.text", "nouns"),
    "ferrum_jax.distributed": ("ferrum_jax.engine", "ferrum_jax.llm", "ferrum_jax.processes"),
    "ferrum_jax.commands": (
        "checkpoints",
        "ferrum_jax",
        "ferrum_jax.batch",
        "ferrum_jax.batch.ending",
        "ferrum_jax.batch.input",
        "ferrum_jax.batch.journal",
        "ferrum_jax.batch.verify",
        "ferrum_jax.bench",
        "ferrum_jax.device_check",
        "ferrum_jax.embeddings",
        "ferrum_jax.executables",
        "ferrum_jax.files",
        "ferrum_jax.llm",
        "ferrum_jax.meshes",
        "ferrum_jax.models",
        "ferrum_jax.offline",
        "ferrum_jax.openai",
        "ferrum_jax.pools",
        "ferrum_jax.progress",
        "ferrum_jax.quoting",
        "ferrum_jax.runtime",
        "ferrum_jax.runtime.placing",
        "ferrum_jax.serve",
        "ferrum_jax.serve.app",
        "ferrum_jax.serve.batches",
        "ferrum_jax.serve.http",
        "ferrum_jax.sharding",
        "ferrum_jax.startup",
        "nouns",
    ),
    "ferrum_jax.__main__": (
        "ferrum_jax",
        "ferrum_jax.batch",
        "ferrum_jax.commands",
        "ferrum_jax.distributed",
        "ferrum_jax.startup",
    ),
}
# Libraries beyond the standard one that light rooms, and those in them, use; the others may use what they like.
MAY_USE = {
    "nouns": ("numpy", "fsspec"),
    "pallas_kernels": ("jax", "numpy"),
    "checkpoints": ("jax", "numpy", "orbax", "tensorstore", "safetensors", "huggingface_hub"),
    "ferrum_jax.scheduling": ("numpy",),
    "ferrum_jax.prefix_cache": ("numpy",),
    "ferrum_jax.speculation": ("numpy",),
    "ferrum_jax.text": ("tokenizers", "jinja2", "numpy"),
    "ferrum_jax.openai": ("numpy",),
    "ferrum_jax.vision": ("numpy", "PIL", "av"),
    "ferrum_jax.sound": ("numpy", "av"),
    "ferrum_jax.transcribing": ("numpy",),
    "ferrum_jax.confined": (),
    "ferrum_jax.structured": ("llguidance", "numpy"),
    "ferrum_jax.structured.forms": (),
    "ferrum_jax.structured.reading": (),
    "ferrum_jax.serve.link": ("numpy",),
    "ferrum_jax.serve.http": ("starlette", "prometheus_client"),
    "ferrum_jax.serve.app": ("starlette", "uvicorn"),
    "ferrum_jax.batch": ("rich", "numpy", "pyarrow", "ray"),
    "ferrum_jax.batch.ending": ("numpy",),
    "ferrum_jax.batch.input": ("numpy", "pyarrow"),
    "ferrum_jax.batch.journal": ("numpy",),
    "ferrum_jax.files": ("fsspec",),
    "ferrum_jax.batch.report": ("rich",),
    "ferrum_jax.pools": ("jax", "numpy"),
    "ferrum_jax.sampling": ("jax", "numpy"),
}


@functools.cache
def modules() -> dict[str, pathlib.Path]:
    """Every module of the packages by its dotted name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def imports(module: str) -> frozenset[str]:
    """What a module imports anywhere in it, in functions and for type checks too; modules as far as they are ours."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(modules()[module].read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{module} imports relatively"
            names.update(_target(node.module, alias.name) for alias in node.names)
    return frozenset(names - {"__future__"})


def _target(module: str, name: str) -> str:
    return f"{module}.{name}" if f"{module}.{name}" in modules() else module


def is_ours(name: str) -> bool:
    return name.split(".")[0] in PACKAGES


def room(module: str) -> str:
    """The room that a module stands in."""
    package, *names = module.split(".")
    if package == "ferrum_jax" and names[:1] and names[0] in NOUNS:
        return "nouns"
    parent, _, _ = module.rpartition(".")
    is_folder = modules()[module].name == "__init__.py"
    return module if is_folder or parent == "ferrum_jax" or module in FILES else parent


@functools.cache
def used() -> dict[str, set[str]]:
    """The other rooms from which each room imports."""
    found: dict[str, set[str]] = {}
    for module in modules():
        rooms = {room(name) for name in imports(module) if is_ours(name)}
        found.setdefault(room(module), set()).update(rooms - {room(module)})
    return found


@functools.cache
def libraries() -> dict[str, set[str]]:
    """The libraries beyond the standard one that the rooms of each row of MAY_USE import."""
    found: dict[str, set[str]] = {name: set() for name in MAY_USE}
    for module in modules():
        above = [name for name in MAY_USE if f"{room(module)}.".startswith(f"{name}.")]
        if above:
            names = {name.split(".")[0] for name in imports(module) if not is_ours(name)}
            found[max(above, key=len)] |= names - sys.stdlib_module_names
    return found


@pytest.mark.parametrize("name", sorted(MAY_IMPORT))
def test_a_room_imports_the_rooms_of_its_row_and_no_others(name):
    assert name in used(), f"there is no room {name}; take its row out"
    assert used()[name] == set(MAY_IMPORT[name])


def test_every_room_has_a_row():
    assert not used().keys() - MAY_IMPORT.keys(), "these rooms have no place in the layers; give them one here"


def test_no_room_stands_on_itself():
    """Imports between rooms go in no circle, so that each can be read after those below it."""
    graphlib.TopologicalSorter(used()).prepare()  # raises CycleError, which names the circle


def test_folders_are_small_enough_to_read():
    """Folders have 16 files at most; families and commands are lists that grow."""
    counts: dict[str, int] = {}
    for path in modules().values():
        folder = str(path.parent.relative_to(ROOT))
        counts[folder] = counts.get(folder, 0) + 1
    assert {f for f, n in counts.items() if n > 16} <= {"ferrum_jax/models", "ferrum_jax/commands"}


@pytest.mark.parametrize("name", sorted(MAY_USE))
def test_light_rooms_use_only_their_libraries(name):
    assert libraries()[name] == set(MAY_USE[name])


def test_nothing_imports_scripts_or_tests():
    wrong = [m for m in modules() if any(name.split(".")[0] in ("scripts", "tests") for name in imports(m))]
    assert not wrong


def test_environment_variables_are_read_in_few_places_only():
    """The command line reads its own, and a compiler's flags decide an executable."""
    reads = re.compile(r"environ(?! \|=|\[[^]]*\] = )|getenv")  # all but what sets one
    readers = {m for m, path in modules().items() if reads.search(_os_names(path))}
    assert readers == {"ferrum_jax.__main__", "ferrum_jax.executables.environment"}


def _os_names(path: pathlib.Path) -> str:
    """The lines of a file that take something of `os` or import from it."""
    return "\n".join(line for line in path.read_text().splitlines() if "os." in line or "from os import" in line)


def test_environment_variables_are_set_only_where_no_device_is_looked_for():
    sets = re.compile(r"os\.environ( \|=|\[[^]]*\] = |\.(update|setdefault)\()|putenv")
    setters = {m for m, path in modules().items() if sets.search(path.read_text())}
    assert setters == {"ferrum_jax.__main__", "ferrum_jax.commands.compile"}


def test_all_code_that_a_step_is_traced_from_decides_the_name_of_its_executable():
    """Everything that the making of a step imports, however far, is in the digest of the store."""
    reached, todo = set(), ["ferrum_jax.executables.compile", "ferrum_jax.embeddings.encoder_runtime"]
    while todo:
        module = todo.pop()
        if module not in reached:
            reached.add(module)
            todo += [name for name in imports(module) if name in modules()]
    paths = {str(modules()[module].relative_to(ROOT)) for module in reached}
    light = {f"{package}/__init__.py" for package in ("ferrum_jax", "checkpoints")}  # they define nothing traced
    missing = {path for path in paths - light if not any(path == t or path.startswith(f"{t}/") for t in TRACED)}
    assert len(reached) > 20 and not missing
    assert all((ROOT / t).exists() for t in TRACED)


@pytest.mark.parametrize(
    "module",
    [
        "ferrum_jax",
        "ferrum_jax.batch.job",
        "ferrum_jax.scheduling.scheduler",
        "ferrum_jax.offline.simulate_cache",
        "ferrum_jax.__main__",
        "ferrum_jax.serve.http.settings",
    ],
)
def test_light_parts_do_not_load_heavy_libraries(module):
    program = f"import sys, {module}; print(*[name for name in sys.modules if '.' not in name])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert module.split(".")[0] in loaded
    assert not loaded & {name for name in HEAVY if name != "rich" or module not in SHOWS}
