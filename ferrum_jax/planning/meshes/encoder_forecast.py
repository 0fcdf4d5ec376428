"""An encoder on paper, and the least time that it takes for texts, from shapes and a data sheet, as in forecast.py."""

import dataclasses

from ferrum_jax.config import EngineConfig
from ferrum_jax.models.sharding import local_bytes
from ferrum_jax.planning.meshes.forecast import Forecast, Lengths
from ferrum_jax.runtime.compile.compile import Program
from ferrum_jax.runtime.encoder_runtime import EncoderLayout, encoder_programs
from pallas_kernels.target import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderForecast:
    """How many texts of `tokens_in` a step takes on all data shards, and the least time of it."""

    tokens_in: int
    num_rows: int
    step_s: float
    bound_by: str  # "memory" or "arithmetic"

    @property
    def texts_per_s(self) -> float:
        return self.num_rows / self.step_s

    unit = "texts/s"
    tokens_out = 0

    @property
    def rate(self) -> float:
        return self.texts_per_s

    @property
    def tokens_per_s(self) -> float:
        return self.texts_per_s * self.tokens_in


AnyForecast = Forecast | EncoderForecast


def forecast_encoder(layout: EncoderLayout, target: Target, *, tokens_in: int) -> EncoderForecast:
    """Raises ValueError where such a text is longer than max_model_len."""
    if tokens_in > layout.max_model_len:
        raise ValueError(f"{tokens_in} tokens in are more than max_model_len, {layout.max_model_len}")
    length = min(bucket.length for bucket in layout.buckets if bucket.length >= tokens_in)
    largest = max(bucket for bucket in layout.buckets if bucket.length == length)
    rows = max(1, min(largest.num_texts, largest.num_tokens // tokens_in))
    layers = [weight for name, weight in layout.targets.items() if name.startswith("layers.")]  # others are looked up
    weights = sum(local_bytes(weight) // weight.dtype.itemsize for weight in layers)
    width = layout.spec.hidden_size // (layout.mesh.size // layout.num_shards)
    operations = 2 * weights + 4 * tokens_in * width * layout.spec.num_hidden_layers  # of a token
    memory_s = sum(map(local_bytes, layers)) / target.bandwidth_bytes_per_s
    arithmetic_s = rows * tokens_in * operations / target.flops_per_s
    return EncoderForecast(
        tokens_in=tokens_in,
        num_rows=rows * layout.num_shards,
        step_s=max(memory_s, arithmetic_s),
        bound_by="memory" if memory_s >= arithmetic_s else "arithmetic",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoding:
    """A model that encodes whole texts. It has no pools, and its steps need no more than their arguments."""

    layout: EncoderLayout
    num_tried: int = 0

    def programs(self) -> list[Program]:
        return [*reversed(encoder_programs(self.layout).values())]

    def forecast(self, lengths: Lengths) -> EncoderForecast:
        tokens_in = self.layout.max_model_len if lengths.tokens_in is None else lengths.tokens_in
        return forecast_encoder(self.layout, self.layout.target, tokens_in=tokens_in)

    def named(self, config: EngineConfig) -> EngineConfig:
        return config
