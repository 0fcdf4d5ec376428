"""Imports go downward only, as docs/architecture.md draws it, and light parts bring no heavy library.

A room is a folder. In the root of ferrum_jax the nouns are one room together, a folder of them too, and each other
file is one of its own.
"""

from __future__ import annotations

import ast
import functools
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

# Rooms by rank, the lowest first: a room imports only from ranks below its own. "nouns" stands for the root's nouns,
# and the other names of one package go without it. The host's rooms come before all that knows JAX.
RANKS = (
    "quoting confined pages structured.forms checkpoints.names",
    "nouns checkpoints.rules",
    "files media openai prefix_cache progress speculation structured.reading checkpoints.adapters",
    "batch.ending batch.report scheduling sound vision serve.bodies",
    "text serve.link",
    "answers engine.calls transcribing",
    "serve.http",
    "pallas_kernels",
    "pallas_kernels.causal_conv pallas_kernels.kv_write pallas_kernels.low_rank pallas_kernels.row_recurrence",
    "pallas_kernels.quantized_matmul.gpu pallas_kernels.quantized_matmul.tpu",
    "pallas_kernels.quantized_matmul pallas_kernels.gated_delta pallas_kernels.state_space",
    "pallas_kernels.grouped_matmul pallas_kernels.paged_attention.gpu pallas_kernels.paged_attention.tpu.prefill",
    "pallas_kernels.paged_attention.gpu.latent pallas_kernels.paged_attention.tpu.decode",
    "pallas_kernels.paged_attention.tpu pallas_kernels.paged_attention.tpu.latent",
    "pallas_kernels.paged_attention pallas_kernels.indexer.tpu",
    "pallas_kernels.indexer",
    "processes sampling sharding checkpoints.formats",
    "structured pools engine.of_tokens batch.input checkpoints",
    "adapters layers batch.journal",
    "layers.recurrent batch",
    "models batch.verify serve.batches",
    "towers executables serve.app",
    "runtime",
    "engine runtime.placing",
    "embeddings engine.prefixes",
    "meshes",
    "offline startup",
    "llm",
    "bench device_check distributed integrations serve",
    "ferrum_jax",
    "commands",
    "__main__",
)
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


def test_a_room_imports_only_from_lower_ranks():
    """Imports between rooms go in no circle, so that each can be read after those below it."""
    ranks = {name: rank for rank, names in enumerate(RANKS) for name in names.split()}
    rooms = {name: {other.removeprefix("ferrum_jax.") for other in others} for name, others in used().items()}
    rooms = {name.removeprefix("ferrum_jax."): others for name, others in rooms.items()}
    assert rooms.keys() == ranks.keys(), "each room has a rank, and each name of RANKS is a room"
    upward = [f"{name} imports {other}" for name in rooms for other in rooms[name] if ranks[other] >= ranks[name]]
    assert not upward, "lower the imported room's rank, or move what is imported to a lower room"


def test_kernels_import_nothing_else_of_ours():
    others = [name for module in modules() if module.startswith("pallas_kernels") for name in imports(module)]
    assert not [name for name in others if is_ours(name) and not name.startswith("pallas_kernels")]


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
