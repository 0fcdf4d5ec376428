"""A hub on loopback: revisions, trees and files of one model, as huggingface_hub asks for them."""

import contextlib
import hashlib
import http.server
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest
from huggingface_hub import constants

from tests.support import GOLDENS


class Hub:
    """One model whose commits are folders. asked: (method, path, bearer) of each request."""

    def __init__(self, model: str) -> None:
        self.model, self.token = model, ""
        self.commits: dict[str, Path] = {}
        self.branches: dict[str, str] = {}
        self.asked: list[tuple[str, str, str | None]] = []
        self.moves_to: Path | None = None  # what main is once it has been asked for
        self.url = self.storage = ""  # contents lie at another host, as the hub's do

    def push(self, folder: Path, branch: str = "main") -> str:
        """The commit that a branch has from now on."""
        commit = hashlib.sha1(f"{folder} {len(self.commits)}".encode()).hexdigest()
        self.commits[commit], self.branches[branch] = folder, commit
        return commit

    @property
    def fetched(self) -> list[str]:
        """Names of the files whose content was asked for."""
        return [path.partition("?")[0].partition("/blob/")[2] for how, path, _ in self.asked if how == "GET"]


@contextlib.contextmanager
def local_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one model, a cache that is empty, and a current folder in which nothing is."""
    with serving(Hub("tiny/model")) as hub:
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
        monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "home" / "token"))
        point_at(hub.url, monkeypatch)
        hub.push(Path(shutil.copytree(GOLDENS / "qwen3", tmp_path / "main")))
        yield hub


def point_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the library, which reads its variables once, ask this hub."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


@contextlib.contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url, hub.storage = (f"http://{host}:{server.server_port}" for host in ("127.0.0.1", "localhost"))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *arguments: object) -> None:
        pass

    def _answer(self) -> None:
        hub, path = self.hub, unquote(self.path.partition("?")[0])
        bearer = self.headers.get("Authorization")
        hub.asked.append((self.command, path, bearer))
        if hub.token and "/blob/" not in path and bearer != f"Bearer {hub.token}":
            return self._send(401, b"", {"X-Error-Code": "RepoNotFound"})
        api, own = f"/api/models/{hub.model}/", f"/{hub.model}/resolve/"
        if path.startswith("/blob/"):
            commit, _, name = path.removeprefix("/blob/").partition("/")
            return self._send(200, (hub.commits[commit] / name).read_bytes(), {"ETag": f'"{self._etag(commit, name)}"'})
        if path.startswith(f"{api}revision/"):
            commit = self._commit(path.removeprefix(f"{api}revision/"))
            if commit is None:
                return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            if hub.moves_to is not None:
                hub.push(hub.moves_to)
                hub.moves_to = None
            return self._send(200, json.dumps({"id": hub.model, "sha": commit, "siblings": []}).encode())
        if path.startswith(f"{api}tree/"):
            commit = path.removeprefix(f"{api}tree/").split("/")[0]
            return self._send(200, json.dumps(list(self._tree(commit))).encode())
        if path.startswith(own):
            revision, _, name = path.removeprefix(own).partition("/")
            return self._resolve(self._commit(revision), name)
        return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _resolve(self, commit: str | None, name: str) -> None:
        """A redirect to where the content lies, with what the file is."""
        if commit is None or not (self.hub.commits[commit] / name).is_file():
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        size = (self.hub.commits[commit] / name).stat().st_size
        headers = {
            "X-Repo-Commit": commit,
            "X-Linked-Etag": f'"{self._etag(commit, name)}"',
            "X-Linked-Size": str(size),
        }
        return self._send(302, b"", headers | {"Location": f"{self.hub.storage}/blob/{commit}/{name}"})

    def _commit(self, revision: str) -> str | None:
        found = self.hub.branches.get(revision, revision)
        return found if found in self.hub.commits else None

    def _tree(self, commit: str) -> Iterator[dict]:
        folder = self.hub.commits[commit]
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            name = path.relative_to(folder).as_posix()
            yield {"type": "file", "path": name, "size": path.stat().st_size, "oid": self._etag(commit, name)}

    def _etag(self, commit: str, name: str) -> str:
        return hashlib.sha1((self.hub.commits[commit] / name).read_bytes()).hexdigest()

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)
