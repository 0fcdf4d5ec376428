"""tunix's rollout over an `LLM`: what a trainer samples from, and where its weights go. Extra: `tunix`.

    rollout = functools.partial(FerrumJaxRollout, llm=llm, names=MAPPING)
    ClusterConfig(..., rollout_engine=rollout)

The trainer's parameters are renamed by a table of patterns, which is data: from paths of its model to parameters of
ours, with what has to be transposed and reshaped. `QWEN3` and `LLAMA3` are those of tunix's own models.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tunix.rl.rollout import base_rollout  # type: ignore[import-not-found]

from ferrum_jax.core.outputs import RequestOutput
from ferrum_jax.llm import LLM
from ferrum_jax.models.families.registry import parameters_of
from ferrum_jax.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True)
class Renamed:
    """Where a trainer's array goes: `to` may have {0}, the pattern's first group.

    ins: how many of its leading axes are inputs; they are put last, and both sides are made one axis each, as a linear
    layer of ours is [out, in]. 0 leaves the array as it is.
    """

    to: str
    ins: int = 0


_LAYERS: Mapping[str, Renamed] = {
    r"layers\.(\d+)\.input_layernorm\.w": Renamed("layers.{0}.attention_norm.weight"),
    r"layers\.(\d+)\.post_attention_layernorm\.w": Renamed("layers.{0}.mlp_norm.weight"),
    r"layers\.(\d+)\.attn\.q_proj\.w": Renamed("layers.{0}.attention.q.weight", ins=1),
    r"layers\.(\d+)\.attn\.k_proj\.w": Renamed("layers.{0}.attention.k.weight", ins=1),
    r"layers\.(\d+)\.attn\.v_proj\.w": Renamed("layers.{0}.attention.v.weight", ins=1),
    r"layers\.(\d+)\.attn\.o_proj\.w": Renamed("layers.{0}.attention.o.weight", ins=2),
    r"layers\.(\d+)\.mlp\.gate_proj\.kernel": Renamed("layers.{0}.mlp.gate.weight", ins=1),
    r"layers\.(\d+)\.mlp\.up_proj\.kernel": Renamed("layers.{0}.mlp.up.weight", ins=1),
    r"layers\.(\d+)\.mlp\.down_proj\.kernel": Renamed("layers.{0}.mlp.down.weight", ins=1),
    r"embedder\.input_embedding": Renamed("embed.weight"),
    r"final_norm\.w": Renamed("norm.weight"),
    r"lm_head\.w": Renamed("head.weight", ins=1),
}
LLAMA3 = _LAYERS
QWEN3 = {
    **_LAYERS,
    r"layers\.(\d+)\.attn\.q_norm\.w": Renamed("layers.{0}.attention.q_norm.weight"),
    r"layers\.(\d+)\.attn\.k_norm\.w": Renamed("layers.{0}.attention.k_norm.weight"),
}


def renamed(params: Any, names: Mapping[str, Renamed]) -> dict[str, jax.Array]:
    """{our parameter: array} of a trainer's state. Raises ValueError naming every array that the table lacks."""
    found: dict[str, jax.Array] = {}
    unknown = []
    for path, array in parameters_of(params).items():
        match = next((m for pattern in names if (m := re.fullmatch(pattern, path))), None)
        if match is None:
            unknown.append(path)
            continue
        rule = names[match.re.pattern]
        found[rule.to.format(*match.groups())] = _as_linear(jnp.asarray(array), rule.ins)
    if unknown:
        raise ValueError(f"names has no pattern for these parameters of the trainer: {', '.join(sorted(unknown))}")
    return found


def _as_linear(array: jax.Array, num_ins: int) -> jax.Array:
    """[out, in] of an array whose first axes are inputs and whose others are outputs."""
    if not num_ins:
        return array
    width = int(np.prod(array.shape[:num_ins]))
    return array.reshape(width, -1).T


