"""The pace of a model on this machine, kept beside its executables, from which plans of other jobs are made."""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
from typing import TYPE_CHECKING

from ferrum_jax.config import EngineConfig

if TYPE_CHECKING:
    from ferrum_jax.batch.ending.ending import WorkerPace
    from ferrum_jax.batch.paces import Paces

_LEAST_ROWS = 50
_CHANGES_NO_PACE = ("seed", "request_log", "compilation_cache_dir", "on_recompile", "ready", "image_root")


class MachinePace:
    """The pace of the model and the settings of a command. Nothing is kept where executables are not."""

    def __init__(self, args: argparse.Namespace, config: EngineConfig) -> None:
        self._folder = config.compilation_cache_dir
        model = os.path.realpath(args.model) if os.path.exists(args.model) else args.model
        fields = {name: value for name, value in vars(config).items() if name not in _CHANGES_NO_PACE}
        self._what = (
            platform.node(),
            model,
            repr(args.revision),
            repr(sorted(fields.items(), key=lambda each: each[0])),
        )

    def keep(self, own: WorkerPace) -> None:
        """Keeps what a worker measured, where that was enough."""
        paces = self._paces()
        if paces is not None and own.pace is not None and own.pace.num_rows >= _LEAST_ROWS:
            paces.write(dataclasses.replace(own, spent_s=0.0, under_way=(0.0, 0.0), price_per_hour=None), ended=True)

    def find(self) -> WorkerPace | None:
        """What was kept last."""
        paces = self._paces()
        return None if paces is None else paces.own()

    def _paces(self) -> Paces | None:
        from ferrum_jax.batch.paces import Paces
        from ferrum_jax.io.files.store import LocalStore
        from ferrum_jax.runtime.compile.executable_store import digest
        from ferrum_jax.runtime.compile.remote_folder import local_folder

        if self._folder is None:
            return None
        return Paces(LocalStore(local_folder(self._folder).parent), digest(*self._what))
