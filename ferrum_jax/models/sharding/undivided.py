"""Why a model cannot be divided among the devices of a mesh, with the sizes that would work."""

from collections.abc import Callable

from ferrum_jax.inputs.sizes.mesh_shape import MeshShape
from ferrum_jax.models.sharding import RULES, axes_of, layer_in
from ferrum_jax.models.spec import ModelSpec
from ferrum_jax.models.spec.checks import no_multiples


def refusals(spec: ModelSpec, shape: MeshShape) -> list[str]:
    """Why a model cannot run on a mesh of this shape, each with the sizes that would work; empty where it can."""
    return _refusals(lambda mesh: _undivided(spec, mesh), spec.attention.num_attention_heads, shape)


def encoder_refusals(num_attention_heads: int, intermediate_size: int, shape: MeshShape) -> list[str]:
    """Reasons why a mesh cannot divide an encoder."""

    def undivided(mesh: MeshShape) -> list[str]:
        return no_multiples(mesh.tp, num_attention_heads=num_attention_heads, intermediate_size=intermediate_size)

    return _refusals(undivided, num_attention_heads, shape)


def _refusals(undivided: Callable[[MeshShape], list[str]], num_heads: int, shape: MeshShape) -> list[str]:
    reasons = undivided(shape)
    if not reasons:
        return []
    once, on_each = (
        [MeshShape(dp=shape.dp, tp=tp, has_experts_once=is_once) for tp in range(1, num_heads + 1)]
        for is_once in (shape.has_experts_once, False)
    )
    fits = [str(mesh.tp) for mesh in once if not undivided(mesh)]
    fits = fits or [f"{mesh.tp} with ep={mesh.tp}" for mesh in on_each if not undivided(mesh)]
    return [f"mesh is {str(shape)!r}: {', '.join(reasons)}; tp may be {', '.join(fits)}"]


def _undivided(spec: ModelSpec, shape: MeshShape) -> list[str]:
    tp, experts = shape.tp, spec.experts
    reasons = _undivided_heads(spec, tp)
    for width in dict.fromkeys(spec.mlp_of(layer).intermediate_size for layer in spec.dense_layers):
        reasons += no_multiples(tp, intermediate_size=width)
    if spec.layer_inputs is not None:
        columns = spec.num_hidden_layers * spec.layer_inputs.size
        reasons += no_multiples(tp, **{"hidden_size_per_layer_input of all layers": columns})
    if experts is not None:
        reasons += no_multiples(tp, shared_expert_intermediate_size=experts.shared_intermediate_size)
    if spec.recurrence is not None:
        reasons += spec.recurrence.undivided(tp)
    reasons += _parted_groups(spec, tp)
    if experts is not None and experts.num_experts % shape.ep:
        axes = "tp" if shape.ep == tp else "dp * tp"
        reasons.append(f"num_experts, {experts.num_experts}, is not a multiple of {axes}, {shape.ep}")
    return reasons


def _undivided_heads(spec: ModelSpec, tp: int) -> list[str]:
    reasons: list[str] = []
    for own in dict.fromkeys(spec.attention_of(layer) for layer in (*spec.attention_layers, *spec.cross_layers)):
        K = own.num_key_value_heads
        reasons += no_multiples(tp, num_attention_heads=own.num_attention_heads)
        if K % tp and tp % K:
            reasons.append(f"num_key_value_heads, {K}, and tp, {tp}, do not divide one another")
    return list(dict.fromkeys(reasons))


def _parted_groups(spec: ModelSpec, tp: int) -> list[str]:
    """Weights whose inputs are spread over "tp" and cannot be without parting a group; of those alike the first."""
    found: dict[tuple[int, int], str] = {}
    for name, form in spec.forms:
        if axes_of(name)[-1] in RULES:
            num_in = _num_inputs(spec, name)
            if num_in % tp == 0 and form.problem((num_in // tp,)):
                found.setdefault((num_in, form.unit), name)
    return [
        f"the {num_in} inputs of {name} in groups of {unit} cannot be spread over tp, {tp}"
        for (num_in, unit), name in found.items()
    ]


def _num_inputs(spec: ModelSpec, name: str) -> int:
    """Inputs of attention's output projection, or of the down projection of an MLP."""
    if ".mlp." in name:
        shared = spec.experts.shared_intermediate_size if spec.experts is not None else 0
        return shared if ".shared." in name else spec.mlp_of(layer_in(name)).intermediate_size
    layer = layer_in(name)
    attends = layer in spec.attention_layers
    if spec.recurrence is not None and layer in spec.state_layers and (".recurrence." in name or not attends):
        return spec.recurrence.output_size
    own = spec.attention_of(layer)
    return own.num_attention_heads * own.value_dim
