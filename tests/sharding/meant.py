"""Which collectives a part of a step is meant to have: no others, so none on the pools and none that moves a weight."""

from checkpoints.stored_weight import WeightForm
from ferrum_jax.models.sharding import RULES, axes_of, crosses_processes
from ferrum_jax.models.spec import Mamba2Spec, ModelSpec
from ferrum_jax.runtime.buckets import Bucket, RowBucket
from ferrum_jax.runtime.layout import Layout
from ferrum_jax.runtime.programs import Part


def meant_collectives(layout: Layout, part: Part) -> dict[str, int]:
    """How many of each kind a compiled part has.

    A forward has a sum over "tp" of what mixes tokens in a layer and one of its MLP or experts, one of both in a
    parallel block, and the embedding's; norms over all heads of q and of k share one, and a norm over all heads of a
    state space has one. Where data shards have experts together, tokens and routes are gathered before those of a
    layer, and their sums scattered after them. Where devices have parts of a quantised weight's inputs, the largest
    input of a token that is rounded is that of all of them, and inputs that are put in order are gathered first. Inputs
    of layers are gathered, of ids and of embeddings. What samples exchanges logits once and gathers what it drew, and
    so do prompt log-probabilities. Where data shards are of several hosts, results of the latter two are gathered too.
    """
    spec, sizes = layout.options.spec, layout.mesh.shape
    if isinstance(part, Bucket):
        exchanges = len(spec.moe_layers) if layout.options.expert_shards.size > 1 else 0
        divided = [form for name, form in spec.forms if axes_of(name)[-1] in RULES and sizes["tp"] > 1]
        gathers = 2 * exchanges + sum(form.has_order for form in divided)
        gathers += 2 * (spec.layer_inputs is not None and sizes["tp"] > 1)
        counts = {"all-gather": gathers, "reduce-scatter": exchanges}
        largest = sum(map(_shares_a_scale, divided))
        return counts | ({"all-reduce": _sums_of_layers(spec) + 1 + largest} if sizes["tp"] > 1 else {})
    if part == "write_masks":
        return {}
    num_results = 2 if isinstance(part, RowBucket) else 1
    divided = sizes["tp"] > 1
    return {"all-gather": divided + num_results * crosses_processes(layout.mesh), "all-to-all": int(divided)}


def _sums_of_layers(spec: ModelSpec) -> int:
    mixing, feeding = len(spec.mixing_layers), spec.num_hidden_layers - len(spec.without_mlp)
    own, state = spec.attention.qk_norm, spec.recurrence
    of_norms = len(spec.attention_layers) * (own is not None and own.over_all_heads)
    if isinstance(state, Mamba2Spec) and state.norm and state.num_groups == 1:
        of_norms += len(spec.state_layers)
    return (mixing if spec.parallel else mixing + feeding) + of_norms


def _shares_a_scale(form: WeightForm) -> bool:
    return form.activations is not None and form.activation_group is None and not form.has_input_scale
