"""The implementation of an engine's quantised products: the named one, else the one that a check on this chip proved.

Kernels rest on what a matrix unit makes of numbers of few bits, so they run by themselves only where `ferrum-jax check`
found them right and no slower than "xla", for every form that the model has. The kernel of recurrences goes with them.
"""

import dataclasses
from typing import Any

from checkpoints.stored_weight import WeightForm
from ferrum_jax.config import EngineConfig
from ferrum_jax.engine.startup.accelerators import Chips
from ferrum_jax.models.spec import KimiDeltaSpec, Mamba2Spec, ModelSpec
from ferrum_jax.runtime.compile.verdicts import VerdictKey, VerdictStore, entry_of
from pallas_kernels.grouped_matmul.dense_support import DENSE
from pallas_kernels.quantized_matmul import BY_INT8, form_class
from pallas_kernels.row_recurrence.tpu_support import refusals, state_class
from pallas_kernels.target import Target

DENSE_EXPERTS = entry_of("grouped_matmul", "bfloat16", DENSE)
_KERNELS = {"tpu": "mosaic_tpu", "gpu": "mosaic_gpu"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductChoice:
    """implementation: "xla", "mosaic_tpu" or "mosaic_gpu". why: a sentence, "" where there was nothing to choose."""

    implementation: str
    why: str = ""


def choose_products(spec: ModelSpec, config: EngineConfig, device: Any, *, chip: str | None = None) -> ProductChoice:
    """The choice for an engine on this device. spec: with its forms. chip: as VerdictKey's; None looks for it here."""
    if config.product_implementation != "auto":
        return ProductChoice(implementation=config.product_implementation)
    kernel = _KERNELS.get(device.platform)
    if kernel == "mosaic_gpu" and Target.of_device(device).num_cores is None:  # no Hopper GPU
        kernel = None
    entries = {entry_of_form(name, form) for name, form in spec.forms}
    if kernel == "mosaic_tpu" and _has_dense_experts(spec, config):
        entries.add(DENSE_EXPERTS)
    if kernel == "mosaic_tpu" and (entry := _entry_of_recurrence(spec, config)) is not None:
        entries.add(entry)
    if kernel == "mosaic_gpu":  # which leaves int8 by int8 to XLA
        entries = {entry for entry in entries if not entry.endswith(BY_INT8)}
    if kernel is None or not entries or config.check == "off":
        return ProductChoice(implementation="xla")
    store = VerdictStore(config.compilation_cache_dir, VerdictKey.here(Chips.here().name if chip is None else chip))
    for entry in sorted(entries):
        about = _about({entry})
        verdict = store.find(entry)
        if verdict is None or verdict.device_kind != device.device_kind:
            return ProductChoice(
                implementation="xla",
                why=f"{about} run on 'xla': no check on this chip proved {kernel!r} for {entry}; "
                "`ferrum-jax check --full` does",
            )
        if not verdict.is_right:
            return ProductChoice(
                implementation="xla",
                why=f"{about} run on 'xla': {kernel!r} is not right on this chip for {entry}: {verdict.problem}",
            )
        if verdict.speed is None or verdict.speed < 1:
            speed = "was not timed" if verdict.speed is None else f"is {verdict.speed:.2g} times as fast as it"
            return ProductChoice(
                implementation="xla", why=f"{about} run on 'xla': {kernel!r} {speed} on this chip for {entry}"
            )
    why = f"{_about(entries)} run on {kernel!r}: the check found it right and faster"
    return ProductChoice(implementation=kernel, why=why)


def _about(entries: set[str]) -> str:
    """The operations that entries of verdicts decide on, in words."""
    of = {
        "products of experts": {DENSE_EXPERTS},
        "recurrences": {entry for entry in entries if entry.startswith(("gated_delta ", "state_space "))},
    }
    named = [name for name, own in of.items() if own & entries]
    others = entries.difference(*of.values())
    return " and ".join([*(["products with quantised weights"] if others else []), *named])


def _has_dense_experts(spec: ModelSpec, config: EngineConfig) -> bool:
    """Whether the TPU's kernel would multiply the model's experts in bfloat16."""
    is_dense = not any(".experts." in name for name, _ in spec.forms)
    return spec.experts is not None and spec.experts.has_gates and is_dense and config.dtype in ("auto", "bfloat16")


def _entry_of_recurrence(spec: ModelSpec, config: EngineConfig) -> str | None:
    """The entry that decides for a model's recurrent layers; None where it has none that the TPU's kernel takes."""
    own = spec.recurrence
    state = None if own is None else own.state_shape
    if state is None or refusals(state) or config.dtype not in ("auto", "bfloat16"):
        return None
    op = "state_space" if isinstance(own, Mamba2Spec) else "gated_delta"
    return entry_of(op, "bfloat16", state_class(state, by_channel=isinstance(own, KimiDeltaSpec)))


def entry_of_form(name: str, form: WeightForm) -> str:
    """The entry of the verdicts that decides for a weight."""
    op = "grouped_matmul" if ".experts." in name else "quantized_matmul"
    return entry_of(op, "bfloat16", form_class(form.kind, form.group, form.has_zeros, form.activations))


def recorded_products(text: str) -> tuple[str, str]:
    """(what is recorded of attention, of products) in a text of `StepOptions.recorded`."""
    attention, _, products = text.partition(" products=")
    return attention, products or "xla"
