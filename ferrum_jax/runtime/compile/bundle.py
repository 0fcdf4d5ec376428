"""Bundles: the executables of one engine, made anywhere, shipped as a folder.

    BUNDLE/manifest.json             what it is for: target, mesh, model, config, Environment, and a line for each part
    BUNDLE/parts/SHA256.executable   the executables, named by their own content

`BundleWriter` adds parts as they are made; an interrupted one is continued. `Bundle` reads one;
`BundledExecutables` gives an engine the parts that fit and lets the others be compiled, or refuses. A bundle is code:
one that others may write to, or a part whose bytes are not those of the manifest, is never loaded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from checkpoints.file_names import name_inside
from ferrum_jax.config import EngineConfig
from ferrum_jax.io.files.store import UrlStore
from ferrum_jax.io.paths import is_url
from ferrum_jax.models.families.registry import AnySpec
from ferrum_jax.runtime.compile.deferred import DeferredExecutable
from ferrum_jax.runtime.compile.environment import Environment
from ferrum_jax.runtime.compile.executable_store import (
    ExecutableCache,
    Unloadable,
    digest,
    load_executable,
    others_may_write,
    write_beside,
)
from ferrum_jax.runtime.compile.lowered import Lowered
from ferrum_jax.runtime.compile.pieces import LoweredPieces
from ferrum_jax.runtime.compile.remote_folder import local_folder, remote_of

FORMAT = 1
_MANIFEST, _PARTS = "manifest.json", "parts"
# Fields of the config that each run chooses for itself.
_NOT_COMPILED = (
    *("seed", "devices", "request_log", "compilation_cache_dir", "on_recompile", "ready", "kv_tier"),
    *("allow_image_hosts", "image_root", "generation_config", "kv_tier_bytes"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Purpose:
    """A bundle's purpose. device_ids: of the mesh, in its order. spec: digest of the model's spec.

    config: fields of EngineConfig, with the number of blocks that was chosen.
    """

    target: str
    device_ids: Sequence[int]
    spec: str
    config: Mapping[str, Any]
    environment: Environment


@dataclasses.dataclass(frozen=True, kw_only=True)
class _BundledExecutable:
    what: str
    sha256: str
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bundle:
    """A bundle whose manifest was read. parts: by the digest of their description.

    name: the folder or URL that was named. path: where its files are on this machine. remote: the folder behind the
    URL, from which files come that are not here yet; None of a local folder.
    """

    name: str
    path: pathlib.Path
    purpose: Purpose
    parts: Mapping[str, _BundledExecutable]
    remote: UrlStore | None = None

    @classmethod
    def open(cls, path: str | pathlib.Path) -> Bundle:
        """Raises ValueError naming the folder or URL where it is not a bundle, is damaged, cannot be read, or others
        may write to it."""
        folder, remote = local_folder(path), remote_of(str(path))
        name = str(folder) if remote is None else remote.url
        manifest = folder / _MANIFEST
        if remote is not None:
            _fetch_manifest(remote, folder)
        if not manifest.is_file():
            raise ValueError(f"{name} is not a bundle: it has no {_MANIFEST}; make one with `ferrum-jax compile`")
        for place in (folder, manifest, folder / _PARTS):
            if others_may_write(place):
                raise ValueError(
                    f"bundle {name}: others can write to {place.name}; what lies there is run as code: make it "
                    "yours alone (chmod -R go-w)"
                )
        return cls(name=name, path=folder, remote=remote, **_read_manifest(manifest, name))

    def differences(self, devices: Sequence[Any], spec: str) -> list[str]:
        """Why none of its executables can run on these devices for this model, a phrase for each reason."""
        own = self.purpose
        found = Environment.of_device(devices[0]).differences(own.environment)
        ids = [device.id for device in devices]
        if list(own.device_ids) != ids:
            found.append(f"its mesh is of devices {list(own.device_ids)}, here of {ids}")
        if own.spec != spec:
            found.append(f"it is of another model (spec {own.spec[:12]}, here {spec[:12]})")
        return found

    def read(self, name: str) -> bytes | None:
        """The bytes of a part; None of a name that it has not. Raises ValueError where they are not the manifest's."""
        part = self.parts.get(name)
        if part is None:
            return None
        if self.remote is not None and not _is_whole(self.path, part):
            _fetch_executable(self.remote, self.path, part)
        return _read_executable(self.path, part)


