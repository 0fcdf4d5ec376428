"""The identity of a job: all that can change a line of its output, recorded in its journal and compared at each start.

    job.json           when the job was begun, and the settings of its command: recorded at once
    model.json         the values of the ModelIdentity that answers: recorded before the first row is answered
    hub.json           for a hub's model, the requested revision and its commit: recorded before it is fetched
    environments/      a file for each environment in which rows were answered, named by its digest
    reused/            a file for each earlier output whose answers rows may have taken, likewise

Settings and values that differ are refused by name. Environments may differ, because a job may go on on any machine;
in invariant mode the user is told that bits may differ then, and with `strict_bits` that is refused.
"""

import datetime
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ferrum_jax.batch.journal.journal_file import file_of, object_in
from ferrum_jax.batch.journal.keeper import JobOptions
from ferrum_jax.batch.journal.responses import JobLabel
from ferrum_jax.inputs.identity import KNOWN_LATER, ModelIdentity, digest_of
from ferrum_jax.io import system
from ferrum_jax.io.files.store import Store

FORMAT = 1  # of all files of a journal
RECORD = "job.json"
REQUIRE_VALID = "require_valid"  # a setting, recorded where it is asked for
_MODEL, _HUB, _ENVIRONMENTS, _REUSED = "model.json", "hub.json", "environments", "reused"
OF_MODEL = (_MODEL, _ENVIRONMENTS, _REUSED)  # recorded once a model is loaded
BEFORE_ROWS = (*OF_MODEL, _HUB, RECORD)  # the job's record last: without it nothing else counts
_OF_HUB = frozenset(("model", "revision", "commit"))
_MAX_SHOWN = 60  # characters of a value


class JobRefused(ValueError):
    """The job was begun with something else, or somewhere else; no row of it can be answered here."""


class SettingsChanged(JobRefused):
    """The job was begun with other settings. changes: a phrase for each, which names no path of the job."""

    def __init__(self, target: str, changes: Sequence[str]) -> None:
        super().__init__(
            f"{target} was begun with other settings: {'; '.join(changes)}. Use those of its first start, or "
            "begin anew with --new-run, which moves the old job aside"
        )
        self.changes = tuple(changes)


