"""The place of a job: its output and, beside it, the folder of its journal."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping

from ferrum_jax.batch.files import writing_rows
from ferrum_jax.batch.journal import Journal
from ferrum_jax.batch.merge import merge
from ferrum_jax.batch.responses import JobIdentity
from ferrum_jax.batch.rows import Rows
from ferrum_jax.batch.store import Store, is_url, split


class Place:
    """The output and its journal, and what is known of the job as a whole."""

    def __init__(self, target: str, open_store: Callable[[str], Store]) -> None:
        folder, self.name = split(target)
        self.target = target
        self.output, self.journal = open_store(folder), open_store(f"{target}.journal")

    def identity(self, settings: Mapping[str, object], model: str, now: Callable[[], float]) -> JobIdentity:
        """What the lines of this job share: from its record, or recorded now. Raises ValueError for another job."""
        content = json.dumps(settings, sort_keys=True).encode()
        fingerprint = f"fp_{hashlib.blake2b(content, digest_size=8).hexdigest()}"
        record = {"created": int(now()), "fingerprint": fingerprint, "settings": settings}
        found = self.journal.read("job.json")
        if found is None:
            if self.output.size(self.name) is not None:
                raise ValueError(
                    f"{self.target} is there without its journal, {self.target}.journal, so it is not known what it "
                    "holds; move it away or name another output"
                )
            self.journal.create("job.json", json.dumps(record).encode())
            found = self.journal.read("job.json")  # another worker may have been first
            assert found is not None, "the job's record is gone"
        self._refuse_overwriting(found)
        known = json.loads(found)
        if known["fingerprint"] != fingerprint:
            raise ValueError(
                f"{self.target} was begun with other settings, {known['settings']}, now {dict(settings)}; "
                "go on with those of the first start, or name another output"
            )
        return JobIdentity(model=model, created=known["created"], fingerprint=fingerprint)

    def _refuse_overwriting(self, record: bytes) -> None:
        """Raises ValueError if the store makes a file anew that is there: no lease would hold on it."""
        if is_url(self.target) and self.journal.create("job.json", record):
            raise ValueError(
                f"{self.target} is on a store that has no conditional writes: it made a file that was there already, "
                "so two workers could run the same rows; name an output on another store or on this machine"
            )

    def is_merged(self, layout: str) -> bool:
        """Whether the output is there and holds a line for each of these rows."""
        found = self.journal.read("merged.json")
        if found is None:
            return False
        merged = json.loads(found)
        return merged["layout"] == layout and self.output.size(self.name) == merged["bytes"]

    def merge(self, rows: Rows, journal: Journal) -> None:
        with self.output.writing(self.name) as output, writing_rows(output, self.name) as lines:
            merge(rows, journal, self.journal, lines)
        merged = {"layout": rows.layout, "bytes": self.output.size(self.name)}
        self.journal.replace("merged.json", json.dumps(merged).encode())
