"""The lease of a folder of batches: one clerk has it, and others wait until that one is gone."""

import contextlib
from collections.abc import Callable, Iterator

from ferrum_jax.batch.journal.leases import Leases
from ferrum_jax.io import system
from ferrum_jax.io.files.store import open_store
from ferrum_jax.serve.batches.batch_folder import BatchFolder

_EXPIRY_S = 60.0  # of a clerk that is silent
BEAT_S = _EXPIRY_S / 4


@contextlib.contextmanager
def lease_of(
    folder: BatchFolder, looked: Callable[[Callable[[], bool]], bool], ended: Callable[[], bool]
) -> Iterator[Callable[[], None]]:
    """Waits until no other clerk lives; gives what is to be called now and then.

    looked: calls what it is given, and gives False where the folder cannot be used now. ended: waits a moment, and
    says whether the clerk is to end. What is given raises LeaseLost if another clerk took this one for dead.
    """
    leases: Leases | None = None
    beaten_s = system.monotonic()

    def beat() -> None:
        nonlocal beaten_s
        if leases is not None and system.monotonic() - beaten_s > BEAT_S:
            leases.beat()
            beaten_s = system.monotonic()

    def acquired() -> bool:
        nonlocal leases
        if leases is None:
            leases = Leases(open_store(folder.path("clerk")), system.token_hex(8), "clerk", expiry_s=_EXPIRY_S)
        beat()
        return leases.acquire("clerk") is not None

    try:
        while not looked(acquired) and not ended():
            pass
        yield beat
    finally:
        with contextlib.suppress(OSError):
            if leases is not None:
                leases.leave()
