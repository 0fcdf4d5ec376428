"""Mamba2's sizes in the spelling that Granite 4 and Falcon-H1 share, and its tensors, which are the same everywhere."""

import math
from collections.abc import Sequence
from typing import Any

from checkpoints.rules import Rule
from ferrum_jax.models.families import tensors
from ferrum_jax.models.families.bounds import shown
from ferrum_jax.models.families.config_reader import ConfigReader
from ferrum_jax.models.families.plain import hybrid_groups
from ferrum_jax.models.spec import CacheGroup, Mamba2Spec, ModelSpec

# What layers are called.
_ATTENDS, _RECURS = ("full_attention", "attention"), ("linear_attention", "mamba")


def mamba2_from(reader: ConfigReader, inner_size: int, **family: Any) -> Mamba2Spec:
    """The sizes of Mamba2. inner_size: of all its heads. Raises ValueError where they do not make it up."""
    reader.only(mamba_proj_bias=False)
    reader.leave("mamba_chunk_size")  # how a kernel cuts prompts, which is this engine's own choice
    heads = reader.get("mamba_n_heads", 128)
    size = reader.get("mamba_d_head", None)
    size = inner_size // heads if size in (None, "auto") else reader.get("mamba_d_head", 0)
    if size * heads != inner_size:
        raise ValueError(f"mamba_n_heads is {heads} and mamba_d_head {size}; together they must be {inner_size}")
    return Mamba2Spec(
        num_heads=heads,
        head_dim=size,
        state_dim=reader.get("mamba_d_state", 256),
        num_groups=reader.get("mamba_n_groups", 1),
        conv_kernel_dim=reader.get("mamba_d_conv", 4),
        conv_bias=reader.flag("mamba_conv_bias", True),
        step_limit=step_limit(reader),
        **family,
    )


def step_limit(reader: ConfigReader) -> tuple[float, float]:
    """The least and the largest step of time; no bound is Infinity, which JSON has in two spellings."""
    said = reader.get("time_step_limit", [0.0, math.inf])
    limit = [math.inf if x == {"__float__": "Infinity"} else x for x in said]
    if len(limit) != 2 or not all(type(x) in (int, float) for x in limit) or not 0 <= limit[0] < limit[1]:
        raise ValueError(f"time_step_limit is {shown(said)}; it must be two numbers, 0 or more, the second larger")
    return float(limit[0]), float(limit[1])


def mamba2_groups(kinds: Sequence[str], num_layers: int, others: Sequence[str] = ()) -> tuple[CacheGroup, ...]:
    """Layers that attend to all tokens, and those with Mamba2. others: kinds of layers that have no cache."""
    return hybrid_groups(kinds, num_layers, attend=_ATTENDS, recur=_RECURS, others=others)


def mamba2_rules(spec: ModelSpec, source: str, target: str = "attention") -> tuple[Rule, ...]:
    """Every parameter of Mamba2 layers. source, target: the module in a layer, theirs and ours."""
    own, layers = spec.recurrence, spec.state_layers
    if own is None:
        return ()
    assert isinstance(own, Mamba2Spec)
    size, whole = own.output_size, 2 * own.group_size
    # rows of the one projection: gate, inputs, what writes and what reads, and steps
    rows = tensors.in_turn({"z_heads": size, "v_heads": size, "bc_whole": whole, "s_heads": own.num_heads})
    parts = [("in_proj.weight", f"{name}.weight", part) for name, part in rows.items()]
    convolved = tensors.in_turn({"conv_heads": size, "conv_whole": whole})
    for theirs, ours in {"weight": "", **({"bias": "_bias"} if own.conv_bias else {})}.items():
        parts += [(f"conv1d.{theirs}", f"{name}{ours}", part) for name, part in convolved.items()]
    alone = {"A_log": "a_log", "dt_bias": "dt_bias", "D": "skip", "out_proj.weight": "o.weight"}
    alone |= {"norm.weight": "heads_norm.weight"} if own.norm else {}
    return (
        *(rule for a, b, part in parts for rule in tensors.per_layer(f"{source}.{a}", f"{target}.{b}", layers, part)),
        *tensors.named_rules(f"model.layers.{{i}}.{source}.", f"layers.{{i}}.{target}.", alone, layers),
    )
