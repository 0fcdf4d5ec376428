"""Which tensors of a checkpoint make the parameters of a Decoder: rules that families put together.

Where a family's checkpoints only call things differently, `weight_rules` takes their names.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from checkpoints.rules import Rule, StoredTensor, TensorSlice
from ferrum_jax.models.spec import ExpertsSpec, ModelSpec

WEIGHT, WEIGHT_AND_BIAS = ("weight",), ("weight", "bias")
_MLP = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
# What Mixtral calls experts, and those after it.
MIXTRALS_EXPERTS = {"block": "block_sparse_moe", "names": {"gate": "w1", "up": "w3", "down": "w2"}}
# Where the norms of a layer stand in a checkpoint, by our names: those of norms before, after, and on both sides.
BEFORE = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
AFTER = {"attention_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}
BOTH = AFTER | {"attention_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm"}


_AS_THEY_ARE: Mapping[str, Any] = MappingProxyType({})


def weight_rules(
    spec: ModelSpec,
    *,
    norms: Mapping[str, str] | None = None,
    attention: Mapping[str, str] = _AS_THEY_ARE,
    mlp: Mapping[str, str] = _AS_THEY_ARE,
    experts: Mapping[str, Any] = _AS_THEY_ARE,
) -> tuple[Rule, ...]:
    """Every parameter of a Decoder of this spec, and the Hugging Face tensor it comes from.

    The others: what a family's checkpoints call differently, arguments of the functions below.
    """
    body = (*attention_rules(spec, **attention), *mlp_rules(spec, **mlp), *expert_rules(spec, **experts))
    return (*frame_rules(spec, norms), *body)


def frame_rules(spec: ModelSpec, norms: Mapping[str, str] | None = None) -> tuple[Rule, ...]:
    """Embedding, head and the norms between layers. norms: names of those of a layer, by ours."""
    every = tuple(range(spec.num_layers))
    head = {} if spec.tie_word_embeddings else {"lm_head": "head"}
    of_norm = parts_of(spec.norm.bias)
    usual = BOTH if spec.norm.after and spec.norm.before else AFTER if spec.norm.after else BEFORE
    of_layer = {theirs: ours for ours, theirs in (usual if norms is None else norms).items()}
    return (
        Rule(source="model.embed_tokens.weight", target="embed.weight"),
        *named_rules("model.", "", {"norm": "norm"}, parts=of_norm),
        *named_rules("", "", head, parts=parts_of(spec.head_bias)),
        *in_layers(of_layer, every, of_norm),
    )


def attention_rules(
    spec: ModelSpec, q_norm: str = "q_norm", k_norm: str = "k_norm", output: str = "o_proj"
) -> tuple[Rule, ...]:
    """Projections of attention, each a tensor of its own, and the norms of its heads, by their names."""
    layers, own = spec.attention_layers, spec.attention
    keep = tuple(layer for layer in layers if spec.lender_of(layer) == layer)
    has_norms = own.qk_norm is not None and own.qk_norm.has_weight
    suffix = "heads_norm" if own.qk_norm is not None and own.qk_norm.over_all_heads else "norm"
    values = tuple(layer for layer in keep if not spec.attention_of(layer).value_of_key)
    having = {"q": layers, "k": keep, "v": values}.items()
    return (
        *(rule for x, has in having for rule in linear(f"self_attn.{x}_proj", f"attention.{x}", has, own.bias)),
        *linear(f"self_attn.{output}", "attention.o", layers, own.output_bias),
        *per_layer(f"self_attn.{q_norm}.weight", f"attention.q_{suffix}.weight", layers if has_norms else ()),
        *per_layer(f"self_attn.{k_norm}.weight", f"attention.k_{suffix}.weight", keep if has_norms else ()),
    )


def mlp_rules(spec: ModelSpec, up: str = "up_proj", down: str = "down_proj") -> tuple[Rule, ...]:
    """The MLPs of layers without experts, by their names."""
    parts = {"gate": "gate_proj"} if spec.mlp.gated else {}
    names = {f"mlp.{theirs}": f"mlp.{ours}" for ours, theirs in (parts | {"up": up, "down": down}).items()}
    return in_layers(names, spec.dense_layers, parts_of(spec.mlp.bias))


def fused_mlp_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """The MLPs of layers without experts, whose gate and up are one tensor."""
    layers, parts = spec.dense_layers, halves(spec.mlp.intermediate_size)
    return (
        *parts_per_layer("mlp.gate_up_proj.weight", "mlp.{part}.weight", layers, parts),
        *per_layer("mlp.down_proj.weight", "mlp.down.weight", layers),
    )


def halves(width: int, *, axis: int = 0, transposed: bool = False) -> dict[str, TensorSlice]:
    """Gate and up, of this width, which stand one behind the other along an axis of one tensor."""
    return in_turn({"gate": width, "up": width}, axis=axis, transposed=transposed)


def in_turn(widths: Mapping[str, int], *, axis: int = 0, transposed: bool = False) -> dict[str, TensorSlice]:
    """Parameters of these widths, which stand one behind the other along an axis of one tensor, the last to its end."""
    starts = (0, *itertools.accumulate(widths.values()))
    cuts = zip(widths, starts, (*starts[1:-1], None), strict=False)
    return {name: TensorSlice(axis=axis, start=a, stop=b, transposed=transposed) for name, a, b in cuts}


def stacked_expert_rules(
    experts: ExpertsSpec | None, gate_up: str, down: str, *, router: str, transposed: bool = False
) -> tuple[Rule, ...]:
    """Routers, and a layer's experts stacked, [E, out, in], gate by up; transposed: [E, in, out]."""
    if experts is None:
        return ()
    layers = experts.layers
    parts = halves(experts.intermediate_size, axis=2 if transposed else 1, transposed=transposed)
    return (
        *per_layer(router, "mlp.router.weight", layers),
        *parts_per_layer(gate_up, "mlp.experts.{part}", layers, parts),
        *per_layer(down, "mlp.experts.down", layers, TensorSlice(transposed=True) if transposed else None),
    )


