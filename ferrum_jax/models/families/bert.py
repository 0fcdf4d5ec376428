"""Encoders: BERT and XLM-RoBERTa. Every token attends to all tokens of its text, so there is no KV to keep.

    x = norm(word[id] + position[p] + type[0]);  per layer:  x = norm(x + attention(x));  x = norm(x + mlp(x))

Texts stand end to end, and `TextRows` says where each token belongs.
RoBERTa counts positions from one past the id of its padding token, BERT from 0.
Source: Devlin et al. 2019, section 3; Conneau et al. 2020, section 3.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from checkpoints.rules import Rule
from ferrum_jax.models.families import tensors
from ferrum_jax.models.families.config_reader import ConfigReader, stored_dtype
from ferrum_jax.models.families.encoder_spec import SCORERS, EncoderSpec, labels_of
from ferrum_jax.models.families.family import EncoderFamily
from ferrum_jax.models.layers.embedding import Embedding
from ferrum_jax.models.layers.linear import Linear
from ferrum_jax.models.layers.norm import LayerNorm
from ferrum_jax.models.layers.text_rows import TextRows
from ferrum_jax.models.sharding.shards import WHOLE, Shards

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}
# Keys of config.json that change no vector: dropout and heads for training.
_OF_PAIRS = ("sentence_transformers", "sbert_ce_default_activation_function")
_TRAINING_KEYS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "classifier_dropout",
    "gradient_checkpointing",
    "tie_word_embeddings",
    *("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
    *("pooler_size_per_head", "pooler_type", "output_past"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertSpec(EncoderSpec):
    """A BERT, or a RoBERTa.

    first_position: row of the position table of a text's first token. prefix: what a checkpoint with a head puts before
    the encoder's names, and of `head`, the head's.
    """

    first_position: int
    type_vocab_size: int
    layer_norm_eps: float
    hidden_act: str
    prefix: str
    head: str

    names_only: ClassVar[tuple[str, ...]] = ("prefix", "head")

    @property
    def is_roberta(self) -> bool:
        return "Roberta" in self.architecture


class BertLayer(nnx.Module):
    """Attention and MLP, each with a residual and a norm behind it. On a mesh a device has some heads and columns."""

    def __init__(self, spec: BertSpec, *, dtype: jnp.dtype) -> None:
        D, F = spec.hidden_size, spec.intermediate_size
        self.head_dim = spec.head_dim
        self.activation = ACTIVATIONS[spec.hidden_act]
        self.q = Linear(D, D, bias=True, dtype=dtype, rngs=None)
        self.k = Linear(D, D, bias=True, dtype=dtype, rngs=None)
        self.v = Linear(D, D, bias=True, dtype=dtype, rngs=None)
        self.o = Linear(D, D, bias=True, dtype=dtype, rngs=None)
        self.attention_norm = LayerNorm(D, eps=spec.layer_norm_eps, dtype=dtype)
        self.up = Linear(D, F, bias=True, dtype=dtype, rngs=None)
        self.down = Linear(F, D, bias=True, dtype=dtype, rngs=None)
        self.mlp_norm = LayerNorm(D, eps=spec.layer_norm_eps, dtype=dtype)

    def __call__(
        self,
        x: jax.Array,  # [T, D]
        rows: TextRows,
        shards: Shards,
    ) -> jax.Array:  # [T, D]
        q, k, v = (a.reshape(len(x), -1, self.head_dim) for a in (self.q(x), self.k(x), self.v(x)))
        attended = rows.attend(q, k, v, scale=self.head_dim**-0.5)
        x = self.attention_norm(x + self.o(attended.reshape(len(x), -1), shards))
        return self.mlp_norm(x + self.down(self.activation(self.up(x)), shards))


class BertScorer(nnx.Module):
    """Logits of a classifier, or the one of a cross-encoder, from a text's first state: out(tanh(dense(state)))."""

    def __init__(self, spec: BertSpec, *, dtype: jnp.dtype) -> None:
        self.dense = Linear(spec.hidden_size, spec.hidden_size, bias=True, dtype=dtype, rngs=None)
        assert spec.labels is not None, "it has a head"
        self.out = Linear(spec.hidden_size, len(spec.labels.names), bias=True, dtype=dtype, rngs=None)

    def __call__(self, state: jax.Array) -> jax.Array:  # [R, D] -> [R, labels]
        return self.out(jnp.tanh(self.dense(state)))


