"""The identity of a model that runs: all of it that can change an answer, as values that are compared.

Two runs with equal identities answer a request alike. Their environments (devices, versions, mesh) may differ: these
decide the last bits of a number, and in invariant mode bits are promised only where they are equal too.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

KNOWN_LATER = ("weights", "adapter")  # once a model is loaded


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelIdentity:
    """weights: the model's fingerprint, of spec, dtype and a sample of every tensor, and behind a dot how often they
    were updated, which a sample may not show; None before they are read.

    tokenizer, chat_template: digests of their files, None where there is none. end_tokens: ids that end a text.
    vectors: how states become vectors, as text. adapter: names and digests of those that are loaded, "" is none, None
    before they are known. images: a digest of how they are processed, None where prompts take none.
    generation: how requests are sampled that say nothing of it. environment: what may change, by name.
    weights_once: the fingerprint that an earlier version gave the model.
    """

    weights: str | None
    tokenizer: str | None
    chat_template: str | None
    end_tokens: tuple[int, ...]
    vectors: str
    dtype: str
    kv_dtype: str
    max_model_len: int
    invariant: bool
    adapter: str | None = ""
    images: str | None = None
    generation: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)
    weights_once: str | None = dataclasses.field(default=None, compare=False)

    def values(self, recorded: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The compared values by name, as JSON; values of KNOWN_LATER only once they are known.

        recorded: the values of a job. A fingerprint that an earlier version recorded of these weights is kept.
        """
        found = dataclasses.asdict(self)
        del found["environment"]
        once = found.pop("weights_once")
        if once is not None and recorded and recorded.get("weights") == once:
            found["weights"] = once
        for name in KNOWN_LATER:
            if found[name] is None:
                del found[name]
        for name in ("images", "generation"):
            if not found[name]:
                del found[name]
        return {**found, "end_tokens": list(self.end_tokens)}


def digest_of(*parts: object) -> str:
    """32 hex digits that digest JSON values and bytes."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        content = part if isinstance(part, bytes) else json.dumps(part, sort_keys=True).encode()
        state.update(len(content).to_bytes(8, "little") + content)
    return state.hexdigest()