def joined(rules: Iterable[Rule], spec: ModelSpec, *, transposed: bool = False) -> tuple[Rule, ...]:
    """The rules, those of experts' matrices with the tensor that may hold them all: see `stacked_expert_rules`."""
    width = 0 if spec.experts is None else spec.experts.intermediate_size
    parts = halves(width, axis=2 if transposed else 1, transposed=transposed)

    def with_stack(rule: Rule) -> Rule:
        part = parts.get(rule.target.rpartition(".")[2], TensorSlice(transposed=True) if transposed else None)
        name = "down_proj" if rule.target.endswith("down") else "gate_up_proj"
        return dataclasses.replace(rule, instead=(StoredTensor(rule.source.partition("{e}")[0] + name, part),))

    return tuple(with_stack(rule) if rule.experts else rule for rule in rules)


def or_named(rules: Iterable[Rule], instead: Mapping[str, str]) -> tuple[Rule, ...]:
    """The rules of tensors in whose names some checkpoints say something else.

    instead: what they say, by parts of names; it may replace parts of names that an earlier one gave.
    """

    def also(rule: Rule) -> Rule:
        known = [*rule.instead] if rule.experts else [StoredTensor(rule.source, rule.part), *rule.instead]
        for part, other in instead.items():
            known += [StoredTensor(x.name.replace(part, other), x.part) for x in known if part in x.name]
        return dataclasses.replace(rule, instead=tuple(known if rule.experts else known[1:]))

    return tuple(map(also, rules))


