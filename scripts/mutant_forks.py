"""Runs tests in forks of a process that has collected them once, each fork with other code in the product's functions.

No file is changed. Programs that tests start have the code as it is.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import math
import os
import pickle
import re
import signal
import sys
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
_LEAST_S, _SLOWER = 30.0, 8.0  # how long a test may take with a mutant: seconds, and times what it took without
_UNKNOWN_S = 300.0  # a test that nobody has timed

Changes = Sequence[tuple[types.FunctionType, types.CodeType]]


class InForks:
    """A pytest plugin that runs tests of the session in forks of its process. work: called when they are collected.

    took_s: seconds of each test where they are known. left_out: tests that fail without a mutant.
    """

    def __init__(self, work: Callable[[InForks], None]) -> None:
        self._work, self._items, self._failed = work, dict[str, pytest.Item](), False
        self._trusted, self.left_out, self.took_s = set[str](), set[str](), dict[str, float]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed = self._failed or report.failed

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._items = {item.nodeid: item for item in session.items}
        self._work(self)
        return True

    @property
    def names(self) -> list[str]:
        return list(self._items)

    def failing(self, names: Iterable[str], before: Callable[[str], None] = lambda name: None) -> Iterator[str]:
        """In a fork, which ends where a test takes too long: the tests that fail. before: called before each."""
        for name, following in itertools.pairwise([*names, None]):
            assert name is not None
            limit_s = _LEAST_S + _SLOWER * self.took_s[name] if name in self.took_s else _UNKNOWN_S
            signal.alarm(math.ceil(limit_s))
            before(name)
            item, self._failed = self._items[name], False
            next_item = None if following is None else self._items[following]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)
            if self._failed:
                yield name

    def found_by(self, changes: Changes, names: Sequence[str]) -> str | None:
        """The first of these tests that fails with the changes, or what its process died of; None if all pass.

        A test that fails without them too is left out from then on.
        """

        def changed() -> str | None:
            for function, code in changes:
                function.__code__ = code
            return next(self.failing(name for name in names if name not in self.left_out), None)

        while isinstance(found := self.forked(changed), str) and found not in self._trusted:
            if self.forked(lambda: next(self.failing([found]), None)) is None:
                self._trusted.add(found)
            else:
                print(f"{found} fails without a mutant too, and is left out", flush=True)
                self.left_out.add(found)
        return found if found is None else str(found)

    def forked(self, function: Callable[[], Any]) -> Any:
        """The result of a function in a fork, or RuntimeError with what it raised or died of."""
        with tempfile.NamedTemporaryFile() as result:
            if not (pid := os.fork()):
                os.setsid()
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                os.dup2(1, 2)
                try:
                    value: Any = function()
                except BaseException as error:
                    value = RuntimeError(f"{type(error).__name__}: {error}")
                Path(result.name).write_bytes(pickle.dumps(value))
                os._exit(0)
            _, status = os.waitpid(pid, 0)
            with contextlib.suppress(ProcessLookupError):  # what tests have started goes with them
                os.killpg(pid, signal.SIGKILL)
            content = Path(result.name).read_bytes()
        return pickle.loads(content) if content else RuntimeError(f"the process ended with status {status}")


def changes_of(path: Path, module: types.CodeType) -> Changes:
    """The functions of a module whose code is other than that of its file, with this code.

    Raises ValueError where no function's is: what stands outside of them is not run again.
    """
    importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    old, new = _codes(compile(path.read_text(), str(path), "exec", dont_inherit=True)), _codes(module)
    changed = {
        before: after
        for name in old
        for before, after in zip(old[name], new.get(name, []), strict=False)
        if len(old[name]) == len(new[name]) and len(before.co_freevars) == len(after.co_freevars) and before != after
    }
    functions = [
        each
        for each in gc.get_objects()
        if isinstance(each, types.FunctionType) and each.__code__.co_filename == str(path) and each.__code__ in changed
    ]
    if not functions:
        raise ValueError(f"{path.relative_to(ROOT)}: no function that is there has other code with the mutant")
    return [(function, changed[function.__code__]) for function in functions]


def _codes(module: types.CodeType) -> dict[str, list[types.CodeType]]:
    """The code of every function by its whole name, in the order of the text where several share one."""
    found: dict[str, list[types.CodeType]] = {}
    waiting = [module]
    while waiting:
        inner = [each for each in waiting.pop().co_consts if isinstance(each, types.CodeType)]
        waiting += inner
        for code in inner:
            found.setdefault(code.co_qualname, []).append(code)
    return {name: sorted(codes, key=lambda code: code.co_firstlineno) for name, codes in found.items()}


def run_in_forks(tests: Sequence[str], work: Callable[[InForks], None]) -> None:
    """Collects the fast tests of these files and folders for the work. Raises SystemExit where either fails."""
    os.chdir(ROOT)
    options = ["-q", "-s", "-n", "0", *("-p", "no:cacheprovider", "-p", "no:tests.spent"), "-m", fast_tests(), *tests]
    if code := pytest.main(options, plugins=[InForks(work)]):
        sys.exit(int(code))


def fast_tests() -> str:
    """The markers of tests that run always, as scripts/test has them."""
    found = re.search(r'(?m)^marker=\(-m "(.+)"\)$', (ROOT / "scripts" / "test").read_text())
    assert found is not None, "scripts/test says which tests are fast"
    return found[1]
