"""A disk with a page cache, as POSIX allows one to be: what was not synced may be lost, in any order, and in part.

A file's bytes last from its fsync on, a name from the sync of its folder on, and neither brings the other. A power cut
keeps of each folder any of the changes since its last sync, but a rename happens or does not, and keeps of a file's
bytes any sectors. Names of a folder that was not kept are gone with it.
"""

from __future__ import annotations

import errno
import io
import itertools
import os
import posixpath
import stat as stat_of
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

from tests.world.world import World

_SECTOR = 512
_SECONDS = {"fsync": 0.004, "sync": 0.004, "link": 0.0002, "replace": 0.0002, "read": 0.0005, "list": 0.0004}


class Node:
    """A file or folder. lasting: of its bytes or names, what a power cut leaves."""

    def __init__(self, is_folder: bool) -> None:
        self.is_folder = is_folder
        self.data, self.lasting = b"", b""
        self.names: dict[str, Node] = {}
        self.lasting_names: dict[str, Node] = {}
        self.changes: list[_Change] = []  # since the last sync


class _Change(NamedTuple):
    """names: what they stand for after it, None for nothing. after: a change of another folder without which it is
    not kept."""

    names: dict[str, Node | None]
    after: _Change | None = None


class _File(io.BytesIO):
    """A file open to be written. Its bytes are the node's once they are flushed."""

    def __init__(self, disk: Disk, node: Node, path: str) -> None:
        super().__init__()
        self._disk, self._node, self._path = disk, node, path
        self._is_flushed = True

    def write(self, content: Any) -> int:
        self._is_flushed = False
        return super().write(content)

    def flush(self) -> None:
        if not self._is_flushed:
            self._disk.ask("write", self._path)
            self._node.data, self._is_flushed = self.getvalue(), True

    def fileno(self) -> int:
        return self._disk.handle_of(self._node, self._path)

    def close(self) -> None:
        if not self.closed:
            try:
                self.flush()
            finally:
                super().close()


