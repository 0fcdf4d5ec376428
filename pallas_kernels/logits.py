"""How attention's scores become logits, as one value that every function of a call passes on."""

import dataclasses

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logits:
    """scale: factor of the products of queries and keys. soft_cap: logits become soft_cap * tanh(logits / soft_cap).

    sinks: [N], an extra logit per head that takes weight but has no value.
    """

    scale: float
    soft_cap: float | None = None
    sinks: jax.Array | None = None
