"""Imports go downward only, as docs/architecture.md draws it, and light parts bring no heavy library."""

from __future__ import annotations

import ast
import functools
import pathlib
import subprocess
import sys

import pytest

from ferrum_jax.runtime.environment import TRACED
from tests.support import ROOT

PACKAGES = ("ferrum_jax", "pallas_kernels", "checkpoints")
NOUNS = ("config", "spec", "prompt", "request", "plan", "ints", "metrics", "trace", "windows", "paths")
NOUN_MODULES = tuple(f"ferrum_jax.{noun}" for noun in NOUNS)
HEAVY = (
    "ray",
    "pyarrow",
    "fsspec",
    "matplotlib",
    "jax",
    "flax",
    "orbax",
    "tensorstore",
    "safetensors",
    "tokenizers",
    "jinja2",
    "rich",
)
SHOWS = ("ferrum_jax.batch.job", "ferrum_jax.what_if")  # what they write on the terminal is rich's

# What modules below a name may import of the project; a name stands for all below it. Their own package is free.
MAY_IMPORT = {
    "pallas_kernels": (),
    "checkpoints": (),
    **dict.fromkeys(NOUN_MODULES, NOUN_MODULES),
    "ferrum_jax.scheduling": NOUN_MODULES,
    "ferrum_jax.text": NOUN_MODULES,
    "ferrum_jax.sharding": (*NOUN_MODULES, "checkpoints.rules"),
    "ferrum_jax.cache": (*NOUN_MODULES, "ferrum_jax.sharding", "pallas_kernels"),
    "ferrum_jax.sampling": NOUN_MODULES,
    "ferrum_jax.layers": (*NOUN_MODULES, "ferrum_jax.sharding", "pallas_kernels"),
    "ferrum_jax.models": (*NOUN_MODULES, "ferrum_jax.layers", "ferrum_jax.sharding", "checkpoints.rules"),
    "ferrum_jax.runtime": (
        *NOUN_MODULES,
        "ferrum_jax.sharding",
        "ferrum_jax.models",
        "ferrum_jax.layers",
        "ferrum_jax.cache",
        "ferrum_jax.sampling",
        "pallas_kernels",
    ),
    "ferrum_jax.progress": NOUN_MODULES,
    "ferrum_jax.flags": NOUN_MODULES,
    "ferrum_jax.what_if": (*NOUN_MODULES, "ferrum_jax.scheduling"),
    "ferrum_jax.submission": (*NOUN_MODULES, "ferrum_jax.text", "ferrum_jax.sampling"),
    "ferrum_jax.outputs": (*NOUN_MODULES, "ferrum_jax.text", "ferrum_jax.submission"),
    "ferrum_jax.engine": (
        *NOUN_MODULES,
        "ferrum_jax.submission",
        "ferrum_jax.outputs",
        "ferrum_jax.scheduling",
        "ferrum_jax.text",
        "ferrum_jax.runtime",
        "ferrum_jax.sampling",
    ),
    "ferrum_jax.prefix_cache": (
        *NOUN_MODULES,
        "ferrum_jax.scheduling",
        "ferrum_jax.runtime",
        "ferrum_jax.cache",
        "checkpoints",
    ),
    "ferrum_jax.write_guard": (*NOUN_MODULES, "ferrum_jax.scheduling", "ferrum_jax.runtime"),
    "ferrum_jax.embedding": (*NOUN_MODULES, "ferrum_jax.text", "checkpoints.sentence"),
    "ferrum_jax.encoder": (
        *NOUN_MODULES,
        "ferrum_jax.cache",
        "ferrum_jax.embedding",
        "ferrum_jax.runtime",
        "ferrum_jax.models",
        "checkpoints",
    ),
    "ferrum_jax.following": (*NOUN_MODULES, "ferrum_jax.calls", "ferrum_jax.engine", "ferrum_jax.runtime"),
    "ferrum_jax.distributed": ("ferrum_jax.following", "ferrum_jax.llm", "ferrum_jax.runtime"),
    "ferrum_jax.loading": (
        *NOUN_MODULES,
        "ferrum_jax.following",
        "ferrum_jax.write_guard",
        "ferrum_jax.engine",
        "ferrum_jax.scheduling",
        "ferrum_jax.text",
        "ferrum_jax.runtime",
        "ferrum_jax.models",
        "ferrum_jax.cache",
        "checkpoints",
    ),
    "ferrum_jax.bundling": (
        *NOUN_MODULES,
        "ferrum_jax.runtime",
        "ferrum_jax.models",
        "ferrum_jax.sharding",
        "checkpoints",
    ),
    "ferrum_jax.meshes": (*NOUN_MODULES, "ferrum_jax.bundling", "ferrum_jax.runtime", "ferrum_jax.sharding"),
    "ferrum_jax.forecast": (*NOUN_MODULES, "ferrum_jax.runtime", "ferrum_jax.sharding", "pallas_kernels"),
    "ferrum_jax.calls": (*NOUN_MODULES, "ferrum_jax.engine", "ferrum_jax.runtime"),
    "ferrum_jax.starting": (
        *NOUN_MODULES,
        "ferrum_jax.loading",
        "ferrum_jax.engine",
        "ferrum_jax.runtime",
        "ferrum_jax.text",
    ),
    "ferrum_jax.opening": (
        *NOUN_MODULES,
        "ferrum_jax.starting",
        "ferrum_jax.loading",
        "ferrum_jax.embedding",
        "ferrum_jax.encoder",
        "ferrum_jax.engine",
        "ferrum_jax.text",
        "ferrum_jax.runtime",
        "ferrum_jax.models",
        "ferrum_jax.sharding",
        "checkpoints",
    ),
    "ferrum_jax.llm": (
        *NOUN_MODULES,
        "ferrum_jax.opening",
        "ferrum_jax.calls",
        "ferrum_jax.loading",
        "ferrum_jax.embedding",
        "ferrum_jax.encoder",
        "ferrum_jax.prefix_cache",
        "ferrum_jax.engine",
        "ferrum_jax.runtime",
        "ferrum_jax.models",
        "ferrum_jax.progress",
    ),
    "ferrum_jax.padding": (*NOUN_MODULES, "ferrum_jax.scheduling", "ferrum_jax.runtime"),
    "ferrum_jax.batch": (*NOUN_MODULES, "ferrum_jax.progress"),
    "ferrum_jax.bench": (*NOUN_MODULES, "ferrum_jax.llm", "ferrum_jax.kv_error"),
    "ferrum_jax.kv_error": (
        *NOUN_MODULES,
        "ferrum_jax.llm",
        "ferrum_jax.layers",
        "ferrum_jax.models",
        "pallas_kernels",
    ),
    "ferrum_jax.commands": ("ferrum_jax", "checkpoints", "pallas_kernels.target"),
    "ferrum_jax.__main__": (
        *NOUN_MODULES,
        "ferrum_jax.batch.notice",
        "ferrum_jax.commands",
        "ferrum_jax.distributed",
    ),
    "ferrum_jax": (*NOUN_MODULES, "ferrum_jax.llm"),
}
# Libraries beyond the standard one; the rest of ferrum_jax may use what it likes.
MAY_USE = {
    **dict.fromkeys(NOUN_MODULES, ("numpy",)),
    "pallas_kernels": ("jax", "numpy"),
    "checkpoints": ("jax", "numpy", "orbax", "tensorstore", "safetensors", "fsspec"),
    "ferrum_jax.scheduling": ("numpy",),
    "ferrum_jax.text": ("tokenizers", "jinja2", "numpy"),
    "ferrum_jax.flags": (),
    "ferrum_jax.batch": ("rich", "numpy", "fsspec", "pyarrow", "ray"),
    "ferrum_jax.what_if": ("rich", "matplotlib"),
    "ferrum_jax.cache": ("jax", "numpy"),
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


def covers(name: str, module: str) -> bool:
    return module == name or module.startswith(f"{name}.")


def place(module: str, table: dict) -> str | None:
    """The longest name of the table that covers the module."""
    return max((name for name in table if covers(name, module)), key=len, default=None)


def is_ours(name: str) -> bool:
    return name.split(".")[0] in PACKAGES


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_downward_only(package):
    wrong = []
    for module in (m for m in modules() if covers(package, m)):
        own = place(module, MAY_IMPORT)
        assert own != "ferrum_jax" or module == "ferrum_jax", f"{module} has no place in the layers; give it one here"
        allowed = MAY_IMPORT[own] if own == "ferrum_jax" else (own, *MAY_IMPORT[own])
        for name in filter(is_ours, imports(module)):
            if not any(covers(a, name) for a in allowed):
                wrong.append(f"{module} imports {name}")
    assert not wrong


def test_light_parts_use_only_their_libraries():
    wrong = []
    for module in modules():
        own = place(module, MAY_USE)
        libraries = {name.split(".")[0] for name in imports(module) if not is_ours(name)} - sys.stdlib_module_names
        if own is not None and not libraries <= set(MAY_USE[own]):
            wrong.append(f"{module} uses {sorted(libraries - set(MAY_USE[own]))}")
    assert not wrong


def test_nothing_imports_scripts_or_tests():
    wrong = [m for m in modules() if any(name.split(".")[0] in ("scripts", "tests") for name in imports(m))]
    assert not wrong


def test_environment_variables_are_read_in_main_only():
    """Beside it, a compiler's own flags decide an executable, and plugins are told that their device is not here."""
    readers = {m for m, path in modules().items() if "os.environ" in path.read_text() or "getenv" in path.read_text()}
    assert readers <= {"ferrum_jax.__main__", "ferrum_jax.runtime.environment", "ferrum_jax.commands.compile"}


def test_all_code_that_a_step_is_traced_from_decides_the_name_of_its_executable():
    """Everything that the making of a step imports, however far, is in the digest of the store."""
    reached, todo = set(), ["ferrum_jax.runtime.compile"]
    while todo:
        module = todo.pop()
        if module not in reached:
            reached.add(module)
            todo += [name for name in imports(module) if name in modules()]
    paths = {str(modules()[module].relative_to(ROOT)) for module in reached}
    light = {f"{package}/__init__.py" for package in ("ferrum_jax", "checkpoints")}  # they define nothing traced
    missing = {path for path in paths - light if not any(path == t or path.startswith(f"{t}/") for t in TRACED)}
    assert len(reached) > 20 and not missing


@pytest.mark.parametrize(
    "module",
    [
        "ferrum_jax",
        "ferrum_jax.batch.job",
        "ferrum_jax.scheduling.scheduler",
        "ferrum_jax.what_if",
        "ferrum_jax.__main__",
    ],
)
def test_light_parts_do_not_load_heavy_libraries(module):
    program = f"import sys, {module}; print(*[name for name in sys.modules if '.' not in name])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert module.split(".")[0] in loaded
    assert not loaded & {name for name in HEAVY if name != "rich" or module not in SHOWS}