class Bert(nnx.Module):
    """A whole encoder; its weights are zeros until others are bound."""

    def __init__(self, spec: BertSpec, *, dtype: jnp.dtype | str = jnp.float32) -> None:
        dtype = jnp.dtype(dtype)
        rows = spec.first_position + spec.max_position_embeddings
        self.spec = spec
        self.first_position = spec.first_position
        self.words = Embedding(spec.vocab_size, spec.hidden_size, dtype=dtype, rngs=None)
        self.positions = Embedding(rows, spec.hidden_size, dtype=dtype, rngs=None)
        self.types = Embedding(spec.type_vocab_size, spec.hidden_size, dtype=dtype, rngs=None)
        self.norm = LayerNorm(spec.hidden_size, eps=spec.layer_norm_eps, dtype=dtype)
        self.layers = nnx.List([BertLayer(spec, dtype=dtype) for _ in range(spec.num_hidden_layers)])
        self.scorer = BertScorer(spec, dtype=dtype) if spec.labels else None

    def __call__(
        self,
        token_ids: jax.Array,  # [T] int32
        rows: TextRows,
        shards: Shards = WHOLE,
    ) -> jax.Array:  # [T, D]
        x = self.words(token_ids, shards) + self.positions(self.first_position + rows.positions)
        types = self.types.weight[...]
        is_pair = self.scorer is not None and len(types) > 1
        x = self.norm(x + (types[rows.is_second] if is_pair else types[:1]))
        for layer in self.layers:
            x = layer(x, rows, shards)
        return x


def _spec(config: Mapping[str, Any]) -> BertSpec:
    reader = ConfigReader(config)
    architecture = str(config["architectures"][0])
    roberta = "Roberta" in architecture  # whose table of positions begins with rows that no token takes
    scores = architecture.endswith("ForSequenceClassification")
    labels = labels_of(config) if scores else None
    has_prefix = scores or architecture.endswith("ForMaskedLM")
    act = reader.get("hidden_act", "gelu")
    kind = reader.get("position_embedding_type", "absolute")
    if act not in ACTIVATIONS:
        raise ValueError(f"hidden_act is {act!r}; supported are {sorted(ACTIVATIONS)}")
    if kind != "absolute":
        raise ValueError(f"position_embedding_type is {kind!r}; supported is 'absolute'")
    if reader.get("is_decoder", False):
        raise ValueError("is_decoder is true; an encoder attends both ways")
    first = int(reader.get("pad_token_id", 1)) + 1 if roberta else 0
    spec = BertSpec(
        architecture=architecture,
        vocab_size=reader.require("vocab_size"),
        hidden_size=reader.require("hidden_size"),
        num_hidden_layers=reader.require("num_hidden_layers"),
        num_attention_heads=reader.require("num_attention_heads"),
        intermediate_size=reader.require("intermediate_size"),
        max_position_embeddings=reader.require("max_position_embeddings") - first,
        first_position=first,
        type_vocab_size=reader.get("type_vocab_size", 2),
        layer_norm_eps=reader.get("layer_norm_eps", 1e-12),
        hidden_act=act,
        dtype=stored_dtype(reader),
        prefix=("roberta." if roberta else "bert.") if has_prefix else "",
        head="pooler." if not has_prefix else "lm_head." if roberta else "cls.",
        scorer=scorer_from(reader) if labels is not None and len(labels.names) == 1 else "",
        labels=labels,
    )
    if spec.max_position_embeddings < 1:
        raise ValueError(f"max_position_embeddings leaves {spec.max_position_embeddings} positions; it must leave 1")
    if spec.hidden_size % spec.num_attention_heads:
        raise ValueError(f"hidden_size is {spec.hidden_size}, no multiple of {spec.num_attention_heads} heads")
    reader.leave(*_TRAINING_KEYS, *(_OF_PAIRS if labels is not None else ()))
    reader.finish()
    return spec


