"""How pytest-xdist shares tests out: those of one family run in one process and share its executables."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadScopeScheduling

from tests.golden_table import GOLDENS

ENGINES = ("tests/embeddings/", "tests/engine/", "tests/startup/")
ONE_FUNCTION = ("tests/sampling/",)  # tests of these folders call one jitted function, which each process compiles
FOLDERS = sorted(path.parent.relative_to(GOLDENS).as_posix() for path in GOLDENS.glob("**/config.json"))
PUBLISHED = ("tests/models/test_registry.py", "tests/sharding/test_sharding.py")  # lay out the same models
OWN_MODELS = ("test_recurrent.py", "test_windows.py")


class ByFamily(LoadScopeScheduling):
    """Gives a worker all tests of a family, for its executables take longest; other tests go one by one."""

    def _split_scope(self, nodeid: str) -> str:
        parameters = nodeid.partition("[")[2].rstrip("]").split("-")
        family = next((name for name in FOLDERS if name in parameters), None)
        if nodeid.startswith("tests/aot/"):  # tests of one compile share a process as well
            return "-".join([nodeid.partition("::")[0], *parameters])
        if family is None and nodeid.startswith(ENGINES):
            file = nodeid.partition("::")[0]
            family = file if file.endswith(OWN_MODELS) else "qwen3"  # the engine's other tests use this one
        if nodeid.startswith(ONE_FUNCTION):
            family = nodeid.rpartition("/")[0]
        if nodeid.startswith(PUBLISHED):
            family = nodeid.partition("[")[2]
        if nodeid.startswith("tests/invariance/test_recurrent.py"):
            family = family or "qwen3_next"
        return family or nodeid

    def remove_node(self, node: Any) -> str | None:
        """The test in which a process died; it has failed, and what it had left goes to others.

        xdist's own gives it out once more, and units that have ended too, whose end then is waited for without end.
        """
        units = self.assigned_work.pop(node)
        crashed = next((test for unit in units.values() for test, has_ended in unit.items() if not has_ended), None)
        if crashed is None:
            return None
        for scope, unit in units.items():
            left = {test: has_ended for test, has_ended in unit.items() if not has_ended and test != crashed}
            if left:
                self.workqueue[scope] = left
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed

    def schedule(self) -> None:
        """A process that comes in place of one that died gets two units, for it begins the last when it is told so."""
        has_begun = self.collection is not None
        super().schedule()
        if has_begun:
            super().schedule()