class JobIdentity:
    """The records of one job, read and extended by one of its workers."""

    def __init__(
        self, store: Store, target: str, record: Mapping[str, Any], options: JobOptions, say: Callable[[str], None]
    ) -> None:
        """record: job.json. say: told what a user should know at the start."""
        self._store, self._target, self._options, self._say = store, target, options, say
        self.created: int = record["created"]
        self._settings: Mapping[str, Any] = record["settings"]
        self._begun: list[tuple[ModelIdentity, dict[str, str]]] = []  # of models that answer here

    @property
    def started(self) -> datetime.datetime:
        """The recorded start, the clock of chat templates."""
        return _moment(self.created)

    @property
    def requires_valid(self) -> bool:
        """Whether a row whose structure was cut off fails."""
        return bool(self._settings.get(REQUIRE_VALID))

    def check(self, identity: ModelIdentity) -> None:
        """Raises JobRefused unless a model of this identity may answer. Values of KNOWN_LATER need not be known."""
        recorded = self._read(_MODEL)
        if recorded is not None:
            now = identity.values(recorded)
            if "generation" not in recorded:
                now.pop("generation", None)  # the job took none, and goes on so
            before = {name: value for name, value in recorded.items() if name not in KNOWN_LATER or name in now}
            refuse_changes(self._target, before, now)
        if self._options.strict_bits:
            self._require_bits(identity)

    @property
    def generation(self) -> Mapping[str, Any] | None:
        """The model's own defaults of sampling that the job took; None before a model has answered."""
        recorded = self._read(_MODEL)
        return None if recorded is None else recorded.get("generation", {})

    def pin(self, model: str, revision: str | None, resolve: Callable[[str | None], str | None]) -> str | None:
        """The commit to load of a hub's model: the one recorded, else that of the revision, which is recorded.

        resolve: gives a revision's commit, or None for a model that is not a hub's. Raises JobRefused where another
        model is recorded, or the revision is another commit.
        """
        recorded = self._read(_HUB)
        if recorded is None:
            commit = resolve(revision)
            if commit is None:
                return None
            content = {"format": FORMAT, "model": model, "revision": revision, "commit": commit}
            self._store.create(_HUB, file_of(content))
            recorded = self._read(_HUB)  # another worker may have been first
            assert recorded is not None, "what is recorded stays"
        before, now = {"hub model": recorded["model"], "commit": recorded["commit"]}, {"hub model": model}
        known = recorded["model"] == model and revision in (None, recorded["revision"])
        refuse_changes(self._target, before, now | {"commit": recorded["commit"] if known else resolve(revision)})
        return recorded["commit"]

    def begin(self, identity: ModelIdentity | None) -> None:
        """Records the identity before it answers the first row, and is asked at each. None is not known yet.

        Raises JobRefused as `check` does.
        """
        if identity is None or (begun := (identity, dict(identity.environment))) in self._begun:
            return
        assert None not in (identity.weights, identity.adapter), "the weights are known once a model is loaded"
        if (record := self._read(RECORD)) is not None:  # until a row is begun others may replace it
            refuse_changes(self._target, record["settings"], self._settings)
        self._record(identity)
        self._keep(_ENVIRONMENTS, identity.environment)
        if self._options.strict_bits:
            self._require_bits(identity)  # another worker may have been first here too
        self._begun.append(begun)
        differences = self.differing_bits()
        if differences:
            self._say(
                f"Rows of this job are answered in different environments: {'; '.join(differences)}. Their bits may "
                "differ from those of a job that ran in only one; --strict-bits refuses such a start."
            )

    def reuse(self, outputs: Sequence[Mapping[str, Any]], environments: Sequence[Mapping[str, str]]) -> None:
        """Records earlier outputs, before a row takes an answer of theirs, and other environments that gave these."""
        for folder, kept in ((_REUSED, outputs), (_ENVIRONMENTS, environments)):
            for each in kept:
                self._keep(folder, each)

    def _keep(self, folder: str, values: Mapping[str, Any]) -> None:
        self._store.create(f"{folder}/{digest_of(dict(values))}.json", file_of(values))

    def _record(self, identity: ModelIdentity) -> None:
        """Raises JobRefused as `check` does."""
        self.check(identity)
        self._store.create(_MODEL, file_of(identity.values()))
        self.check(identity)  # another worker may have been first

    @functools.cached_property
    def label(self) -> JobLabel:
        """The label that every line has. Asked for once a model answers."""
        for identity, _ in self._begun:  # one that came before there was a row may have removed what was recorded
            self._record(identity)
        fingerprint = fingerprint_of(self._settings, self._read(_MODEL))
        return JobLabel(model=self._settings["model"], created=self.created, fingerprint=fingerprint)

    def differing_bits(self) -> list[str]:
        """How the environments of an invariant job differ, each difference a phrase; none if bits are equal or were
        never promised to be."""
        model = self._read(_MODEL)
        if model is None or not model.get("invariant"):
            return []
        first, *others = self._kept(_ENVIRONMENTS) or [{}]
        return list(dict.fromkeys(phrase for other in others for phrase in environment_changes(first, other)))

    def implementations(self) -> dict[str, str]:
        """The attention, with its tiles, that answered rows on each kind of device, where it was only one."""
        found: dict[str, set[str]] = {}
        for environment in self._kept(_ENVIRONMENTS):
            if {"device_kind", "implementation"} <= environment.keys():
                found.setdefault(environment["device_kind"], set()).add(environment["implementation"])
        return {kind: names.pop() for kind, names in found.items() if len(names) == 1}

    def report(self, num_reused: int = 0) -> dict[str, Any]:
        """The job's entries of report.json. num_reused: rows that have the answer of an earlier output."""
        hub = self._read(_HUB)
        identity = {
            **self._settings,
            **({} if hub is None else {"commit": hub["commit"]}),
            **(self._read(_MODEL) or {}),
        }
        found: dict[str, Any] = {"environments": self._kept(_ENVIRONMENTS), "differing_bits": self.differing_bits()}
        if earlier := self._kept(_REUSED):
            found["reused"] = {"rows": num_reused, "outputs": earlier}
        return {"identity": identity, **found}

    def record(self) -> dict[str, Any]:
        """The job's part of the report's record: its settings, the model that answered, the lines' fingerprint."""
        model, hub = self._read(_MODEL), self._read(_HUB)
        return {
            "created": self.created,
            "settings": dict(self._settings),
            "model": model,
            "commit": None if hub is None else hub["commit"],
            "fingerprint": None if model is None else fingerprint_of(self._settings, model),
        }

    def _require_bits(self, identity: ModelIdentity) -> None:
        if not identity.invariant:
            raise JobRefused(
                "--strict-bits needs invariant mode, without which bits differ from run to run; add --invariant (on "
                "the CPU in float32), or leave --strict-bits out"
            )
        here = {name: str(value) for name, value in identity.environment.items()}
        changes = [phrase for other in self._kept(_ENVIRONMENTS) for phrase in environment_changes(other, here)]
        if changes:
            raise JobRefused(
                f"rows of {self._target} were answered in another environment: {'; '.join(dict.fromkeys(changes))}; "
                "go on there, begin anew here with --new-run, or leave --strict-bits out if bits may differ"
            )

    def _kept(self, folder: str) -> list[dict[str, str]]:
        found = [self._read(f"{folder}/{name}") for name in sorted(self._store.names(folder))]
        return [each for each in found if each is not None]

    def _read(self, name: str) -> dict[str, Any] | None:
        """The file's record, or None. Raises JobRefused for a damaged file."""
        content = self._store.read(name)
        recorded = object_in(content)
        needed = _OF_HUB if name == _HUB else frozenset()
        if content is not None and (recorded is None or not needed <= recorded.keys()):
            raise JobRefused(
                f"{self._target}.journal cannot be continued: its {name} is damaged; begin anew with --new-run"
            )
        return recorded


