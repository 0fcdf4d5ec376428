"""ModelSpec: one decoder, and which cache each of its layers has.

`CacheGroup` names the layers that share one kind of cache. A layer has none, one or two: blocks, and a recurrent state.
Or it attends to the keys and values of another layer, whose blocks it borrows. `digest_text()` is the part of the
spec that decides the keys and values of a token: two specs with equal text may share a prefix cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from checkpoints.stored_weight import WeightForm
from ferrum_jax.models.spec.checks import check_above_zero, check_positive
from ferrum_jax.models.spec.digest_text import model_text
from ferrum_jax.models.spec.feed_forward import ExpertsSpec, MlpSpec
from ferrum_jax.models.spec.heads import AttentionSpec, IndexerSpec
from ferrum_jax.models.spec.recurrence import RecurrenceSpec
from ferrum_jax.models.spec.sound import SoundSpec
from ferrum_jax.models.spec.vision import VisionSpec

NORM_KINDS = ("rms", "layer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamsSpec:
    """Hyper-connections: each token has num_streams residuals, which a half of a layer reads and adds to by weights.

    magnitude: what a half gives is added with up to this weight. eps: of each weight beside its sigmoid.
    """

    num_streams: int
    magnitude: float
    eps: float

    def __post_init__(self) -> None:
        check_positive(self, "num_streams")
        check_above_zero(self, "magnitude")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheGroup:
    """Layers whose cache is kept alike, under one block table.

    kind: "full" (all tokens), "window", "cross" (of layers that attend to the clip of their row's request: its keys and
    values, no blocks), or "state" (recurrent layers: a state for each row, no blocks). window: positions that a
    token attends to, its own the last; None for all. chunked: of these only those in its stretch of `window` positions,
    which begin at multiples of it.
    """

    kind: str
    layers: tuple[int, ...]
    window: int | None = None
    chunked: bool = False

    def __post_init__(self) -> None:
        if (self.window or 0) < 1 if self.kind == "window" else self.window is not None:
            raise ValueError(f"a cache group of kind {self.kind!r} has window {self.window}")
        assert self.kind == "window" or not self.chunked, "chunks are a shape of a window"


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormSpec:
    """Every norm of a model, but for those of heads, which are RMSNorms.

    kind: "rms" or "layer", which takes the mean off first. bias: of LayerNorms. zero_centred: they multiply by
    1 + weight. rounds_once: of RMSNorms, the product with the weight is rounded to the dtype, not the quotient too.
    before, after: what attention and MLP are given is normed, what they give. gate_rank: the norms before attention
    and before experts are followed by a gate, which the normed values make through this many; 0 is no gate.
    """

    kind: str = "rms"
    eps: float = 1e-6
    bias: bool = False
    zero_centred: bool = False
    rounds_once: bool = False
    before: bool = True
    after: bool = False
    gate_rank: int = 0

    def __post_init__(self) -> None:
        assert self.kind in NORM_KINDS, f"kind is {self.kind!r}; known are {NORM_KINDS}"
        assert self.before or self.after, "layers without norms"
        assert not self.gate_rank or (self.kind == "rms" and self.before), "no layer computes this"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerInputSpec:
    """An input of each layer beside the residual: values of a token and layer, which a gate of the layer weighs.

    size: values of a token and layer. hidden_act: of the gate. image_id: the token whose values stand for images.
    """

    size: int
    hidden_act: str
    image_id: int = 0

    def __post_init__(self) -> None:
        check_positive(self, "size")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One decoder model.

    attention: of all layers but those of other_attention, which are pairs (layers, their attention).
    mlp: of all layers but those of other_mlp, which are pairs (layers, their MLP).
    experts: None where every layer has an MLP. recurrence: of the layers of the group "state".
    without_mlp: layers that have neither MLP nor experts.
    vision, sound: the encoders of images and of sounds, or None; two make embeddings of one width.
    learned_positions: each position has a vector, which is added to the embedding of its token.
    borrowed: pairs (layer without own keys and values, the earlier layer to whose keys and values it attends).
    layer_inputs: None where layers are given the residual alone. layer_scales: what a layer gives is multiplied by a
    weight, one number. hyper_connections: None where a token has one residual.
    parallel: attention and MLP are given the same norm's output. embedding_scale,
    residual_multiplier, logit_scale: embeddings, what a layer's halves add, and logits of tokens are multiplied by it.
    head_bias: of a head that is no embedding. wide_head: its weight is float32 in every dtype.
    final_logit_softcapping: logits become cap * tanh(logits / cap).
    cache_groups: empty takes one group "full" of all layers.
    num_mtp_layers: layers behind the last that a forward leaves alone; each predicts one token more. See `with_mtp`.
    forms: of the parameters that are not dense, by their dotted path, in its order.
    dtype: of the checkpoint's weights. eos_token_ids: from config.json alone.

    Raises ValueError naming the field whose value cannot be.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    max_position_embeddings: int
    attention: AttentionSpec
    other_attention: tuple[tuple[tuple[int, ...], AttentionSpec], ...] = ()
    mlp: MlpSpec
    other_mlp: tuple[tuple[tuple[int, ...], MlpSpec], ...] = ()
    experts: ExpertsSpec | None = None
    without_mlp: tuple[int, ...] = ()
    recurrence: RecurrenceSpec | None = None
    vision: VisionSpec | None = None
    sound: SoundSpec | None = None
    learned_positions: bool = False
    norm: NormSpec = NormSpec()
    layer_inputs: LayerInputSpec | None = None
    layer_scales: bool = False
    hyper_connections: StreamsSpec | None = None
    parallel: bool = False
    embedding_scale: float = 1.0
    residual_multiplier: float = 1.0
    logit_scale: float = 1.0
    tie_word_embeddings: bool = False
    head_bias: bool = False
    wide_head: bool = False
    final_logit_softcapping: float | None = None
    cache_groups: tuple[CacheGroup, ...] = ()
    num_mtp_layers: int = 0
    borrowed: tuple[tuple[int, int], ...] = ()
    forms: tuple[tuple[str, WeightForm], ...] = ()
    dtype: str = "float32"
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.cache_groups:
            group = CacheGroup(kind="full", layers=tuple(range(self.num_hidden_layers)))
            object.__setattr__(self, "cache_groups", (group,))
        check_positive(self, "vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings")
        check_above_zero(self, "final_logit_softcapping")
        if self.head_bias and self.tie_word_embeddings:
            raise ValueError(
                "lm_head_bias and tie_word_embeddings are true; a head that is the embedding has no bias here"
            )
        self._check_layers()
        kinds = [group.kind for group in self.cache_groups]
        if "state" in kinds[:-1] or kinds == ["state"]:
            raise ValueError(f"cache_groups are {kinds}; 'state' must come once at most, last, and not alone")
        across = self.sound is not None and self.sound.is_read_across
        assert bool(self.cross_layers) == across, "layers attend to a clip where an encoder makes its keys and values"
        assert len({tower.embedding_size for tower in self.towers}) < 2, "towers fill the same slots"

    def _check_layers(self) -> None:
        """Raises ValueError where layers are in the wrong groups, or layers of a group keep different vectors."""
        for groups in (self.kv_groups, tuple(group for group in self.cache_groups if group.kind == "state")):
            layers = sorted(layer for group in groups for layer in group.layers)
            if len(set(layers)) < len(layers) or not set(layers) <= set(range(self.num_layers)):
                raise ValueError(
                    f"cache_groups hold layers {layers}; they must hold each of {self.num_layers} once at most"
                )
        own = {layer for group in self.kv_groups for layer in group.layers}
        for layer, lender in self.borrowed:
            if layer in own or lender not in own or not lender < layer < self.num_hidden_layers:
                raise ValueError(f"layer {layer} borrows from {lender}; it must be an earlier one that has blocks")
        for group in self.kv_groups:
            kept = {self.attention_of(layer).kept._replace(index_dim=0) for layer in group.layers}
            if len(kept) > 1:
                raise ValueError(
                    f"layers {list(group.layers)} are one cache group and keep {sorted(kept)} (KV heads, sizes of "
                    "their two vectors); layers that differ in these are groups of their own"
                )

    def fitted(self, max_model_len: int) -> ModelSpec:
        """The spec of an engine whose longest context is this: see `RopeSpec.fitted`."""
        return self.with_attention(lambda own: own.fitted(max_model_len))

    @property
    def most_positions(self) -> int:
        """The longest context that an engine may be given."""
        rope = self.attention.rope
        return self.max_position_embeddings if rope is None else rope.most_positions(self.max_position_embeddings)

    def with_attention(self, change: Callable[[AttentionSpec], AttentionSpec]) -> ModelSpec:
        """The spec with the attention of every layer changed."""
        others = tuple((layers, change(own)) for layers, own in self.other_attention)
        return dataclasses.replace(self, attention=change(self.attention), other_attention=others)

    def with_mtp(self, count: int) -> ModelSpec:
        """The spec with this many layers behind the last, which predict one token more each.

        They attend to all tokens and have experts where the model has some. Their blocks are a cache group of their
        own, so the groups of the other layers stay as they are.
        """
        assert count > 0 and not self.num_mtp_layers, f"{count} layers are asked for, {self.num_mtp_layers} are there"
        layers = tuple(range(self.num_hidden_layers, self.num_hidden_layers + count))
        states = tuple(group for group in self.cache_groups if group.kind == "state")
        experts = self.experts and dataclasses.replace(self.experts, layers=(*self.experts.layers, *layers))
        return dataclasses.replace(
            self,
            num_mtp_layers=count,
            experts=experts,
            cache_groups=(*self.kv_groups, CacheGroup(kind="full", layers=layers), *states),
        )

    @property
    def num_layers(self) -> int:
        """All layers: those of a forward, and those that predict one token more."""
        return self.num_hidden_layers + self.num_mtp_layers

    @property
    def kv_groups(self) -> tuple[CacheGroup, ...]:
        """The groups that have blocks; at least one."""
        return tuple(group for group in self.cache_groups if group.kind not in ("cross", "state"))

    @property
    def cross_layers(self) -> tuple[int, ...]:
        """The layers that attend to the clip of their row's request."""
        return tuple(layer for group in self.cache_groups if group.kind == "cross" for layer in group.layers)

    @property
    def towers(self) -> tuple[VisionSpec | SoundSpec, ...]:
        """The encoders of images and of sounds; empty for a model that reads text alone."""
        return tuple(tower for tower in (self.vision, self.sound) if tower is not None)

    @property
    def embeds_media(self) -> bool:
        """Whether tokens of a prompt have what a tower makes in place of embeddings."""
        return bool(self.towers) and not self.cross_layers

    @property
    def state_layers(self) -> tuple[int, ...]:
        """The recurrent layers."""
        return tuple(layer for group in self.cache_groups if group.kind == "state" for layer in group.layers)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that attend: with blocks of their own, or of another."""
        layers = [layer for group in self.kv_groups for layer in group.layers]
        return tuple(sorted([*layers, *(layer for layer, _ in self.borrowed)]))

    def lender_of(self, layer: int) -> int:
        """The layer whose blocks a layer attends to: itself, where it borrows none."""
        return dict(self.borrowed).get(layer, layer)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers with experts."""
        return () if self.experts is None else self.experts.layers

    @property
    def routed_layers(self) -> tuple[int, ...]:
        """The layers of a forward that have experts."""
        return tuple(layer for layer in self.moe_layers if layer < self.num_hidden_layers)

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """The layers with an MLP."""
        others = {*self.moe_layers, *self.without_mlp}
        return tuple(layer for layer in range(self.num_layers) if layer not in others)

    @property
    def mixing_layers(self) -> tuple[int, ...]:
        """The layers that join a token with others, of its row or of its clip."""
        return tuple(sorted({*self.attention_layers, *self.cross_layers, *self.state_layers}))

    def window_of(self, layer: int) -> int | None:
        """How many positions a token of this layer attends to; None is all."""
        lender = self.lender_of(layer)
        return next((group.window for group in self.kv_groups if lender in group.layers), None)

    def is_chunked(self, layer: int) -> bool:
        """Whether a token of this layer attends to its chunk alone."""
        lender = self.lender_of(layer)
        return any(group.chunked for group in self.kv_groups if lender in group.layers)

    def attention_of(self, layer: int) -> AttentionSpec:
        """The attention of a layer."""
        return next((own for layers, own in self.other_attention if layer in layers), self.attention)

    def indexer_of(self, layer: int) -> IndexerSpec | None:
        """The indexer that chooses a layer's keys; None where the layer attends to all."""
        return self.attention_of(layer).indexer

    @property
    def top_ks(self) -> set[int]:
        """How many keys the indexers of layers choose."""
        return {own.top_k for own in map(self.indexer_of, self.attention_layers) if own is not None}

    def mlp_of(self, layer: int) -> MlpSpec:
        """The MLP of a layer."""
        return next((own for layers, own in self.other_mlp if layer in layers), self.mlp)

    def digest_text(self, *, once: bool = False) -> str:
        """All that decides keys and values (not dtype, not end tokens). once: as an earlier version wrote it."""
        return model_text(dataclasses.replace(self, dtype="float32", eos_token_ids=()), once=once)
