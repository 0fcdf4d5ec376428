"""The source of drafts that an engine is asked for."""

from __future__ import annotations

from ferrum_jax.sizes.speculative import SpeculativeConfig
from ferrum_jax.speculation.drafts import Drafts
from ferrum_jax.speculation.mtp_drafts import MtpDrafts
from ferrum_jax.speculation.ngram import NgramDrafts
from ferrum_jax.speculation.suffix import SuffixDrafts


def make_drafts(asked: SpeculativeConfig) -> Drafts:
    """The source of a method."""
    if asked.method == "ngram":
        return NgramDrafts(prompt_lookup_min=asked.prompt_lookup_min, prompt_lookup_max=asked.prompt_lookup_max)
    if asked.method == "mtp":
        return MtpDrafts()
    assert asked.method == "suffix", f"no drafts are known of method {asked.method}"
    return SuffixDrafts(
        max_tree_depth=asked.suffix_decoding_max_tree_depth,
        max_cached_requests=asked.suffix_decoding_max_cached_requests,
        max_spec_factor=asked.suffix_decoding_max_spec_factor,
        min_token_prob=asked.suffix_decoding_min_token_prob,
    )
