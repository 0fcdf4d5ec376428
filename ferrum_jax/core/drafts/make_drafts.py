"""The source of drafts that an engine is asked for."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ferrum_jax.core.drafts.drafts import Drafts
from ferrum_jax.core.drafts.mtp_drafts import MtpDrafts
from ferrum_jax.core.drafts.ngram import NgramDrafts
from ferrum_jax.core.drafts.suffix import SuffixDrafts
from ferrum_jax.inputs.sizes.speculative import SpeculativeConfig


def make_drafts(asked: SpeculativeConfig) -> Drafts:
    """The source of a method."""
    given: Mapping[str, Any] = dataclasses.asdict(asked)  # None of what the method does not read
    if asked.method == "ngram":
        return NgramDrafts(prompt_lookup_min=given["prompt_lookup_min"], prompt_lookup_max=given["prompt_lookup_max"])
    if asked.method == "mtp":
        return MtpDrafts()
    assert asked.method == "suffix", f"no drafts are known of method {asked.method}"
    names = ("max_tree_depth", "max_cached_requests", "max_spec_factor", "min_token_prob")
    return SuffixDrafts(**{name: given[f"suffix_decoding_{name}"] for name in names})
