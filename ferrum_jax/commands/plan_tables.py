"""Tables of `ferrum-jax plan`: the memory of a device, the bounds of its speed, and the meshes of a target."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from ferrum_jax.embeddings.encoder_runtime import EncoderLayout
from ferrum_jax.offline.bundle_order import BundleOrder
from ferrum_jax.offline.encoder_forecast import EncoderForecast
from ferrum_jax.offline.forecast import Forecast
from ferrum_jax.offline.mesh_choices import MeshFit
from ferrum_jax.pools.budget import RESERVED_BYTES
from ferrum_jax.runtime.block_copies import BlockCopies
from ferrum_jax.runtime.fit import scalar_bytes
from ferrum_jax.runtime.programs import others_of
from ferrum_jax.runtime.resolve import sees_images_whole
from ferrum_jax.sharding import local_bytes

if TYPE_CHECKING:
    from ferrum_jax.runtime.layout import Layout

_BOUNDS = "These are bounds from the data sheet, not measurements: collectives and launches are not in them."


def print_memory(console: Console, order: BundleOrder, layout: Layout, *, is_compiled: bool) -> None:
    """Where the memory of one device goes, and which executables there are."""
    ledger = layout.ledger
    console.print(f"Memory of one device of {order.target}, mesh {order.config.mesh}:", highlight=False)
    unit, size = ("GiB", 2**30) if ledger.used_bytes >= 2**30 else ("MiB", 2**20)
    step = "compiled, beside what is listed above" if is_compiled else "expected by shapes; --compile counts it"
    rows = [
        ("weights", ledger.weights_bytes, _weights_text(layout)),
        ("KV pool", ledger.kv_bytes, _pool_text(layout)),
        ("recurrent states", ledger.states_bytes, f"{ledger.num_states} states"),
        ("slots of rows", ledger.slots_bytes, "token ids and sampling parameters"),
        ("cached prompts", ledger.prompts_bytes, "last hidden states"),
        ("adapters", ledger.adapters_bytes, "slots of A and B"),
        ("images", ledger.images_bytes, "embeddings of images"),
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
    if target.platform != "cpu" and sees_images_whole(layout.options.spec):
        console.print("attention runs on 'xla', which alone has tokens of images that see each other", highlight=False)
    scalars = scalar_bytes(layout)
    if scalars is not None:
        taken, there = scalars
        console.print(f"scalar memory of the largest step: {taken:,} of {there:,} bytes", highlight=False)
    decode = sum(bucket.decode_only for bucket in layout.ladder.buckets)
    mixed = len(layout.ladder.buckets) - decode
    rows, beside = len(layout.ladder.row_buckets), len(others_of(layout)) + len(BlockCopies(layout, None).programs())
    console.print(
        f"executables: {decode} forwards of decode and {mixed} mixed ones, {rows} that sample, {beside} small ones\n",
        soft_wrap=True,
        highlight=False,
    )


def print_bounds(console: Console, found: Forecast) -> None:
    """The least time that requests take on the mesh that was named."""
    for line in (
        f"{found.tokens_in} tokens in, {found.tokens_out} out: {found.num_rows} requests at once",
        f"a decode step of them: at least {found.decode_step_s * 1e3:.2f} ms, bound by {found.decode_bound_by}",
        f"prefill: at most {found.prefill_tokens_per_s:,.0f} tokens/s",
        f"output of all together: at most {found.output_tokens_per_s:,.0f} tokens/s",
        _BOUNDS,
    ):
        console.print(line, highlight=False, soft_wrap=True)


def print_encoder(console: Console, order: BundleOrder, layout: EncoderLayout, found: EncoderForecast) -> None:
    """What an encoder takes of a device, which has no pools beside it, and the least time that texts take."""
    weights = layout.model.weights_bytes
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
    """What every mesh of the target holds and how fast it is at most; then why the others cannot run."""
    if len(meshes) < 2:  # the one of a single device is the one that is told of anyway
        return
    fitting = [mesh for mesh in meshes if not mesh.problem]
    if fitting:
        lengths = fitting[0].forecast
        assert lengths is not None
        out = f" and {lengths.tokens_out} out" if isinstance(lengths, Forecast) else ""
        console.print(
            f"Meshes of {order.target}, for requests of {lengths.tokens_in} tokens in{out}, by shapes:",
            highlight=False,
            soft_wrap=True,
        )
        console.print(_encoding_table(fitting) if order.is_encoder else _mesh_table(fitting))
    for mesh in meshes:
        if mesh.problem:
            console.print(f"{mesh.mesh}: {mesh.problem}", highlight=False, soft_wrap=True)
    if str(order.config.mesh_shape) not in {mesh.mesh for mesh in meshes}:
        console.print(f"{order.config.mesh} is none of these; --mesh names one", highlight=False)
    console.print()


def _mesh_table(meshes: list[MeshFit]) -> Table:
    table = _table(
        "mesh", "weights\nGiB", "KV\ntokens", "rows\nat once", "decode\nms", "prefill\ntokens/s", "output\ntokens/s"
    )
    for mesh in meshes:
        found = mesh.forecast
        assert isinstance(found, Forecast) and mesh.weights_bytes is not None
        table.add_row(
            mesh.mesh,
            f"{mesh.weights_bytes / 2**30:.2f}",
            _count(mesh.kv_tokens),
            f"{found.num_rows:,}",
            f"{found.decode_step_s * 1e3:.2f}",
            _count(found.prefill_tokens_per_s),
            _count(found.output_tokens_per_s),
        )
    return table


def _encoding_table(meshes: list[MeshFit]) -> Table:
    table = _table("mesh", "weights\nMiB", "texts\na step", "step\nms", "texts/s", "tokens/s")
    for mesh in meshes:
        found = mesh.forecast
        assert isinstance(found, EncoderForecast) and mesh.weights_bytes is not None
        table.add_row(
            mesh.mesh,
            f"{mesh.weights_bytes / 2**20:,.1f}",
            f"{found.num_rows:,}",
            f"{found.step_s * 1e3:.2f}",
            _count(found.texts_per_s),
            _count(found.tokens_per_s),
        )
    return table


def _count(value: float) -> str:
    """In millions from ten of them on, so that a table fits 80 columns."""
    return f"{value:,.0f}" if value < 1e7 else f"{value / 1e6:,.0f} M"


def _table(first: str, *numbers: str) -> Table:
    table = Table()
    table.add_column(first, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _weights_text(layout: Layout) -> str:
    if layout.images is None:
        return layout.dtype.name
    tower = sum(local_bytes(weight) for weight in layout.images.weights.values())
    return f"{layout.dtype.name}; {tower / 2**20:,.1f} MiB of them are the tower's"


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