def fingerprint_of(settings: Mapping[str, Any], model: Mapping[str, Any] | None) -> str:
    """The digest of settings and model identity that a job's lines carry."""
    return f"fp_{digest_of(settings, model)[:16]}"


def begun_with(store: Store, model: str, revision: str | None) -> str | None:
    """The commit with which a job began, where it began with this model of a hub and with no other revision."""
    recorded = object_in(store.read(_HUB)) or {}
    is_same = recorded.get("model") == model and revision in (None, recorded.get("revision"))
    return recorded.get("commit") if is_same else None


def new_record(settings: Mapping[str, object], names: Sequence[str], now: float) -> bytes:
    """The content of job.json. names: by which rows may name the model."""
    record = {"format": FORMAT, "created": int(now), "settings": settings, "names": list(names)}
    return file_of(record)


def read_record(content: bytes, target: str) -> dict[str, Any]:
    """job.json. Raises JobRefused for one that is damaged or of another version."""
    kinds = {"created": int, "settings": dict, "names": list}
    known = object_in(content) or {}
    fits = all(isinstance(known.get(name), kind) for name, kind in kinds.items())
    if known.get("format") != FORMAT or not fits or not all(isinstance(name, str) for name in known["names"]):
        raise JobRefused(
            f"{target}.journal cannot be continued: its job.json is damaged or of another version (format "
            f"{known.get('format')!r}, this version reads {FORMAT}); end the job with the version that began it, or "
            "begin anew with --new-run"
        )
    return known


def started_of(record: Mapping[str, Any] | None) -> datetime.datetime:
    """The time that chat templates see: the recorded start of the job, or now if it has not begun."""
    return _moment(system.now() if record is None else record["created"])


def _moment(seconds: float) -> datetime.datetime:
    """The time in UTC, because machines differ in their time zones. seconds: since 1970."""
    return datetime.datetime.fromtimestamp(int(seconds), datetime.UTC)


def refuse_changes(target: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises SettingsChanged, naming each value that has changed."""
    if changes := changed_values(before, now):
        raise SettingsChanged(target, changes)


def changed_values(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A phrase for each value that is not what it was."""
    names = [name for name in dict.fromkeys((*before, *now)) if before.get(name) != now.get(name)]
    return [f"{_phrase(name)} {_shown(before, name)}, now {_shown(now, name)}" for name in names]


def environment_changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """A phrase for each value that differs."""
    return [
        f"{_phrase(name)} {_differing(before.get(name, ''), now.get(name, ''))}"
        for name in dict.fromkeys((*before, *now))
        if before.get(name) != now.get(name)
    ]


def _differing(before: str, now: str) -> str:
    """'A and B' for two texts; for long ones, which are lists of words, only the words that the other lacks."""
    if max(len(before), len(now)) > _MAX_SHOWN:
        had, has = before.split(), now.split()
        before, now = (" ".join(word for word in a if word not in set(b)) for a, b in ((had, has), (has, had)))
    return f"{before[:_MAX_SHOWN] or 'none'!r} and {now[:_MAX_SHOWN] or 'none'!r}"


def _phrase(name: str) -> str:
    return {"sources": "program"}.get(name, name.replace("_", " "))


def _shown(values: Mapping[str, Any], name: str) -> str:
    if name not in values:
        return "none"
    text = json.dumps(values[name], ensure_ascii=False)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... (digest {digest_of(values[name])[:12]})"
