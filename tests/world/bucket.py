"""An object store as a client of it behaves: puts are whole and conditional; listings lag, answers are late or lost."""

import errno
import io
import os
from typing import Any

from tests.world.world import World

URL = "world://b"


class Bucket:
    """lag_s: how late a listing may be. trouble: the share of calls that the service refuses, or whose answer is lost;
    a client repeats some by itself."""

    def __init__(self, world: World, *, lag_s: float = 0.0) -> None:
        self._world, self.lag_s, self.trouble, self.pace = world, lag_s, 0.0, 1.0
        self.objects: dict[str, bytes] = {}
        self._kept: dict[tuple[int, str], list[str]] = {}  # listings that a process's client keeps
        self._listed_s: dict[str, tuple[float, bool]] = {}  # when a listing first has the object, or has it no more

    # -- as fsspec has it --------------------------------------------------------------------------------

    def unstrip_protocol(self, path: str) -> str:
        return f"world://{path}"

    def invalidate_cache(self) -> None:
        for key in [key for key in self._kept if key[0] == self._world.task.process.pid]:
            del self._kept[key]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite") -> None:
        def put() -> None:
            if mode == "create" and path in self.objects:
                raise FileExistsError(path)
            self._put(path, value)

        self._ask(f"put {mode}", path, put)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        return self._ask("get", path, lambda: self._object(path)[start:end])

    def size(self, path: str) -> int:
        return self._ask("head", path, lambda: len(self._object(path)))

    def ls(self, path: str, detail: bool = False) -> list[str]:
        def names() -> list[str]:
            below = path.rstrip("/") + "/"
            found = {below + name[len(below) :].partition("/")[0] for name in self._seen() if name.startswith(below)}
            if not found:
                raise FileNotFoundError(path)
            return sorted(found)

        key = self._world.task.process.pid, path
        if key not in self._kept:
            self._kept[key] = self._ask("list", path, names)
        return self._kept[key]

    def find(self, path: str) -> list[str]:
        below = path.rstrip("/") + "/"
        return self._ask("find", path, lambda: [n for n in self._seen() if n == path or n.startswith(below)])

    def cp_file(self, path: str, target: str) -> None:
        def copy() -> None:
            self._put(target, self._object(path))

        self._ask("copy", target, copy)

    def rm_file(self, path: str) -> None:
        def remove() -> None:
            self._object(path)
            del self.objects[path]
            self._list(path, is_there=False)

        self._ask("remove", path, remove)

    def rm(self, path: str, recursive: bool) -> None:
        found = self.find(path)
        if not found:
            raise FileNotFoundError(path)
        for name in found:
            if name in self.objects:
                self.rm_file(name)

    def open(self, path: str, mode: str) -> io.BytesIO:
        return io.BytesIO(self.cat_file(path))

    def put_file(self, local: str, target: str) -> None:
        with self._world.task.process.machine.disk.open(local, "rb") as file:
            self.pipe_file(target, file.read())

    # -- how it is asked ---------------------------------------------------------------------------------

    def _ask(self, what: str, path: str, act: Any) -> Any:
        """A call acts at some moment before its answer."""
        world, chance = self._world, self._world.random
        away_until = world.task.process.machine.away_until
        if away_until > world.now_s:
            world.pause(min(away_until - world.now_s, 20.0))
            if away_until > world.now_s:
                world.call(f"{what}: no way to it", path)
                raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        seconds = 0.02 * self.pace * (0.3 + chance.random()) * (20 if chance.random() < 0.01 else 1)
        share = chance.random()
        world.call(what, path, seconds * share)
        fails = self.trouble and chance.random() < self.trouble
        if fails and chance.random() < 0.5:
            raise OSError(errno.EBUSY, "503 Slow Down")
        found = act()
        world.pause(seconds * (1 - share))
        if fails:
            world.met_with(f"an answer to {what.partition(' ')[0]} was lost")
            if chance.random() < 0.5:
                raise OSError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
            return act()
        return found

    def _object(self, path: str) -> bytes:
        if path not in self.objects:
            raise FileNotFoundError(path)
        return self.objects[path]

    def _put(self, path: str, value: bytes) -> None:
        if path not in self.objects:
            self._list(path, is_there=True)
        self.objects[path] = value

    def _list(self, path: str, *, is_there: bool) -> None:
        self._listed_s[path] = self._world.now_s + self.lag_s * self._world.random.random(), is_there

    def _seen(self) -> list[str]:
        now_s = self._world.now_s
        return [name for name, (since_s, is_there) in self._listed_s.items() if (since_s <= now_s) == is_there]