def expert_rules(
    spec: ModelSpec,
    *,
    block: str = "mlp",
    names: Mapping[str, str] = _MLP,
    router: str = "gate",
    correction: str = "gate.e_score_correction_bias",
    shared: str = "shared_expert",
) -> tuple[Rule, ...]:
    """The routers, and the experts' matrices, each a tensor of its own. block and the others: their names."""
    if spec.experts is None:
        return ()
    layers, has_correction = spec.experts.layers, spec.experts.corrected
    return (
        *per_layer(f"{block}.{router}.weight", "mlp.router.weight", layers),
        *per_layer(f"{block}.{correction}", "mlp.correction", layers if has_correction else ()),
        *(
            Rule(
                source=f"model.layers.{{i}}.{block}.experts.{{e}}.{name}.weight",
                target=f"layers.{{i}}.mlp.experts.{ours}",
                layers=layers,
                experts=spec.experts.num_experts,
            )
            for ours, name in names.items()
        ),
        *shared_expert_rules(spec.experts, f"{block}.{shared}", spec.mlp.bias),
    )


def shared_expert_rules(experts: ExpertsSpec, name: str, bias: bool = False) -> tuple[Rule, ...]:
    """The expert of all tokens, and its gate where it has one."""
    if not experts.shared_intermediate_size:
        return ()
    names = {f"{name}.{theirs}": f"mlp.shared.{ours}" for ours, theirs in _MLP.items()}
    if not experts.has_gates:
        del names[f"{name}.gate_proj"]
    gate = {f"{name}_gate.weight": "mlp.shared_gate.weight"} if experts.shared_gate else {}
    return (*in_layers(names, experts.layers, parts_of(bias)), *in_layers(gate, experts.layers))


def harmless_tensors(spec: ModelSpec) -> tuple[str, ...]:
    """Patterns of tensors that a checkpoint may carry and the model does not need."""
    return ("*.rotary_emb.inv_freq", *(("lm_head.weight",) if spec.tie_word_embeddings else ()))


def per_layer(source: str, target: str, layers: tuple[int, ...], part: TensorSlice | None = None) -> tuple[Rule, ...]:
    """The rule of a tensor, or a part of one, that each of these layers has; none without layers."""
    if not layers:
        return ()
    return (Rule(source=f"model.layers.{{i}}.{source}", target=f"layers.{{i}}.{target}", layers=layers, part=part),)


def parts_per_layer(
    source: str, target: str, layers: tuple[int, ...], parts: Mapping[str, TensorSlice]
) -> tuple[Rule, ...]:
    """The rules of a tensor of these layers that holds several parameters; {part} in the target is the part's name."""
    found = (per_layer(source, target.replace("{part}", name), layers, part) for name, part in parts.items())
    return tuple(rule for rules in found for rule in rules)


def named_rules(
    source: str, target: str, names: Mapping[str, str], layers: tuple[int, ...] | None = None, parts: Sequence[str] = ()
) -> tuple[Rule, ...]:
    """A rule for each tensor, ours by theirs, behind prefixes; they hold {i} where there are layers.

    parts: the names are those of modules that have these, such as a weight and a bias.
    """
    if layers == ():
        return ()
    if parts:
        names = {f"{theirs}.{part}": f"{ours}.{part}" for theirs, ours in names.items() for part in parts}
    return tuple(Rule(source=source + a, target=target + b, layers=layers or ()) for a, b in names.items())


def in_layers(names: Mapping[str, str], layers: tuple[int, ...], parts: Sequence[str] = ()) -> tuple[Rule, ...]:
    """`named_rules` of these layers of a decoder."""
    return named_rules("model.layers.{i}.", "layers.{i}.", names, layers, parts)


def linear(source: str, target: str, layers: tuple[int, ...], bias: bool) -> tuple[Rule, ...]:
    """The weight and, where there is one, the bias of a linear layer of each of these layers."""
    return in_layers({source: target}, layers, parts_of(bias))


def parts_of(bias: bool) -> tuple[str, ...]:
    """The parameters of a linear module."""
    return WEIGHT_AND_BIAS if bias else WEIGHT
