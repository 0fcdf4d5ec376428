"""Tables of `ferrum-jax plan`: the memory of a device, the bounds of its speed, and the meshes of a target."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from checkpoints.stored_weight import weight_of
from ferrum_jax.models.sharding import local_bytes
from ferrum_jax.planning.meshes.choices import MeshFit
from ferrum_jax.planning.meshes.encoder_forecast import AnyForecast, EncoderForecast, Encoding
from ferrum_jax.planning.meshes.forecast import Forecast, StepTime
from ferrum_jax.planning.meshes.on_paper import Generating, OnPaper
from ferrum_jax.planning.meshes.settle import by_problem
from ferrum_jax.planning.offline.bundle_order import BundleOrder
from ferrum_jax.runtime.block_copies import BlockCopies
from ferrum_jax.runtime.encoder_runtime import EncoderLayout
from ferrum_jax.runtime.placing.fit import scalar_bytes
from ferrum_jax.runtime.pools.budget import RESERVED_BYTES
from ferrum_jax.runtime.programs import others_of

if TYPE_CHECKING:
    from ferrum_jax.runtime.layout import Layout

_BOUNDS = "These are bounds from the data sheet, not measurements: launches and starts of collectives are not in them."
_LIMITS = {  # what Forecast.limited_by means
    "rows": "rows: the most time goes to reading weights, which {rows:,} rows share, and the pool holds {pool:,} "
    "(--max-num-seqs)",
    "pool": "the pool: the most time goes to reading weights, which no more than {pool:,} rows share that have room",
    "contexts": "contexts: the most time goes to reading keys and values (--kv-dtype int8 halves it)",
    "arithmetic": "arithmetic: the most time goes to the products of decode steps",
    "prefill": "prefill: the most time goes to prompts, {prefill:.0%}",
    "collectives": "collectives: the most time goes to sums over devices; fewer of them along tp wait less",
    "experts": "collectives of experts: the most time goes to tokens on their way to experts and back; experts in each "
    "shard (ep=tp) need none, where they fit",
}


def print_model(
    console: Console,
    order: BundleOrder,
    model: OnPaper,
    found: AnyForecast,
    *,
    is_compiled: bool,
) -> None:
    """Prints the memory of the chosen mesh, and its highest speed."""
    if isinstance(model, Generating) and isinstance(found, Forecast):
        _print_memory(console, order, model.layout, is_compiled=is_compiled)
        _print_bounds(console, found)
    elif isinstance(model, Encoding) and isinstance(found, EncoderForecast):
        _print_encoder(console, order, model.layout, found)


def _print_memory(console: Console, order: BundleOrder, layout: Layout, *, is_compiled: bool) -> None:
    """Where the memory of one device goes, and which executables there are."""
    ledger = layout.ledger
    console.print(f"Memory of one device of {order.target}, mesh {order.config.mesh}:", highlight=False)
    unit, size = ("GiB", 2**30) if ledger.used_bytes >= 2**30 else ("MiB", 2**20)
    step = "compiled, beside what is listed above" if is_compiled else "expected by shapes; --compile counts it"
    of_tower, what_of_tower = ("images", "") if layout.images is None else layout.images.in_words
    rows = [
        ("weights", ledger.weights_bytes, _weights_text(layout)),
        ("KV pool", ledger.kv_bytes, _pool_text(layout)),
        ("recurrent states", ledger.states_bytes, f"{ledger.num_states} states"),
        ("slots of rows", ledger.slots_bytes, "token ids and sampling parameters"),
        ("cached prompts", ledger.prompts_bytes, "last hidden states"),
        ("adapters", ledger.adapters_bytes, "slots of A and B"),
        (of_tower, ledger.images_bytes, what_of_tower),
        ("masks", ledger.masks_bytes, "which tokens each row may draw"),
        ("hidden states", ledger.hidden_bytes, "of a step's tokens"),
        ("largest step", ledger.temporaries_bytes, step),
    ]
    target = layout.options.target
    if target.platform != "cpu":  # of the CPU's memory the pool takes what is free, by its own rule
        left = target.memory_bytes - ledger.used_bytes - RESERVED_BYTES
        rows.append(("reserve", RESERVED_BYTES, "runtime and programs"))
        rows.append(("left", left, f"of {target.memory_bytes / size:,.1f}"))
    memory = Table()
    memory.add_column("what", no_wrap=True)
    memory.add_column(unit, justify="right", no_wrap=True)
    memory.add_column("")
    for what, count, text in rows:
        if count:
            memory.add_row(what, f"{count / size:,.2f}", text)
    console.print(memory)
    scalars = scalar_bytes(layout)
    if scalars is not None:
        taken, there = scalars
        console.print(f"scalar memory of the largest step: {taken:,} of {there:,} bytes", highlight=False)
    decode = sum(bucket.decode_only for bucket in layout.ladder.buckets)
    mixed = len(layout.ladder.buckets) - decode
    rows, beside = len(layout.ladder.row_buckets), len(others_of(layout)) + len(BlockCopies(layout, None).programs())
    drafts = len(layout.ladder.drafts_of(layout.ladder.buckets))
    sampling = f"{rows} that sample, {drafts} that draft" if drafts else f"{rows} that sample"
    console.print(
        f"executables: {decode} forwards of decode and {mixed} mixed ones, {sampling}, {beside} small ones\n",
        soft_wrap=True,
        highlight=False,
    )


def print_choices(console: Console, *sentences: str) -> None:
    """Prints the choices that the config left open; empty sentences are left out."""
    for sentence in filter(None, sentences):
        console.print(sentence, highlight=False, soft_wrap=True)


def _print_bounds(console: Console, found: Forecast) -> None:
    """The least time that requests take on the mesh that was taken, and what limits their output."""
    limit = _LIMITS[found.limited_by].format(rows=found.num_rows, pool=found.pool_rows, prefill=found.prefill_share)
    for line in (
        f"{found.tokens_in} tokens in, {found.tokens_out} out: {found.num_rows} requests at once",
        f"a decode step of them: at least {found.decode_step_s * 1e3:.2f} ms, bound by {found.decode_bound_by} "
        f"({_parts(found.decode)})",
        f"prefill: at most {found.prefill_tokens_per_s:,.0f} tokens/s",
        f"output of all together: at most {found.output_tokens_per_s:,.0f} tokens/s",
        f"limited by {limit}",
        _BOUNDS,
    ):
        console.print(line, highlight=False, soft_wrap=True)


def _parts(step: StepTime) -> str:
    """The parts of a step's time, in milliseconds."""
    parts = {
        "weights": step.weights_s,
        "contexts": step.contexts_s,
        "arithmetic": step.arithmetic_s,
        "collectives": step.collectives_s,
        "collectives of experts": step.experts_s,
    }
    return ", ".join(f"{name} {seconds * 1e3:.2f}" for name, seconds in parts.items() if seconds >= 5e-6)


