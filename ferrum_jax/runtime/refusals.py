"""Buckets that do not fit a target, and configs that a tower does not allow: refused before anything is compiled.

Each is told with the changes that would fit. What a config leaves open, the size of blocks and the rows, is chosen so
that buckets do. Only the kernels know what fits: they are asked, and nothing of their arithmetic is here.
"""

import bisect
import dataclasses
import functools
from collections.abc import Callable

from ferrum_jax.config import EngineConfig
from ferrum_jax.models.spec import ModelSpec, VisionSpec
from ferrum_jax.runtime.buckets import Ladder
from ferrum_jax.runtime.step_options import StepOptions, attention_config
from pallas_kernels.kv_pool import KVPool

_LARGEST_BLOCK = 256  # tokens
_ROW_GRAIN = 8  # of a number of rows that is chosen here: a tile of an accelerator's vector units


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """The settings that buckets follow from."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buckets:
    """The buckets that follow from limits, and whether attention of them fits the target.

    ladder_of: the buckets of limits. pools_of: of a layer of each cache group the shapes of its pool on one device, and
    its query heads.
    """

    options: StepOptions
    ladder_of: Callable[[Limits], Ladder]
    pools_of: Callable[[Limits], list[tuple[KVPool, int]]]

    def choose(self, limits: Limits, *, leaves_blocks: bool, leaves_rows: bool) -> tuple[Limits, str]:
        """The limits with larger blocks, and only then fewer rows, where attention fits no other; and a sentence of it.

        leaves_blocks, leaves_rows: whether the config leaves them open. Limits that cannot be helped stay as they are.
        """
        if self.fit(limits):
            return limits, ""
        sizes = _block_sizes(limits) if leaves_blocks else []
        found = next((size for size in sizes if self.fit(limits, block_size=size)), None)
        if found is not None:
            chosen = dataclasses.replace(limits, block_size=found)
            return chosen, (
                f"KV blocks have {found} tokens: {self.options.implementation!r} has no room for smaller ones with "
                f"{limits.max_num_seqs} rows of up to {limits.max_model_len:,} tokens"
            )
        largest = dataclasses.replace(limits, block_size=max([limits.block_size, *sizes]))
        rows = range(limits.max_num_seqs, 0, -1) if leaves_rows else range(0)
        most = bisect.bisect_left(rows, True, key=lambda count: self.fit(largest, max_num_seqs=count))
        if most >= len(rows):
            return limits, ""
        count = rows[most] // _ROW_GRAIN * _ROW_GRAIN or rows[most]
        chosen = dataclasses.replace(largest, max_num_seqs=count)
        return chosen, (
            f"{count} rows run at once, on KV blocks of {largest.block_size} tokens: {self.options.implementation!r} "
            f"has no room for more of up to {limits.max_model_len:,} tokens; a lower max_model_len lets more run"
        )

    def fit(self, limits: Limits, **changes: int) -> bool:
        """Whether attention of all buckets fits, of the limits with these changes."""
        try:
            self.check(dataclasses.replace(limits, **changes))
        except ValueError:
            return False
        return True

    def check(self, limits: Limits) -> None:
        """Raises ValueError with the reason why attention of a bucket does not fit, of the largest such."""
        pools, own = self.pools_of(limits), dataclasses.replace(self.options, block_size=limits.block_size)
        for bucket in reversed(self.ladder_of(limits).buckets):
            try:
                for pool, num_heads in pools:
                    attention_config(bucket, own, pool, num_heads)
            except ValueError as error:
                raise ValueError(f"the bucket {bucket} cannot run with {own.implementation!r}: {error}") from error

    def refuse(self, limits: Limits) -> None:
        """Raises ValueError as `check` does, with the changes that would do."""
        try:
            self.check(limits)
        except ValueError as error:
            changes = _smallest_changes(limits, functools.partial(self.fit, limits))
            advice = f". Any one of these would do: {', '.join(changes)}" if changes else ""
            raise ValueError(f"{error}{advice}") from error


def _block_sizes(limits: Limits) -> list[int]:
    """Sizes of blocks beyond that of the limits, the smallest first."""
    sizes = [limits.block_size << shift for shift in range(1, _LARGEST_BLOCK.bit_length())]
    return [size for size in sizes if size <= _LARGEST_BLOCK]


def _smallest_changes(limits: Limits, fits: Callable[..., bool]) -> list[str]:
    """The nearest value of each setting with which everything fits, where there is one."""
    smaller = {
        name: bisect.bisect_left(range(1, getattr(limits, name)), True, key=lambda n, name=name: not fits(**{name: n}))
        for name in ("max_num_seqs", "max_model_len", "max_num_batched_tokens")
    }
    larger = [size for size in _block_sizes(limits) if fits(block_size=size)]
    return [f"{name}={value}" for name, value in {**smaller, "block_size": min(larger, default=0)}.items() if value]


def tower_refusals(spec: ModelSpec, config: EngineConfig, *, kv_dtype: str, num_rows: int) -> list[str]:
    """Why a model with a tower cannot be served as a config says. num_rows: max_num_seqs."""
    found = []
    if spec.vision is not None and config.max_adapters:
        found.append(
            f"max_adapters is {config.max_adapters}, and a model that sees images takes no adapters yet; set "
            "max_image_tokens=0 to serve it for text alone"
        )
    if spec.sound is not None and config.max_adapters:
        found.append(
            f"max_adapters is {config.max_adapters}, and a model that hears takes no adapters yet; set it to 0"
        )
    if spec.cross_layers and kv_dtype == "int8":
        found.append(
            "kv_dtype is 'int8', and this model's layers attend to a clip, whose keys are kept without scales; take "
            "'auto' or an fp8"
        )
    if spec.vision is not None:
        found += _image_refusals(config, spec.vision, num_rows)
    return found


def _image_refusals(config: EngineConfig, vision: VisionSpec, num_rows: int) -> list[str]:
    """Why images of one size have no room, or none in one step where their tokens see each other."""
    patches, tokens = vision.patches_of_all, vision.tokens_of_all
    if patches is None or tokens is None:
        return []
    least = tokens + num_rows - 1  # beside the tokens of all other rows
    found = [
        f"{name} is {value}, and an image of this model has {count} {what}; raise it to {count} or more, or set "
        "max_image_tokens=0 to serve the text alone"
        for name, value, count, what in (
            ("max_image_patches", config.max_image_patches, patches, "patches"),
            ("max_image_tokens", config.max_image_tokens, tokens, "tokens"),
        )
        if value < count
    ]
    if vision.sees_both_ways and config.max_num_batched_tokens < least:
        found.append(
            f"max_num_batched_tokens is {config.max_num_batched_tokens}, and a step must hold the {tokens} tokens of "
            f"an image, which see each other, beside those of {num_rows - 1} other rows; raise it to {least} or "
            "more, lower max_num_seqs, or set max_image_tokens=0 to serve the text alone"
        )
    return found