def scorer_from(reader: ConfigReader) -> str:
    """A cross-encoder's activation, as sentence-transformers writes it; by default "sigmoid".

    Raises ValueError for an unsupported one.
    """
    own = reader.get("sentence_transformers", None) or {}
    named = own.get("activation_fn") if isinstance(own, Mapping) else None
    named = str(named or reader.get("sbert_ce_default_activation_function", None) or "Sigmoid")
    found = named.rpartition(".")[2].lower()
    if found not in SCORERS:
        raise ValueError(f"the activation of scores is {named[:100]!r}; supported are Sigmoid and Identity")
    return found


def _rules(spec: BertSpec) -> tuple[Rule, ...]:
    """Every parameter of a Bert of this spec, and the Hugging Face tensor it comes from."""
    tables = {"word_embeddings": "words", "position_embeddings": "positions", "token_type_embeddings": "types"}
    inside = {
        "attention.self.query": "q",
        "attention.self.key": "k",
        "attention.self.value": "v",
        "attention.output.dense": "o",
        "attention.output.LayerNorm": "attention_norm",
        "intermediate.dense": "up",
        "output.dense": "down",
        "output.LayerNorm": "mlp_norm",
    }
    dense, out = ("classifier.dense", "classifier.out_proj") if spec.is_roberta else ("bert.pooler.dense", "classifier")
    layers, both = tuple(range(spec.num_hidden_layers)), tensors.WEIGHT_AND_BIAS
    return (
        *tensors.named_rules("", "scorer.", {dense: "dense", out: "out"} if spec.labels else {}, parts=both),
        *tensors.named_rules(f"{spec.prefix}embeddings.", "", tables, parts=tensors.WEIGHT),
        *tensors.named_rules(f"{spec.prefix}embeddings.", "", {"LayerNorm": "norm"}, parts=both),
        *tensors.named_rules(f"{spec.prefix}encoder.layer.{{i}}.", "layers.{i}.", inside, layers, both),
    )


def _harmless(spec: BertSpec) -> tuple[str, ...]:
    """Patterns of tensors that a checkpoint may carry and the vectors do not need: buffers and heads."""
    heads = () if spec.labels else (f"{spec.prefix}pooler.*", f"{spec.head}*")
    return ("*embeddings.position_ids", "*embeddings.token_type_ids", *heads)


def _family(models: str, notes: str) -> EncoderFamily:
    return EncoderFamily(
        spec_from_config=_spec, model=Bert, weight_rules=_rules, harmless=_harmless, models=models, notes=notes
    )


_VECTORS = "embeddings alone; sentence-transformers folders"
_BERT = _family("BERT, BGE, E5, MiniLM and others", _VECTORS)
_ROBERTA = _family("XLM-RoBERTa, multilingual E5, BGE-M3's dense vectors", _VECTORS)
_SCORER = _family(
    "cross-encoders with one label: ms-marco-MiniLM, BGE-reranker; classifiers with several",
    "`LLM.score` with one label, `LLM.classify`",
)
ENCODERS = {
    "BertForMaskedLM": _BERT,
    "BertForSequenceClassification": _SCORER,
    "BertModel": _BERT,
    "RobertaForMaskedLM": _ROBERTA,
    "RobertaForSequenceClassification": _SCORER,
    "RobertaModel": _ROBERTA,
    "XLMRobertaForMaskedLM": _ROBERTA,
    "XLMRobertaForSequenceClassification": _SCORER,
    "XLMRobertaModel": _ROBERTA,
}