class BundledExecutables:
    """Executables of a bundle; those that it lacks or that cannot run here come from `fallback`, or are refused.

    devices: those of the engine's mesh. fallback: None compiles. required: refuse instead. spec: the model's digest.
    found: names of the parts that it had; hits counts them. misses: parts that came from elsewhere.
    problems: a sentence for everything that did not fit; on_problem is told each.
    """

    def __init__(
        self,
        bundle: Bundle,
        devices: Sequence[Any],
        *,
        spec: str,
        fallback: ExecutableCache | None,
        required: bool,
        on_problem: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._bundle = bundle
        self._devices = devices
        self._fallback = fallback
        self._required = required
        self._on_problem = on_problem
        self._lock = threading.Lock()
        self.found: list[str] = []
        self.misses = 0
        self.problems: list[str] = []
        differences = bundle.differences(devices, spec)
        self._fits = not differences
        if differences:
            self._report(f"none of its executables can run here: {'; '.join(differences)}")

    @property
    def hits(self) -> int:
        return len(self.found)

    def get(self, description: str, lower: Callable[[], Lowered | LoweredPieces]) -> DeferredExecutable:
        """The executable, from the bundle or from elsewhere. ValueError instead of the latter if it is required."""
        payload = self._read(description) if self._fits else None
        if payload is None:
            return self._elsewhere(description, lower)
        with self._lock:
            self.found.append(_what(description))
        return DeferredExecutable(lambda: self._load(description, payload, lower))

    def _load(self, description: str, payload: bytes, lower: Callable[[], Lowered | LoweredPieces]) -> Any:
        try:
            return load_executable(payload, self._devices)
        except Unloadable as error:
            self._report(f"{_what(description)}: {error}")
            with self._lock:
                self.found.remove(_what(description))
            return self._elsewhere(description, lower).result()

    def _elsewhere(self, description: str, lower: Callable[[], Lowered | LoweredPieces]) -> DeferredExecutable:
        with self._lock:
            self.misses += 1
        if self._required:
            raise ValueError(
                f"{'; '.join(self.problems)}; make the bundle anew with `ferrum-jax compile`, or leave the requirement "
                "out so that what is missing is compiled here"
            )
        return (
            DeferredExecutable.made(lower().compile())
            if self._fallback is None
            else self._fallback.get(description, lower)
        )

    def _read(self, description: str) -> bytes | None:
        try:
            payload = self._bundle.read(digest(description))
        except ValueError as error:
            self._report(str(error))
            return None
        if payload is None:
            self._report(f"it has no {_what(description)} for this config")
        return payload

    def _report(self, problem: str) -> None:
        text = f"bundle {self._bundle.name}: {problem}"
        with self._lock:
            self.problems.append(text)
        if not self._required:  # else it is in the error
            self._on_problem(text)


def config_for(config: EngineConfig | None, bundle: Bundle | None) -> EngineConfig:
    """The config of an engine that may have a bundle: as given, else the bundle's, else the defaults.

    A config that leaves mesh, rows or the size of the KV pool open takes the bundle's, for its executables know no
    other.
    """
    if bundle is None:
        return config or EngineConfig()
    own = bundle.purpose.config
    if config is None:
        return EngineConfig(**own)
    names = ["mesh", "max_num_seqs", *(["num_blocks"] if config.kv_memory_bytes is None else [])]
    return dataclasses.replace(config, **{name: own.get(name) for name in names if getattr(config, name) is None})


def begun_bundle(path: str | pathlib.Path) -> Bundle | None:
    """The bundle that a folder holds, None where nothing is yet. Raises ValueError where it holds something else."""
    if is_url(str(path)):
        raise ValueError(f"{path} is a URL, and a bundle is made in a folder: name one, and copy it there afterwards")
    folder = pathlib.Path(path).expanduser()
    if (folder / _MANIFEST).is_file():
        return Bundle.open(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not a bundle; name a folder that does not exist or is empty")
    return None


def purpose_of(target: str, config: EngineConfig, mesh: Mesh, spec: AnySpec) -> Purpose:
    """A bundle's purpose. config: with the number of blocks that was chosen, where there are any."""
    devices = mesh.devices.flatten().tolist()
    fields = dataclasses.asdict(config)  # as its manifest has them
    return Purpose(
        target=target,
        device_ids=[device.id for device in devices],
        spec=spec_digest(spec),
        config={name: value for name, value in fields.items() if name not in _NOT_COMPILED},
        environment=Environment.of_device(devices[0]),
    )


def spec_digest(spec: AnySpec) -> str:
    return digest(spec.digest_text())


class BundleWriter:
    """Adds parts to a bundle, one that was begun too.

    Raises ValueError where the folder holds something else, or a bundle for another purpose.
    """

    def __init__(self, path: str | pathlib.Path, purpose: Purpose) -> None:
        self._path = pathlib.Path(path).expanduser()
        self._purpose = purpose
        there = begun_bundle(self._path)
        if there is not None and there.purpose != purpose:
            raise ValueError(
                f"{self._path} holds a bundle for another purpose ({_changes(there.purpose, purpose)}); delete it, "
                "or write this one elsewhere"
            )
        self._parts: dict[str, _BundledExecutable] = {} if there is None else dict(there.parts)
        (self._path / _PARTS).mkdir(parents=True, exist_ok=True, mode=0o755)
        self._write_manifest()

    @property
    def num_bytes(self) -> int:
        return sum(part.bytes for part in self._parts.values())

    def has(self, description: str) -> bool:
        """Whether the part is there and whole."""
        part = self._parts.get(digest(description))
        return part is not None and _is_whole(self._path, part)  # else it is made again

    def put(self, description: str, payload: bytes) -> None:
        """Adds a part; it is there for good when this returns."""
        part = _BundledExecutable(
            what=_what(description), sha256=hashlib.sha256(payload).hexdigest(), bytes=len(payload)
        )
        write_beside(_file(self._path, part), payload, mode=0o644)
        replaced = self._parts.get(digest(description))
        self._parts[digest(description)] = part
        self._write_manifest()
        if replaced is not None and replaced.sha256 not in {part.sha256 for part in self._parts.values()}:
            _file(self._path, replaced).unlink(missing_ok=True)

    def _write_manifest(self) -> None:
        purpose = dataclasses.asdict(self._purpose)
        parts = {name: dataclasses.asdict(part) for name, part in sorted(self._parts.items())}
        text = json.dumps({"format": FORMAT, "purpose": purpose, "parts": parts}, indent=1)
        write_beside(self._path / _MANIFEST, text.encode(), mode=0o644)


def _what(description: str) -> str:
    """A program's name for people: the first words of the description, which end at the first newline."""
    return description.partition("\n")[0]


def _file(folder: pathlib.Path, part: _BundledExecutable) -> pathlib.Path:
    return folder / _PARTS / f"{part.sha256}.executable"


def _read_executable(folder: pathlib.Path, part: _BundledExecutable) -> bytes:
    """The part's bytes. Raises ValueError saying what is wrong with its file."""
    path = _file(folder, part)
    if not path.is_file():
        raise ValueError(f"{part.what}: its file {path.name} is missing")
    if others_may_write(path):
        raise ValueError(f"{part.what}: others can write to its file {path.name} (chmod go-w)")
    data = path.read_bytes()
    if len(data) != part.bytes:
        raise ValueError(f"{part.what}: its file has {len(data):,} bytes instead of {part.bytes:,}")
    if hashlib.sha256(data).hexdigest() != part.sha256:
        raise ValueError(f"{part.what}: its file is damaged, its sha256 is not the manifest's")
    return data


def _is_whole(folder: pathlib.Path, part: _BundledExecutable) -> bool:
    try:
        return bool(_read_executable(folder, part))
    except ValueError:
        return False


def _fetch_manifest(remote: UrlStore, folder: pathlib.Path) -> None:
    """Puts the manifest of a bundle behind a URL beside the parts that are kept of it. Raises ValueError."""
    try:
        data = remote.read(_MANIFEST)
        if data is None:
            raise ValueError(f"{remote.url} is not a bundle: it has no {_MANIFEST}; make one with `ferrum-jax compile`")
        for place in (folder, folder / _PARTS):
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_beside(folder / _MANIFEST, data)
    except OSError as error:
        raise ValueError(f"bundle {remote.url} cannot be read: {error}; name a copy in a folder, or none") from error


def _fetch_executable(remote: UrlStore, folder: pathlib.Path, part: _BundledExecutable) -> None:
    """Puts a part where `_read_executable` finds it, and proves it. Raises ValueError."""
    path = _file(folder, part)
    try:
        data = remote.read(f"{_PARTS}/{path.name}")
        if data is not None:
            write_beside(path, data)
    except OSError as error:
        raise ValueError(f"{part.what}: {error}") from error


def _read_manifest(path: pathlib.Path, name: str) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_bytes())
        if manifest["format"] != FORMAT:
            raise ValueError(f"its format is {manifest['format']}, and this version reads {FORMAT}")
        purpose = manifest["purpose"]
        EngineConfig(**purpose["config"])  # who opens a bundle runs with it
        environment = Environment.from_json(purpose.pop("environment"))
        parts = {name: _BundledExecutable(**part) for name, part in manifest["parts"].items()}
        for part in parts.values():
            name_inside(part.sha256, path)
        return {"purpose": Purpose(environment=environment, **purpose), "parts": parts}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"bundle {name}: its {_MANIFEST} cannot be read: {error}; another version made it, or "
            "it is damaged: make the bundle anew with `ferrum-jax compile`"
        ) from error


def _changes(there: Purpose, wanted: Purpose) -> str:
    found = wanted.environment.differences(there.environment)
    for field in ("target", "device_ids", "spec"):
        if getattr(there, field) != getattr(wanted, field):
            found.append(f"its {field} is {getattr(there, field)}, not {getattr(wanted, field)}")
    names = {*there.config, *wanted.config}
    found += [
        f"its {name} is {there.config.get(name)!r}, not {wanted.config.get(name)!r}"
        for name in sorted(names)
        if there.config.get(name) != wanted.config.get(name)
    ]
    return "; ".join(found)
