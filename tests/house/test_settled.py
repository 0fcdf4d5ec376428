"""Settings are settled once, at the opening: nothing behind it rewrites a config."""

import ast
import inspect
from pathlib import Path

import pytest

from ferrum_jax import config as config_module
from ferrum_jax.config import EngineConfig
from ferrum_jax.llm import LLM
from tests.support import GOLDENS, ROOT, SMALL

# Where one config is made of another. The opening, with the meshes that it chooses among; what decides which config is
# asked for before anything is opened; and checks, which open engines of their own.
OPENING = (
    "ferrum_jax/engine/startup/chosen.py",
    "ferrum_jax/engine/startup/open.py",
    "ferrum_jax/planning/meshes/on_paper.py",
)
BEFORE = ("ferrum_jax/tasks/calls/fields.py", "ferrum_jax/runtime/compile/bundle.py")
ON_TRIAL = (
    "ferrum_jax/engine/startup/choose_attention.py",
    "ferrum_jax/runtime/placing/fit.py",
    "ferrum_jax/cli/device_check/",
)


def rewrites(path: Path) -> list[int]:
    """Lines that call `dataclasses.replace` on a config."""
    names = {"config", "EngineConfig()"}
    found, text = [], path.read_text()
    nodes = [*ast.walk(ast.parse(text))] if "dataclasses.replace" in text else []
    for node in nodes:
        if isinstance(node, ast.arg) and node.annotation is not None and "EngineConfig" in ast.unparse(node.annotation):
            names.add(node.arg)
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "dataclasses.replace":
            parts = ast.unparse(node.args[0]).split(" or ")
            found += [node.lineno] if any(part in names or part.endswith(".config") for part in parts) else []
    return found


@pytest.mark.parametrize("package", ["ferrum_jax"])
def test_a_config_is_rewritten_by_the_opening_alone(package):
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / package).rglob("*.py"))
        if not str(path.relative_to(ROOT)).startswith((*OPENING, *BEFORE, *ON_TRIAL))
        for line in rewrites(path)
    ]
    assert not wrong, f"these rewrite an EngineConfig; let the opening decide it once: {wrong}"


def test_an_opening_names_mesh_implementations_and_rows_and_then_no_config_is_made(monkeypatch):
    made, check = [], EngineConfig.__post_init__

    def record(self) -> None:
        frames = (frame.filename for frame in inspect.stack(0)[1:])
        made.append(next(name for name in frames if name.startswith(str(ROOT / "ferrum_jax"))))
        check(self)

    monkeypatch.setattr(config_module.EngineConfig, "__post_init__", record)
    llm = LLM(str(GOLDENS / "qwen3"), SMALL)
    assert [Path(name).name for name in made] == ["chosen.py", "chosen.py", "open.py"]
    llm.generate([[1, 2, 3]], progress=False)
    assert len(made) == 3
