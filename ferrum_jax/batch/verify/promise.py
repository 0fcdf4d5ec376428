"""Which promise holds where rows are answered again: that of equal bits, or that of an answer within rounding."""

import dataclasses
from collections.abc import Iterator

from ferrum_jax.batch.journal.job_identity import changed_values, environment_changes
from ferrum_jax.batch.journal.job_record import JobRecord
from ferrum_jax.inputs.identity import KNOWN_LATER, ModelIdentity

MODE = ("kv_dtype", "invariant")  # how a model computes; the other values say which it is
_MARGINS = {"float32": 1e-3, "bfloat16": 0.125}  # of log-probabilities: what rounding may move, and a changed row more
_MAX_MARGIN = 0.5  # where KV is kept in fewer bits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Promise:
    """bits: whether equal ones are promised. margin: by which numbers may differ where they are not. why: it is so."""

    bits: bool
    margin: float
    why: str


def other_model(record: JobRecord, identity: ModelIdentity) -> list[str]:
    """A phrase for each value in which the model here differs from the one that answered. Early values suffice."""
    now = identity.values(record.model)
    before = {
        name: value
        for name, value in (record.model or {}).items()
        if name not in MODE and (name not in KNOWN_LATER or name in now)
    }
    return changed_values(before, {name: value for name, value in now.items() if name not in MODE})


def promise_of(record: JobRecord, identity: ModelIdentity, margin: float | None) -> Promise:
    """How closely rows must repeat here. margin: the user's limit; None takes the limit of the dtypes."""
    why = next(_reasons(record, identity), None)
    if why is None:
        return Promise(
            bits=True, margin=0.0, why="Equal bits are promised: invariant mode, in the environment that answered."
        )
    if margin is None:
        models = (record.model or {}, identity.values(record.model))
        dtypes = [str(model.get(name)) for model in models for name in ("dtype", "kv_dtype")]
        margin = max(_MARGINS.get(dtype, _MAX_MARGIN) for dtype in dtypes)
    why = f"Equal bits are not promised, because {why}. Numbers and ties within {margin:g} count as rounding."
    return Promise(bits=False, margin=margin, why=why)


def _reasons(record: JobRecord, identity: ModelIdentity) -> Iterator[str]:
    """Clauses that say why bits may differ."""
    if not (record.model or {}).get("invariant"):
        yield "the job did not run in invariant mode"
    if not identity.invariant:
        yield "this engine does not run in invariant mode"
    yield from elsewhere(record, identity)


def elsewhere(record: JobRecord, identity: ModelIdentity) -> Iterator[str]:
    """Clauses that say how the mode or the environment here is another than the one that answered."""
    before, now = record.model or {}, identity.values(record.model)
    if modes := changed_values({name: before.get(name) for name in MODE}, {name: now.get(name) for name in MODE}):
        yield f"the mode is another: {'; '.join(modes)}"
    here = {name: str(value) for name, value in identity.environment.items()}
    if others := dict.fromkeys(text for each in record.environments for text in environment_changes(each, here)):
        yield f"the environment is another: {'; '.join(others)}"
