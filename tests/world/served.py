"""Histories of a server's batches: what users ask over HTTP while its processes, and what keeps its files, fail.

A server is two processes, the clerk's and that of HTTP, whose routes are the real ones. Where many machines have a
store, two servers have one folder. What a user was answered is in the books, and holds from then on.
"""

import asyncio
import functools
import hashlib
import json
import logging
import math
import random
import re
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

from starlette.requests import ClientDisconnect

from ferrum_jax.batch.journal.leases import LeaseLost
from ferrum_jax.io import system
from ferrum_jax.io.files import store as stores
from ferrum_jax.openai.asked import BodyLimits
from ferrum_jax.serve.app.application import application
from ferrum_jax.serve.batches.batch_folder import BatchFolder
from ferrum_jax.serve.batches.clerk import Clerk, ClerkTimes
from ferrum_jax.serve.batches.input_lines import InputRules
from ferrum_jax.serve.batches.stored import FINAL, BatchState, batch_form
from ferrum_jax.serve.http.api_keys import ApiKey
from ferrum_jax.serve.http.settings import ServerSettings
from tests.batch.fake_llm import FakeLLM
from tests.world.bucket import URL
from tests.world.disk import Disk
from tests.world.history import SERVED, Failed, History, Plan
from tests.world.published import files_of, identity_of
from tests.world.world import Machine, Process, Task

_ENDPOINT = "/v1/completions"
_KEYS = ("the key of one", "the key of another")
_RANKS = {"validating": 0, "in_progress": 1, "finalizing": 2, "cancelling": 3, **dict.fromkeys(FINAL, 4)}
_TIMEOUT_S = 60.0  # after which a user asks again
_NUM_ALTERED = 7  # every such row fails
_DIGEST = re.compile(rb'"line": "[0-9a-f]+"')  # of a whole line, also of when its batch was created
_LOOPS: list[asyncio.AbstractEventLoop] = []  # free ones, as each opens files
_log = logging.getLogger("ferrum_jax.serve")


