"""Which promise holds where rows are answered again: that of equal bits, or that of an answer within rounding."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ferrum_jax.batch.journal.job_identity import changed_values, environment_changes
from ferrum_jax.batch.verify.said import JobSaid
from ferrum_jax.inputs.identity import KNOWN_LATER, ModelIdentity

MODE = ("kv_dtype", "invariant")  # how a model computes; the other values say which it is
_MARGINS = {"float32": 1e-3, "bfloat16": 0.125}  # of log-probabilities: what rounding may move, and a changed row more
_WIDEST = 0.5  # where KV is kept in fewer bits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Promise:
    """bits: whether equal ones are promised. why: a sentence. margin: of what counts as rounding where they are not."""

    bits: bool
    why: str
    margin: float


def other_model(said: JobSaid, identity: ModelIdentity) -> list[str]:
    """How the model here is not the one that answered, a phrase for each value; none if it is. Early values suffice."""
    now = identity.values(said.model)
    before = {
        name: value
        for name, value in (said.model or {}).items()
        if name not in MODE and (name not in KNOWN_LATER or name in now)
    }
    return changed_values(before, {name: value for name, value in now.items() if name not in MODE})


def promise_of(said: JobSaid, identity: ModelIdentity, margin: float | None) -> Promise:
    """What rows may be expected to give here. margin: what the user allows; None takes what suits the dtypes."""
    before = said.model or {}
    now = identity.values(before)
    modes = changed_values({name: before.get(name) for name in MODE}, {name: now.get(name) for name in MODE})
    here = {name: str(value) for name, value in identity.environment.items()}
    others = list(dict.fromkeys(text for each in said.environments for text in environment_changes(each, here)))
    if margin is None:
        margin = _margin((before, now))
    if not (before.get("invariant") and identity.invariant):
        why = "the job did not run" if not before.get("invariant") else "this engine does not run"
        return Promise(bits=False, margin=margin, why=_rounding(f"{why} in invariant mode", margin))
    if modes:
        return Promise(bits=False, margin=margin, why=_rounding(f"the mode is another: {'; '.join(modes)}", margin))
    if others:
        return Promise(
            bits=False, margin=margin, why=_rounding(f"the environment is another: {'; '.join(others)}", margin)
        )
    why = "Equal bits are promised: invariant mode, in the environment that answered."
    return Promise(bits=True, margin=0.0, why=why)


def _rounding(why: str, margin: float) -> str:
    return f"Equal bits are not promised, because {why}. Numbers and ties within {margin:g} count as rounding."


def _margin(models: tuple[Mapping[str, object], Mapping[str, object]]) -> float:
    dtypes = [model.get(name) for model in models for name in ("dtype", "kv_dtype")]
    return max(_MARGINS.get(str(dtype), _WIDEST) for dtype in dtypes)
