"""Packages import only from those of lower ranks, and light parts bring no heavy library."""

import ast
import functools
import graphlib
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

from ferrum_jax.runtime.compile.environment import TRACED
from tests.support import ROOT

PACKAGES = ("ferrum_jax", "pallas_kernels", "checkpoints")
_READ = tomllib.loads((ROOT / "tests/house/layers.toml").read_text())
HEAVY, RANKS, MAY_USE = _READ["heavy"], _READ["ranks"], _READ["may_use"]
SHOWS = (
    "ferrum_jax.batch.job",
    "ferrum_jax.planning.offline.simulate_cache",
)  # what they write on the terminal is rich's

LAZY = ("ferrum_jax", "checkpoints")  # packages that import what they name on its first use


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


def package(module: str) -> str:
    """The package that a module stands in, or its own name in the root."""
    first, *names = module.split(".")
    return names[0] if first == "ferrum_jax" and names else first


@functools.cache
def libraries() -> dict[str, set[str]]:
    """The libraries beyond the standard one that the modules below each name of MAY_USE import."""
    used: dict[str, set[str]] = {name: set() for name in MAY_USE}
    for module in modules():
        above = [name for name in MAY_USE if f"{module}.".startswith(f"{name}.")]
        if above:
            names = {name.split(".")[0] for name in imports(module) if not is_ours(name)}
            used[max(above, key=len)] |= names - sys.stdlib_module_names
    return used


def test_a_package_imports_only_from_lower_ranks():
    """`ferrum_jax/__init__.py` defines nothing: it names what others define."""
    ranks = {name: rank for rank, names in enumerate(RANKS) for name in names.split()}
    assert {package(module) for module in modules()} == {"ferrum_jax", *ranks}, "each package has a rank"
    upward = [
        f"{module} imports {name}"
        for module in modules()
        for name in imports(module) - {"ferrum_jax"}
        if module != "ferrum_jax" and is_ours(name) and package(name) != package(module)
        if ranks[package(name)] >= ranks[package(module)]
    ]
    assert not upward, "move what is imported to a lower package"


def test_modules_import_in_no_circle():
    """So that each can be read after those that it imports from. What packages name lazily is no import of theirs."""
    graph = {module: imports(module) & modules().keys() for module in modules() if module not in LAZY}
    assert list(graphlib.TopologicalSorter(graph).static_order())


def test_each_package_says_in_ten_lines_what_it_is_for():
    folders = [path.parent for path in (ROOT / "ferrum_jax").glob("*/__init__.py")]
    assert all(0 < (folder / "README.md").read_text().count("\n") <= 10 for folder in folders)


def test_kernels_import_nothing_else_of_ours():
    others = [name for module in modules() if module.startswith("pallas_kernels") for name in imports(module)]
    assert not [name for name in others if is_ours(name) and not name.startswith("pallas_kernels")]


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
    assert readers == {"ferrum_jax.__main__", "ferrum_jax.runtime.compile.environment"}


def _os_names(path: pathlib.Path) -> str:
    """The lines of a file that take something of `os` or import from it."""
    return "\n".join(line for line in path.read_text().splitlines() if "os." in line or "from os import" in line)


def test_environment_variables_are_set_only_where_no_device_is_looked_for():
    sets = re.compile(r"os\.environ( \|=|\[[^]]*\] = |\.(update|setdefault)\()|putenv")
    setters = {m for m, path in modules().items() if sets.search(path.read_text())}
    assert setters == {"ferrum_jax.__main__", "ferrum_jax.cli.compile"}


def test_all_code_that_a_step_is_traced_from_decides_the_name_of_its_executable():
    """Everything that the making of a step imports, however far, is in the digest of the store."""
    reached, todo = set(), ["ferrum_jax.runtime.compile.compile", "ferrum_jax.runtime.encoder_runtime"]
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
        "ferrum_jax.core.scheduler.scheduler",
        "ferrum_jax.planning.offline.simulate_cache",
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