class Served(History):
    """slots: by turns a clerk and the HTTP of its server. files, batches: by id, whose, and what was seen of it last.
    leaving, gone: ids that a user asked to have deleted, and that are."""

    pauses = 3.0  # beyond a clerk's lease
    num_users = (2, 3, 5)

    def __init__(self, plan: Plan, *, is_logged: bool = False) -> None:
        super().__init__(plan, is_logged=is_logged)
        self.root = f"{URL}{SERVED}" if plan.store == "bucket" else SERVED
        self.keys: tuple[str, ...] = _KEYS
        self.outside = Machine("outside", Disk(self.world))
        self.files: dict[str, tuple[str, bytes]] = {}
        self.batches: dict[str, tuple[str, dict[str, Any]]] = {}
        self.leaving, self.gone = set[str](), set[str]()
        self.is_calm = False  # nothing happens: what is answered is right
        self.lines: dict[bytes, tuple[dict[str, Any], bytes, bytes]] = {}  # by input: a calm batch, output and errors

    def run(self) -> History:
        async def at_once(work: Any, *args: Any, **how: Any) -> Any:
            return work(*args, **how)

        def read(record: logging.LogRecord) -> bool:
            """Keeps an error that is no disk's, as nothing else may fail."""
            if isinstance(error := sys.exc_info()[1], Exception) and not isinstance(error, OSError):
                self.world.failures.append(error)
            return False

        bucket = lambda url: (self.bucket, url.removeprefix("world://"))  # noqa: E731
        with (
            mock.patch.object(asyncio, "to_thread", at_once),
            mock.patch.object(stores, "open_url", bucket),
            mock.patch.object(_log, "filters", [read]),
        ):
            return super().run()

    # -- its processes -----------------------------------------------------------------------------------

    def machine(self, who: int) -> Machine:
        return self.machines[who // 2 % len(self.machines)]

    @property
    def folder(self) -> BatchFolder:
        return BatchFolder(self.root, most_stored_bytes=1 << 20)

    @property
    def settings(self) -> ServerSettings:
        keys = [ApiKey(digest=hashlib.sha256(key.encode()).digest(), name=key, salt="") for key in self.keys]
        return ServerSettings(names=(self.model,), batches=self.root, keys=keys)

    def _begin(self) -> None:
        super()._begin()
        for number in range(4 if self.is_calm else self.world.random.choice(self.num_users)):
            user = self.world.start(self.outside, f"user{number}", functools.partial(self._user, number))
            self.users.append(user)

    def _start(self, who: int) -> None:
        self.num_starts += 1
        work = self._answer if who % 2 else functools.partial(self._clerk, self.plan.steps_s[who])
        process = self.slots[who] = self.world.start(self.machine(who), f"p{who}.{self.num_starts}", work)
        self._set_fuse(who, process)

    def _clerk(self, step_s: float) -> int:
        world, chance = self.world, self.world.random
        world.pause(chance.choice((0.0, 0.5, 3.0)))  # the model loads
        step = lambda llm: world.pause(world.long(step_s))  # noqa: E731
        names = (self.model,)

        def rules_of(endpoint: str) -> InputRules:
            most = {"max_rows": 1000, "max_line_bytes": 1 << 16, "limits": BodyLimits()}
            return InputRules(endpoint=endpoint, names=names, listed=names, **most)

        def llm_for(owner: str) -> Any:
            return FakeLLM(order=chance.getrandbits(20), width=16, identity=self.identity, on_step=step)

        times = ClerkTimes(poll_s=chance.choice((1.0, 3.0)), flush_s=chance.choice((0.5, 2.0)), pause_s=2.0)
        clerk = Clerk(self.folder, llm_for, rules_of, times)
        world.task.process.notice = SimpleNamespace(give=lambda *_: clerk.end())
        clerk.run()
        return 0

    def _answer(self) -> int:
        app = self.world.task.process.options = application(self.settings, None)
        metrics = SimpleNamespace(answered=lambda *_: None)
        app.state.service = SimpleNamespace(
            settings=self.settings, metrics=metrics, num_open=0, require_ready=lambda: None
        )
        system.Event().wait()
        return 0

    def _ended(self, who: int, process: Process) -> None:
        """It is begun anew, as a server's processes are."""
        found, chance = process.result, self.world.random
        if isinstance(found, BaseException) and not isinstance(found, LeaseLost):
            raise Failed(f"a server's process raised {found!r}") from found
        said = "notice" if found == 0 else "a kill" if found is None else type(found).__name__
        self.world.met_with(f"a server's process ended by {said}")
        self.at(self.world.now_s + chance.choice((0.1, 1.0, 10.0)), lambda: self._again(who))

    def lose_power(self, machine: Machine) -> None:
        for process in [each for each in machine.processes if not each.has_ended]:
            self.world.kill(process)
        machine.boots += 1
        if self.plan.store == "disk":
            machine.disk.cut()
            self._require_books()

    # -- its users ---------------------------------------------------------------------------------------

    def _user(self, number: int) -> int:
        """Uploads, has it answered, and reads the answers; some cancel, some delete what they have no use for."""
        world, chance = self.world, random.Random(f"{self.plan.seed} {number}")
        key, known = self.keys[number % len(self.keys)], inputs(self.plan.num_rows)
        world.pause(0.0 if self.is_calm else 20.0 * chance.random() ** 2)
        content = known[number] if self.is_calm else chance.choice(known)
        file = self._do(key, "POST", "/v1/files", *_form(content))["id"]
        self.files[file] = key, content
        window = "24h" if self.is_calm or chance.random() < 0.8 else "1m"
        asked = {"input_file_id": file, "endpoint": _ENDPOINT, "completion_window": window}
        found = self._do(key, "POST", "/v1/batches", json.dumps(asked).encode())
        cancels_s = math.inf if self.is_calm or chance.random() < 0.6 else world.now_s + 20.0 * chance.random() ** 2
        place = f"/v1/batches/{found['id']}"
        while True:
            self._see(key, found)
            if found["status"] in FINAL:
                break
            world.pause(chance.choice((1.0, 4.0)))
            if world.now_s >= cancels_s:
                cancels_s = math.inf
                self._do(key, "POST", f"{place}/cancel", ok=(200, 409))
            found = self._do(key, "GET", place)
            if chance.random() < 0.2:
                self._require_apart(key)
        self._require_lines(
            found, content, *(self._content(key, found[f"{what}_file_id"]) for what in ("output", "error"))
        )
        for path in (place, f"/v1/files/{file}"):
            if not self.is_calm and chance.random() < 0.5:
                self._delete(key, path)
        return 0

    def _delete(self, key: str, path: str) -> None:
        """Another batch may read a file, that of a request whose answer was lost."""
        name = path.rpartition("/")[2]
        self.leaving.add(name)
        if "error" not in self._do(key, "DELETE", path, ok=(200, 404, 409)):
            self.gone.add(name)
            self._do(key, "GET", path, ok=(404,))

    def _content(self, key: str, file: str | None) -> bytes:
        if file is None:
            return b""
        size = self._do(key, "GET", f"/v1/files/{file}")["bytes"]
        while True:
            status, found = self._told(key, "GET", f"/v1/files/{file}/content")
            if status == 200 and len(found) == size:
                self.files[file] = key, found
                return found

    def _require_apart(self, key: str) -> None:
        """A list has all of a key, but for what a bucket lists late, and nothing of another's, which is not told."""
        for kind, books in (("files", self.files), ("batches", self.batches)):
            own = {each for each, (owner, _) in books.items() if owner == key} - self.leaving
            gone, others = {*self.gone}, [each for each, (owner, _) in books.items() if owner != key]
            listed = {each["id"] for each in self._do(key, "GET", f"/v1/{kind}")["data"]}
            if listed & {*others}:
                raise Failed(f"a list of {kind} has another's")
            if self.plan.store != "bucket" and (gone & listed or own - listed - self.leaving):
                raise Failed(f"the list of {kind} has {gone & listed}, which were deleted, and lacks {own - listed}")
            for other in others[:1]:
                self._do(key, "GET", f"/v1/{kind}/{other}", ok=(404,))

    def _do(self, key: str, method: str, path: str, *body: Any, ok: tuple[int, ...] = (200,)) -> dict[str, Any]:
        status, found = self._told(key, method, path, *body)
        if status not in ok:
            raise Failed(f"{method} {path} was answered with {status} {found[:200]!r}")
        return json.loads(found)

    def _told(self, key: str, method: str, path: str, *body: Any) -> tuple[int, bytes]:
        """What a server answers, which is asked again until it has no trouble."""
        headers = [(b"authorization", b"Bearer " + key.encode()), *body[1:]]
        scope = {"type": "http", "asgi": {"spec_version": "2.4"}, "method": method, "path": path, "raw_path": b""}
        scope |= {"query_string": b"", "headers": headers, "http_version": "1.1", "scheme": "http"}
        while True:
            there = [each for each in self.slots[1::2] if each is not None and each.options and not each.is_dead]
            found: list[tuple[int, bytes]] = []
            if there:
                process = self.world.random.choice(there)
                work = functools.partial(_exchange, process.options, dict(scope), body[0] if body else b"", found)
                task = Task(self.world, process, work, name="request")
                task.start()
                task.join(_TIMEOUT_S)
            if found and found[0][0] < 500:
                return found[0]
            self.world.met_with(f"{method} was answered with {found[0][0]}" if found else f"{method} was not answered")
            self.world.pause(2.0)

    # -- what must hold ----------------------------------------------------------------------------------

    def _see(self, key: str, form: dict[str, Any]) -> None:
        """A batch goes on and never back, and stays as it ended."""
        before, now = self.batches.get(form["id"], (key, form))[1], form["status"]
        if _RANKS[now] < _RANKS[before["status"]] or (before["status"] in FINAL and form != before):
            raise Failed(f"a batch that was {before} is {form}")
        if before["cancelling_at"] not in (None, form["cancelling_at"]):
            raise Failed("a batch that was cancelled is not, or at another time")
        self.batches[form["id"]] = key, form
        self.world.met_with(f"a batch was {now}")

    def _require_lines(self, form: dict[str, Any], content: bytes, output: bytes, errors: bytes) -> None:
        """The lines of a batch that has ended are those of a calm one, each once and in order."""
        if self.is_calm:
            self.lines[content] = form, output, errors
            return
        calm, *wanted = answers(self.plan.num_rows)[content]
        asked_at, moment = (b'"created": %d,' % each["created_at"] for each in (calm, form))
        counts, status = form["request_counts"], form["status"]
        found = [output, b"".join(line for line in errors.splitlines(True) if b'"batch_expired"' not in line)]
        for lines, whole in zip(found, (each.replace(asked_at, moment) for each in wanted), strict=True):
            lines, whole = (_DIGEST.sub(b"", each).splitlines() for each in (lines, whole))
            rest = iter(whole)
            if not all(line in rest for line in lines) or (status == "completed" and lines != whole):
                raise Failed(f"a batch that was {status} has {len(lines)} lines that are not those of {len(whole)}")
        if (counts["completed"], counts["failed"]) != (output.count(b"\n"), errors.count(b"\n")):
            raise Failed(f"{counts} are told of a batch that has other lines")
        if (
            status == "expired"
            and form["in_progress_at"]
            and sum(map(bool, counts.values()))
            and (counts["completed"] + counts["failed"] != counts["total"])
        ):
            raise Failed(f"a row of a batch that expired has no line: {counts}")
        if status == "failed" and calm["status"] != "failed" and self.plan.store != "bucket":
            raise Failed(f"a batch failed: {form['errors']}")

    def _require_books(self) -> None:
        """What users were answered is there."""
        folder = self.folder
        for name, (_, content) in list(self.files.items()):
            found = folder.file(name)
            if found is not None and name in self.gone:
                raise Failed("a file that was deleted is there")
            if name not in self.leaving and (found is None or folder.read(name, 0, 1 << 20) != content):
                raise Failed(f"a file that was told to be kept is {found}")
        for name, (key, before) in list(self.batches.items()):
            asked, state = folder.batch(name), folder.state(name)
            if asked is not None and name in self.gone:
                raise Failed("a batch that was deleted is there")
            if name not in self.leaving:
                if asked is None or state is None:
                    raise Failed(f"a batch that was told to be begun is not there: {before}")
                self._see(key, batch_form(asked, state, folder.cancelled_at(name)))

    def _is_over(self) -> bool:
        """Whether users have their answers, and nothing is left of the jobs that made them."""
        if not all(user.has_ended for user in self.users):
            return False
        folder = self.folder
        states = [folder.state(each.id) or BatchState() for each in folder.batches()]
        if not all(state.is_final for state in states):
            return False
        if is_left := len(folder.store.names("jobs")) > 1:  # of a clerk that slept, or a listing that came late
            for clerk in self.slots[::2]:
                if clerk is not None and clerk.notice is not None:
                    clerk.notice.give()
        return not is_left

    @property
    def bound_s(self) -> float:
        return 600.0 + (len(self.users) + 3) * (30.0 + self.plan.num_rows * max(self.plan.steps_s))

    def _require_life(self) -> None:
        for user in self.users:
            if isinstance(user.result, BaseException):
                raise user.result
        super()._require_life()

    def _prove(self) -> None:
        if self.world.failures:
            raise Failed(f"a thread failed: {self.world.failures[0]!r}") from self.world.failures[0]
        self._require_books()
        folder = self.folder

        def content(file: str | None) -> bytes:
            return folder.read(file, 0, 1 << 20) if file else b""

        for asked in folder.batches():  # those too whose answer was lost
            state = folder.state(asked.id)
            if state is not None and folder.file(asked.input_file) is not None:
                form = batch_form(asked, state, folder.cancelled_at(asked.id))
                files = (asked.input_file, state.output_file, state.error_file)
                self._require_lines(form, *map(content, files))


def _exchange(app: Any, scope: dict[str, Any], body: bytes, found: list[tuple[int, bytes]]) -> None:
    """A request, on a thread of its server; nothing is found where its connection breaks."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    try:
        loop = _LOOPS.pop() if _LOOPS else asyncio.new_event_loop()
        try:
            loop.run_until_complete(app(scope, receive, send))
        finally:
            _LOOPS.append(loop)
    except (OSError, ClientDisconnect):  # while the content of a file is sent
        return
    found.append((sent[0]["status"], b"".join(each.get("body", b"") for each in sent[1:])))


def _form(content: bytes) -> tuple[bytes, tuple[bytes, bytes]]:
    """The body of an upload, and its header."""
    parts = {'name="purpose"': b"batch", 'name="file"; filename="rows.jsonl"': content}
    body = b"".join(
        b"--=\r\nContent-Disposition: form-data; %s\r\n\r\n%s\r\n" % (n.encode(), c) for n, c in parts.items()
    )
    return body + b"--=--\r\n", (b"content-type", b"multipart/form-data; boundary==")


@functools.cache
def inputs(num_rows: int) -> tuple[bytes, ...]:
    """Files of rows; the last one is no batch."""
    return (*(b"".join(map(_row, range(size))) for size in (1, num_rows // 4, num_rows)), 2 * _row(0))


def _row(index: int) -> bytes:
    how = {"temperature": -1.0 if index % _NUM_ALTERED == 3 else 0.8, "n": 1 + (index % 5 == 0)}
    body = {"model": "fake", "prompt": f"prefix {index % 5} {index}", "max_tokens": 3 + index % 11, **how}
    return json.dumps({"custom_id": f"row-{index}", "method": "POST", "url": _ENDPOINT, "body": body}).encode() + b"\n"


@functools.cache
def answers(num_rows: int) -> dict[bytes, tuple[dict[str, Any], bytes, bytes]]:
    """A batch of each input that nothing disturbs: as it ended, its output and its errors."""
    history = Served(Plan(seed=0, kind="server-disk", num_rows=num_rows, steps_s=(0.05, 0.05), faults=()))
    history.is_calm = True
    history.run()
    ended = [history.lines[content] for content in inputs(num_rows)]
    assert [form["status"] for form, _, _ in ended] == ["completed"] * 3 + ["failed"]
    assert all(
        output.count(b"\n") + errors.count(b"\n") == form["request_counts"]["total"]
        for form, output, errors in ended[:3]
    )
    return history.lines


class PublishedServer(Served):
    """The folder of a server that was killed: a batch has ended, one is in progress and one is not begun."""

    def __init__(self, plan: Plan, *, is_logged: bool = False) -> None:
        super().__init__(plan, is_logged=is_logged)
        self.model, self.identity, self.keys = "tiny", identity_of("batches"), ()
        self.ended = dict[str, tuple[bytes, bytes]]()  # output and errors, by id

    def _put_files(self, disk: Disk) -> None:
        for path, content in files_of("batches").items():  # batches expire a day after they were made
            disk.put(path, re.sub(rb'"expires": \d+', b'"expires": 9999999999', content))

    def _begin(self) -> None:
        History._begin(self)
        folder = self.folder
        self.files = {each.id: ("", folder.read(each.id, 0, 1 << 20)) for each in folder.files()}
        for asked in folder.batches():
            self._see("", batch_form(asked, folder.state(asked.id) or BatchState(), None))

    def _require_lines(self, form: dict[str, Any], content: bytes, output: bytes, errors: bytes) -> None:
        self.ended[form["id"]] = output, errors
        if not self.is_calm and self.ended[form["id"]] != published_answers()[form["id"]]:
            raise Failed(f"a batch that an earlier version began has other lines: {form}")


@functools.cache
def published_answers() -> dict[str, tuple[bytes, bytes]]:
    """What those batches have where nothing disturbs them: the answers that were there, and those of the others."""
    history = PublishedServer(Plan(seed=0, kind="server-published-disk", num_rows=24, steps_s=(0.05, 0.05), faults=()))
    history.is_calm = True
    history.run()
    lines = {line for output, _ in history.ended.values() for line in output.splitlines()}
    kept = [content.splitlines() for path, content in files_of("batches").items() if "/segments/" in path]
    records = [record.split(b" ", 4)[4] for each in kept for record in each]
    assert len(records) == 20 and lines.issuperset(records) and len(lines) == 32
    return history.ended
