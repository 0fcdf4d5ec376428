"""ServerSettings: every choice a user makes about a server, checked when it is made."""

import dataclasses
import os
import re
from collections.abc import Iterable, Sequence

from ferrum_jax.openai.asked import BodyLimits
from ferrum_jax.serve.http.api_keys import ApiKey

_COUNTS = ("max_waiting", "max_waiting_tokens", "max_body_bytes", "max_n", "max_prompts")
_COUNTS += ("max_file_bytes", "max_batch_rows", "max_stored_bytes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How a server behaves.

    names: of the model; answers carry the first, and /v1/models lists the first num_listed. adapter_root, weights_root:
    folders below which adapters, and weights in the place of these, may be read over HTTP; None reads none so.
    batches: folder or URL that keeps files and batches; None takes none. max_file_bytes, max_stored_bytes: of one file,
    of all files. max_batch_rows: of one batch. version: that /version tells. keys: who may ask; none lets everybody.
    admin_keys: who may look at metrics and the page and load adapters, where there are keys; they alone may pause the
    engine and change its weights.
    max_waiting, max_waiting_tokens: of requests that the engine does not have yet; beyond them new ones are refused.
    max_body_bytes, max_n, max_prompts: of one request. timeout_s: after which a request without one of its own is given
    up; None never. watchdog_s: a step that takes longer makes /health fail. body_s: in which a body must have come.
    cors_origins: pages that may ask, "*" all. ignore_unknown_fields: unknown and unsupported fields of a body become a
    header `Warning` instead of an error.

    Raises ValueError with the field, its value and what is allowed.
    """

    names: Sequence[str] = ("model",)
    num_listed: int | None = None
    adapter_root: str | None = None
    weights_root: str | None = None
    batches: str | None = None
    max_file_bytes: int = 200 << 20
    max_batch_rows: int = 50_000
    max_stored_bytes: int = 10 << 30
    version: str = ""
    keys: Sequence[ApiKey] = ()
    admin_keys: Sequence[ApiKey] = ()
    max_waiting: int = 1024
    max_waiting_tokens: int = 4_000_000
    max_body_bytes: int = 32 << 20
    max_n: int = 128
    max_prompts: int = 2048
    timeout_s: float | None = None
    watchdog_s: float = 30.0
    body_s: float = 30.0
    cors_origins: Sequence[str] = ()
    ignore_unknown_fields: bool = False

    def __post_init__(self) -> None:
        for field in _COUNTS:
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field} is {value!r}; it must be a whole number, 1 or more")
        for field in ("timeout_s", "watchdog_s", "body_s"):
            value = getattr(self, field)
            if value is not None and not value > 0:
                raise ValueError(f"{field} is {value!r}; it must be a number of seconds, more than 0")
        for origin in self.cors_origins:
            if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
                raise ValueError(f"a CORS origin is {origin!r}; it must be '*' or as in 'https://example.org'")
        if not self.names:
            raise ValueError("names is empty; a model must have a name")
        for field, holds in (("adapter_root", "adapters"), ("weights_root", "folders of weights")):
            root = getattr(self, field)
            if root is not None and not os.path.isdir(root):
                raise ValueError(f"{field} is {root}, which is no folder; name the one that holds {holds}")
        if self.batches is not None and os.path.isfile(self.batches):
            raise ValueError(f"batches is {self.batches}, which is a file; name a folder, which need not be there yet")
        if self.weights_root is not None and not self.admin_keys:
            raise ValueError("weights_root is given and no admin key, which alone may change weights; give admin keys")

    @property
    def roots(self) -> tuple[str | None, str | None]:
        """adapter_root and weights_root."""
        return self.adapter_root, self.weights_root

    def require_apart(self, adapters: Iterable[str]) -> None:
        """Raises ValueError where an adapter has one of the model's names."""
        if twice := sorted(set(self.names) & set(adapters)):
            raise ValueError(f"an adapter and the model are both called {twice[0]!r}; give the adapter another name")

    @property
    def listed(self) -> Sequence[str]:
        return self.names[: self.num_listed]

    @property
    def limits(self) -> BodyLimits:
        return BodyLimits(max_n=self.max_n, max_prompts=self.max_prompts, ignores_unknown=self.ignore_unknown_fields)