def _print_encoder(console: Console, order: BundleOrder, layout: EncoderLayout, found: EncoderForecast) -> None:
    """Prints an encoder's memory on a device, without pools, and the least time of texts."""
    weights = layout.ledger.weights_bytes
    for line in (
        f"Memory of one device of {order.target}, mesh {order.config.mesh}: weights of {weights / 2**20:,.1f} MiB in "
        f"{layout.dtype.name}, no pools",
        f"executables: {len(layout.buckets)}, the longest for texts of {layout.buckets[-1].length} tokens\n",
        f"{found.tokens_in} tokens a text: a step of {found.num_rows} texts takes at least "
        f"{found.step_s * 1e3:.2f} ms, bound by {found.bound_by}",
        f"texts: at most {found.texts_per_s:,.0f} a second, {found.tokens_per_s:,.0f} tokens/s",
        _BOUNDS,
    ):
        console.print(line, highlight=False, soft_wrap=True)


def print_meshes(console: Console, order: BundleOrder, meshes: list[MeshFit]) -> None:
    """Prints the memory and highest speed of every mesh of the target; then why the other meshes cannot run."""
    fails_alike = all(mesh.problem for mesh in meshes) and len(by_problem(meshes)) == 1
    if len(meshes) < 2 or fails_alike:  # the plan of the mesh that is taken, or its refusal, says it all
        return
    fitting = [mesh for mesh in meshes if not mesh.problem]
    if fitting:
        lengths = fitting[0].forecast
        assert lengths is not None
        out = f" and {lengths.tokens_out} out" if lengths.tokens_out else ""
        console.print(
            f"Meshes of {order.target}, for requests of {lengths.tokens_in} tokens in{out}, by shapes:",
            highlight=False,
            soft_wrap=True,
        )
        console.print(_mesh_table(fitting))
    for line in by_problem(meshes):
        console.print(line, highlight=False, soft_wrap=True)
    named = order.config.mesh
    if named is not None and str(order.config.mesh_shape) not in {mesh.mesh for mesh in meshes}:
        console.print(f"{named} is none of these; --mesh names one", highlight=False)
    console.print()


