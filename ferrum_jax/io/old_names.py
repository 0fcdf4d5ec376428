"""Names that documents showed in the version before this one, which this one still takes, with a warning.

Fields of configs, flags, metrics, stats, environment variables and fields of jobs have kept their names.
"""

import importlib
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MODULES = {
    "asked.sampling": "sampling_params",
    "asked.structured_outputs": "inputs.params.structured_outputs",
    "device_check.run_check": "cli.device_check.run_check",
    "distributed": "integrations.distributed",
    "layers.attention": "models.layers.attention",
    "models.decoder": "models.families.decoder",
    "models.registry": "models.families.registry",
    "outputs": "core.outputs",
    "prompt": "inputs.prompt",
    "serve.async_llm": "async_llm",
    "sizes.speculative": "inputs.sizes.speculative",
}
FIELDS = {"JobOptions.on_pace": "on_throughput"}
COMMANDS = {"bench serve": "`vllm bench serve` or `guidellm run`, as docs/guides/serving.md says"}
_FOLDERS = {name.rpartition(".")[0] for name in MODULES} - {""}


def warn_of(old: str, new: str, stacklevel: int = 3) -> None:
    """Warns the caller of the function that calls this one."""
    warnings.warn(f"{old} is {new} now; the next version takes this name alone", FutureWarning, stacklevel=stacklevel)


class _OldModules(MetaPathFinder, Loader):
    """Finds a module of MODULES by its old name, with the contents of the one that stands for it."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        name = fullname.removeprefix("ferrum_jax.")
        if name == fullname or name not in MODULES.keys() | _FOLDERS:
            return None
        return ModuleSpec(fullname, self if name in MODULES else None, is_package=name in _FOLDERS)

    def exec_module(self, module: ModuleType) -> None:
        new = f"ferrum_jax.{MODULES[module.__name__.removeprefix('ferrum_jax.')]}"
        warn_of(module.__name__, new)  # frames of an import do not count
        found = vars(importlib.import_module(new))
        vars(module).update({name: value for name, value in found.items() if not name.startswith("__")})


def take_old_modules() -> None:
    """Makes `import` find the old names behind all others."""
    sys.meta_path.append(_OldModules())
