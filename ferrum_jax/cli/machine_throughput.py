"""The throughput of a model on this machine, kept beside its executables, from which plans of other jobs are made."""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
from typing import TYPE_CHECKING

from ferrum_jax.config import EngineConfig

if TYPE_CHECKING:
    from ferrum_jax.batch.deadline.forecaster import WorkerReport
    from ferrum_jax.batch.worker_reports import WorkerReports

_MIN_ROWS = 50
_CHANGES_NO_THROUGHPUT = ("seed", "request_log", "compilation_cache_dir", "on_recompile", "ready", "image_root")
_CHANGES_NO_THROUGHPUT += ("kv_tier", "kv_tier_bytes")


class MachineThroughput:
    """The throughput of the model and the settings of a command. Nothing is kept where executables are not."""

    def __init__(self, args: argparse.Namespace, config: EngineConfig) -> None:
        self._folder = config.compilation_cache_dir
        model = os.path.realpath(args.model) if os.path.exists(args.model) else args.model
        fields = {name: value for name, value in vars(config).items() if name not in _CHANGES_NO_THROUGHPUT}
        self._what = (
            platform.node(),
            model,
            repr(args.revision),
            repr(sorted(fields.items(), key=lambda each: each[0])),
        )

    def keep(self, own: WorkerReport) -> None:
        """Keeps what a worker measured, where that was enough."""
        reports = self._reports()
        if reports is not None and own.throughput is not None and own.throughput.num_rows >= _MIN_ROWS:
            reports.write(dataclasses.replace(own, spent_s=0.0, under_way=(0.0, 0.0), price_per_hour=None), ended=True)

    def find(self) -> WorkerReport | None:
        """The report that was kept last."""
        reports = self._reports()
        return None if reports is None else reports.own()

    def _reports(self) -> WorkerReports | None:
        from ferrum_jax.batch.worker_reports import WorkerReports
        from ferrum_jax.io.files.store import LocalStore
        from ferrum_jax.runtime.compile.executable_store import digest
        from ferrum_jax.runtime.compile.remote_folder import local_folder

        if self._folder is None:
            return None
        return WorkerReports(LocalStore(local_folder(self._folder).parent), digest(*self._what))
