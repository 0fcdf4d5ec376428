"""Functions called in processes of their own that import nothing anew: each is a fork of a server that has imported.

multiprocessing starts the server at the first call, and it ends with this process. It has no backend of jax: a child
makes its own on the CPU, with the XLA_FLAGS of its call. What is read while modules are imported is as the server had
it, and another value is refused. Tests of imports, signals, starts or peaks of memory start Python itself.
"""

import atexit
import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.support import ROOT

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [__name__, "pytest", "orbax.checkpoint", "ferrum_jax.llm", "ferrum_jax.engine.startup.open"]
)
_READ_AT_IMPORT = ("JAX_", "FLAX_", "HF_", "OPENBLAS_", "PYTHON")


class Ended(NamedTuple):
    """As subprocess.run says it. value: what the function returned; None where it did not."""

    returncode: int
    stdout: str
    stderr: str
    value: Any


def call(function: Callable[..., Any], *arguments: Any, devices: int | None = None, **environment: str) -> Any:
    """What function(*arguments) returns in a process of its own. devices: so many of the CPU, None for one."""
    if devices is not None:
        count = f"--xla_force_host_platform_device_count={devices}"
        environment["XLA_FLAGS"] = f"{count} {environment.get('XLA_FLAGS', '')}".strip()
    ended = run(function, *arguments, environment=environment)
    assert ended.returncode == 0, ended.stderr
    return ended.value


def run(
    function: Callable[..., Any],
    *arguments: Any,
    argv: Sequence[str] = ("",),
    cwd: Path = ROOT,
    environment: dict[str, str] | None = None,
    timeout_s: float = 3600,
) -> Ended:
    """How a process of its own ends that calls a function of a module. environment: more of it.

    After timeout_s it is killed. What it has started and left is killed at its end.
    """
    whole = os.environ | (environment or {})
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        for path in outputs:
            path.touch()
        how = (Path(folder), argv, cwd, whole, function, arguments)
        process = _CONTEXT.Process(target=_called, args=how)
        process.start()
        assert process.pid is not None
        try:
            process.join(timeout_s)
            is_late = process.exitcode is None
        finally:  # after Ctrl-C too
            process.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
        stdout, stderr = (path.read_text() for path in outputs)
        if is_late:
            raise subprocess.TimeoutExpired(str(function), timeout_s, stdout, stderr)
        value = Path(folder, "value")
        assert process.exitcode is not None
        return Ended(process.exitcode, stdout, stderr, pickle.loads(value.read_bytes()) if value.exists() else None)


def _called(
    folder: Path,
    argv: Sequence[str],
    cwd: Path,
    environment: dict[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """In the child."""
    import jax
    from jax._src import xla_bridge

    os.setpgid(0, 0)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        with open(folder / name, "wb") as file:
            os.dup2(file.fileno(), descriptor)
    assert not xla_bridge.backends_are_initialized(), "the server has a backend of jax"
    changed = {name for name, _ in os.environ.items() ^ environment.items() if name.startswith(_READ_AT_IMPORT)}
    assert not changed, f"{sorted(changed)} were read when the server began; start Python itself"
    os.environ.clear()
    os.environ.update(environment)
    jax.config.update("jax_platforms", "cpu")
    os.chdir(cwd)
    sys.argv = list(argv)
    try:
        (folder / "value").write_bytes(pickle.dumps(function(*arguments)))
    finally:
        atexit._run_exitfuncs()


def _end_with_parent() -> None:
    """As the server ends with it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)