class FerrumJaxRollout(base_rollout.BaseRollout):
    """Generates with an `LLM`, which gets the trainer's weights after each of its updates."""

    def __init__(
        self,
        rollout_actor: Any = None,
        tokenizer: Any = None,
        mesh: jax.sharding.Mesh | None = None,
        rollout_config: base_rollout.RolloutConfig | None = None,
        *,
        llm: LLM,
        names: Mapping[str, Renamed] = QWEN3,
    ) -> None:
        """rollout_actor: the trainer's model, whose weights the `LLM` gets at once; None keeps the `LLM`'s weights.

        tokenizer: of the trainer, for its padding; texts are made by the `LLM`'s own, which must be the same. mesh,
        rollout_config: an open `LLM` has its own devices, and each call brings its config.
        """
        self.llm, self._names, self._actor = llm, names, rollout_actor
        self._texts = llm.get_tokenizer()
        self._tokenizer = tokenizer
        del mesh, rollout_config
        if rollout_actor is not None:
            self.update_params(rollout_actor)

    def generate(
        self, prompts: Sequence[str], rollout_config: base_rollout.RolloutConfig, **kwargs: Any
    ) -> base_rollout.RolloutOutput:
        """One completion of each prompt, with the log-probabilities of its tokens. Prompts that are equal are computed
        once. Raises ValueError for arguments that this engine does not know."""
        if kwargs:
            raise ValueError(f"generate has no argument {', '.join(sorted(kwargs))}; leave it out")
        ids = [self._texts.encode(prompt)[-rollout_config.max_prompt_length :] for prompt in prompts]
        params = [self._sampling(rollout_config, number) for number in range(len(ids))]
        outputs = self.llm.generate(ids, params, progress=False)
        return base_rollout.RolloutOutput(
            text=[output.text for output in outputs],
            logits=[],
            tokens=[np.asarray(output.token_ids, np.int32) for output in outputs],
            left_padded_prompt_tokens=self._left_padded(ids, rollout_config.max_prompt_length),
            logprobs=[_logprobs(output) for output in outputs] if rollout_config.return_logprobs else None,
        )

    def get_per_token_logps(self, prompt_tokens: jax.Array, completion_tokens: jax.Array) -> jax.Array:
        """[B, T] log-probabilities of completions [B, T] after prompts [B, S], 0 where a completion is padding."""
        prompts, completions = np.asarray(prompt_tokens), np.asarray(completion_tokens)
        pad = self.pad_id()
        heads = [_without_padding(row, pad) for row in prompts]
        tails = [_without_padding(row[::-1], pad)[::-1] for row in completions]
        found = np.zeros(completions.shape, np.float32)
        for row, scores in zip(found, self.llm.compute_logprobs(heads, tails, progress=False), strict=True):
            row[: len(scores.logprobs)] = scores.logprobs
        return jnp.asarray(found)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Gives the `LLM` the trainer's weights, cast to its dtype. filter_types: these kinds alone, such as LoRA's,
        are refused: the engine takes whole parameters."""
        if filter_types is not None:
            raise ValueError(f"filter_types is {filter_types}; this engine takes whole parameters, so leave it out")
        self.llm.update_weights(renamed(params, self._names), cast=True)

    def pad_id(self) -> int:
        """The padding of rows: the tokenizer's own token, or the end token."""
        found = None if self._tokenizer is None else self._tokenizer.pad_id()
        return self.eos_id() if found is None else int(found)

    def eos_id(self) -> int:
        """The end of a text."""
        found = self._texts.eos_id
        return min(self.llm.loaded.end_ids) if found is None else found

    def model(self) -> Any:
        """The trainer's model that the weights come from."""
        return self._actor

    def _sampling(self, config: base_rollout.RolloutConfig, number: int) -> SamplingParams:
        """The parameters of one row; rows of equal prompts draw differently from one seed."""
        seed = None if config.seed is None else int(np.asarray(jax.random.key_data(config.seed)).astype(np.uint32)[-1])
        return SamplingParams(
            max_tokens=config.max_tokens_to_generate,
            temperature=config.temperature,
            top_p=1.0 if config.top_p is None else config.top_p,
            top_k=config.top_k or 0,
            seed=None if seed is None else seed * 2**20 + number,
            stop_token_ids=config.eos_tokens or (),
            logprobs=0 if config.return_logprobs else None,
        )

    def _left_padded(self, ids: Sequence[Sequence[int]], length: int) -> np.ndarray:
        rows = np.full((len(ids), length), self.pad_id(), np.int32)
        for row, prompt in zip(rows, ids, strict=True):
            row[length - len(prompt) :] = prompt
        return rows


def _logprobs(output: RequestOutput) -> np.ndarray:
    entries = output.outputs[0].logprobs or ()
    found = [entry[token].logprob for entry, token in zip(entries, output.token_ids, strict=True)]
    return np.asarray(found, np.float32)


def _without_padding(row: np.ndarray, pad: int) -> list[int]:
    """A row without the padding at its beginning."""
    own = np.flatnonzero(row != pad)
    return row[own[0] :].tolist() if len(own) else []