def _mesh_table(meshes: list[MeshFit]) -> Table:
    """A mesh a row, as wide as 80 columns have room for."""
    rows = [_columns(mesh) for mesh in meshes]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in rows[0]:
        is_mesh = name == "mesh"  # which is copied: never cut
        width = max(len(row[name]) for row in rows) if is_mesh else None
        justify = "left" if is_mesh else "right"
        table.add_column(name, justify=justify, no_wrap=is_mesh, overflow="fold", min_width=width)
    for row in rows:
        table.add_row(*row.values())
    return table


def _columns(mesh: MeshFit) -> dict[str, str]:
    found, weights = mesh.forecast, mesh.weights_bytes or 0
    if isinstance(found, Forecast):
        return {
            "mesh": mesh.mesh,
            "weights\nGiB": f"{weights / 2**30:.2f}",
            "KV\ntokens": _count(mesh.kv_tokens),
            "rows\nat once": f"{found.num_rows:,}",
            "decode\nms": f"{found.decode_step_s * 1e3:.2f}",
            "prefill\ntokens/s": _count(found.prefill_tokens_per_s),
            "output\ntokens/s": _count(found.output_tokens_per_s),
            "limited\nby": found.limited_by,
        }
    assert found is not None, "a mesh that fits has one"
    return {
        "mesh": mesh.mesh,
        "weights\nMiB": f"{weights / 2**20:,.1f}",
        "texts\na step": f"{found.num_rows:,}",
        "step\nms": f"{found.step_s * 1e3:.2f}",
        "texts/s": _count(found.texts_per_s),
        "tokens/s": _count(found.tokens_per_s),
    }


def _count(value: float) -> str:
    """In millions from ten of them on, so that a table fits 80 columns."""
    return f"{value:,.0f}" if value < 1e7 else f"{value / 1e6:,.0f} M"


def _weights_text(layout: Layout) -> str:
    text = _dtypes_text(layout)
    if layout.images is None:
        return text
    tower = sum(local_bytes(weight) for weight in layout.images.weights.values())
    return f"{text}; {tower / 2**20:,.1f} MiB of them are the tower's"


def _dtypes_text(layout: Layout) -> str:
    """The dtypes of weights, with the share of each where there are several. Scales count with their codes."""
    kinds = {name: form.kind.removesuffix("_e4m3") for name, form in layout.options.spec.forms}
    found: dict[str, int] = {}
    for name, weight in layout.targets.items():
        kind = kinds.get(weight_of(name), layout.dtype.name)
        found[kind] = found.get(kind, 0) + local_bytes(weight)
    if len(found) == 1:
        return next(iter(found))
    total, largest_first = sum(found.values()), sorted(found, key=lambda kind: -found[kind])
    return ", ".join(f"{kind} {found[kind] / total:.0%}" for kind in largest_first)


def _pool_text(layout: Layout) -> str:
    ledger = layout.ledger
    counts = "; ".join(
        f"{blocks.num_blocks:,} blocks" + (f" for windows of {group.window:,}" if group.window else "")
        for group, blocks in zip(layout.options.spec.kv_groups, ledger.groups, strict=True)
    )
    text = f"{counts} of {ledger.block_size}: {ledger.kv_tokens:,} tokens in {layout.kv_dtype}"
    if ledger.head_copies > 1:
        text += f"; each KV head on {ledger.head_copies} devices"
    return f"{text}; {ledger.padded_bytes / ledger.kv_bytes:.0%} of it pads heads" if ledger.padded_bytes else text