class Disk:
    """is_sure: every change lasts at once, as on a server that many machines share. pace: of its calls, 1 is normal."""

    def __init__(self, world: World, *, is_sure: bool = False) -> None:
        self._world, self._is_sure = world, is_sure
        self.root = Node(is_folder=True)
        self.pace, self.is_full = 1.0, False
        self._handles: dict[int, tuple[Node, str]] = {}
        self._numbers = itertools.count(3)
        self.makedirs("/tmp")
        self.sync_all()

    # -- what happens to it ------------------------------------------------------------------------------

    def put(self, path: str, content: bytes) -> None:
        """A file is there, before anything happens, in place of what was."""
        self.makedirs(posixpath.dirname(path))
        folder, name = self._place(path)
        folder.names[name] = node = Node(is_folder=False)
        node.data = content
        self.sync_all()

    def sync_all(self) -> None:
        for node, _ in self._nodes(self.root, "/"):
            self._settle(node)

    def cut(self) -> None:
        """The power goes."""
        chance, kept = self._world.random, dict[int, bool]()
        self._handles.clear()
        for node, _ in list(self._nodes(self.root, "/")):  # a node that only a lost name leads to is there too
            if node.is_folder:
                is_in_order = chance.random() < 0.3
                most = chance.randrange(len(node.changes) + 1)
                for place, change in enumerate(node.changes):
                    stays = place < most if is_in_order else chance.random() < 0.5
                    stays = stays and (change.after is None or kept.setdefault(id(change.after), True))
                    if kept.setdefault(id(change), stays):
                        self._apply(node.lasting_names, change)
                    else:
                        self._world.met_with("a name was lost with the power")
            elif node.data != node.lasting:
                node.lasting = self._torn(node)
                self._world.met_with("bytes were lost with the power")
        self._forget(self.root, set())

    def _torn(self, node: Node) -> bytes:
        chance = self._world.random
        size = chance.choice((len(node.data), len(node.lasting), chance.randrange(len(node.data) + 1)))
        found = bytearray(node.lasting[:size].ljust(size, b"\0"))
        for start in range(0, size, _SECTOR):
            if chance.random() < 0.5:
                found[start : start + _SECTOR] = node.data[start : min(start + _SECTOR, size)]
        return bytes(found[:size])

    def _forget(self, node: Node, seen: set[int]) -> None:
        """The page cache is empty: what lasts is all that is there."""
        if id(node) in seen:
            return
        seen.add(id(node))
        node.data, node.names, node.changes = node.lasting, dict(node.lasting_names), []
        for each in node.names.values():
            self._forget(each, seen)

    def _nodes(self, node: Node, path: str) -> Iterator[tuple[Node, str]]:
        """All nodes that are there, and those that a lost change would bring back."""
        found, todo = {id(node)}, [(node, path)]
        while todo:
            node, path = todo.pop()
            yield node, path
            then = {**node.lasting_names, **node.names}
            for name, each in [*then.items(), *((n, e) for c in node.changes for n, e in c.names.items())]:
                if each is not None and id(each) not in found:
                    found.add(id(each))
                    todo.append((each, posixpath.join(path, name)))

    def _apply(self, names: dict[str, Node], change: _Change) -> None:
        for name, node in change.names.items():
            if node is None:
                names.pop(name, None)
            else:
                names[name] = node

    def _settle(self, node: Node) -> None:
        node.lasting, node.lasting_names, node.changes = node.data, dict(node.names), []

    # -- what is asked of it -----------------------------------------------------------------------------

    def ask(self, what: str, path: str) -> None:
        """A call takes its time, which nobody knows before; and others have their turns meanwhile."""
        world = self._world
        seconds = _SECONDS.get(what, 0.0001) * self.pace * (0.5 + world.random.random())
        world.call(what, path, seconds)
        away_until = world.task.process.machine.away_until
        if self._is_sure and away_until > world.now_s:
            world.pause(away_until - world.now_s)
        if self.is_full and what in ("open", "write"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def handle_of(self, node: Node, path: str) -> int:
        number = next(self._numbers)
        self._handles[number] = node, path
        return number

    def _find(self, path: Any) -> Node | None:
        node: Node | None = self.root
        for part in os.fspath(path).split("/"):
            if part not in ("", "."):
                node = node.names.get(part) if node is not None and node.is_folder else None
        return node

    def _node(self, path: Any) -> Node:
        node = self._find(path)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
        return node

    def _place(self, path: Any) -> tuple[Node, str]:
        folder, name = posixpath.split(os.fspath(path))
        return self._node(folder), name

    def _change(self, folder: Node, names: dict[str, Node | None], after: _Change | None = None) -> _Change:
        change = _Change(names, after)
        self._apply(folder.names, change)
        folder.changes.append(change)
        if self._is_sure:
            self._settle(folder)
        return change

    def _take(self, path: Any) -> Node:
        self.ask("open", os.fspath(path))
        folder, name = self._place(path)
        node = Node(is_folder=False)
        self._change(folder, {name: node})
        return node

    def open(self, path: Any, mode: str = "r") -> Any:
        if isinstance(path, int):
            return _File(self, *self._handles.pop(path))
        if "w" in mode:
            node = self._find(path) or self._take(path)
            node.data = b""
            return _File(self, node, os.fspath(path))
        self.ask("read", os.fspath(path))
        return io.BytesIO(self._node(path).data)

    def mkstemp(self, *, prefix: str, dir: Any) -> tuple[int, str]:
        path = posixpath.join(os.fspath(dir), f"{prefix}{self._world.random.getrandbits(32):08x}")
        return self.handle_of(self._take(path), path), path

    def fsync(self, handle: int) -> None:
        node, path = self._handles.pop(handle)
        self.ask("fsync", path)
        node.lasting = node.data

    def sync_folder(self, folder: Any) -> None:
        self._node(folder)
        self.ask("sync", os.fspath(folder))
        self._settle_names(self._node(folder))

    def _settle_names(self, node: Node) -> None:
        node.lasting_names, node.changes = dict(node.names), []

    def chmod(self, path: Any, mode: int) -> None:
        self._node(path)

    def link(self, path: Any, target: Any) -> None:
        self.ask("link", os.fspath(target))
        node, (folder, name) = self._node(path), self._place(target)
        if name in folder.names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(target))
        self._change(folder, {name: node})

    def replace(self, path: Any, target: Any) -> None:
        self.ask("replace", os.fspath(target))
        (source, old), (folder, name) = self._place(path), self._place(target)
        node = self._node(path)
        if source is folder:
            self._change(folder, {old: None, name: node})
        else:
            self._change(source, {old: None}, after=self._change(folder, {name: node}))

    rename = replace

    def unlink(self, path: Any) -> None:
        self._node(path)
        self.ask("unlink", os.fspath(path))
        folder, name = self._place(path)
        self._node(path)
        self._change(folder, {name: None})

    def makedirs(self, path: Any, exist_ok: bool = True) -> None:
        node = self.root
        for part in os.fspath(path).split("/"):
            if part and part not in node.names:
                self._change(node, {part: Node(is_folder=True)})
            node = node.names[part] if part else node

    def listdir(self, path: Any) -> list[str]:
        self.ask("list", os.fspath(path))
        return list(self._node(path).names)

    def stat(self, path: Any) -> Any:
        self.ask("stat", os.fspath(path))
        node = self._node(path)
        kind = stat_of.S_IFDIR if node.is_folder else stat_of.S_IFREG
        return SimpleNamespace(st_mode=kind | 0o755, st_size=len(node.data))

    lstat = stat

    def exists(self, path: Any) -> bool:
        return self._find(path) is not None

    lexists = exists

    def isdir(self, path: Any) -> bool:
        node = self._find(path)
        return node is not None and node.is_folder

    def isfile(self, path: Any) -> bool:
        return self.exists(path) and not self.isdir(path)

    def islink(self, path: Any) -> bool:
        return False

    def access(self, path: Any, mode: int) -> bool:
        return True

    def realpath(self, path: Any) -> str:
        return posixpath.normpath(os.fspath(path))

    def samefile(self, one: Any, other: Any) -> bool:
        return self._node(one) is self._node(other)

    def TemporaryFile(self) -> io.BytesIO:
        return io.BytesIO()

    @contextmanager
    def TemporaryDirectory(self, prefix: str = "tmp", dir: Any = "/tmp") -> Iterator[str]:
        path = posixpath.join(os.fspath(dir), f"{prefix}{self._world.random.getrandbits(32):08x}")
        self.ask("mkdir", path)
        folder, name = self._place(path)
        self._change(folder, {name: Node(is_folder=True)})
        try:
            yield path
        finally:
            self.ask("rmtree", path)
            self._change(folder, {name: None})
