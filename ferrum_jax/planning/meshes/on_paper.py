"""OnPaper: what models of all kinds are on paper: laid out on a mesh, to be compiled.

`Subject.on` chooses which of two it is, once; who asks an `OnPaper` need not know.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from ferrum_jax.config import EngineConfig
from ferrum_jax.models.families.registry import AnySpec
from ferrum_jax.models.spec import ModelSpec
from ferrum_jax.planning.meshes.encoder_forecast import Encoding
from ferrum_jax.planning.meshes.forecast import Forecast, Lengths, forecast
from ferrum_jax.runtime.block_copies import BlockCopies
from ferrum_jax.runtime.compile.compile import Program
from ferrum_jax.runtime.encoder_runtime import lay_out_encoder
from ferrum_jax.runtime.layout import Layout
from ferrum_jax.runtime.placing.fit import expected_temporaries, fit, refuse_overfull
from ferrum_jax.runtime.programs import largest_first, programs_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generating:
    """A model that generates."""

    layout: Layout

    @property
    def num_tried(self) -> int:
        """How many of the first programs may need more memory than shapes say."""
        return len(self.layout.ladder.largest_parts) if self.layout.ledger.temporaries_bytes else 0

    def programs(self) -> list[Program]:
        """The programs to compile and keep, the largest first: alone at the end it would leave cores idle."""
        programs = programs_of(self.layout)
        kept = [programs[part] for part in largest_first(programs, self.layout) if programs[part].is_kept]
        return [*kept, *BlockCopies(self.layout, None).programs().values()]

    def forecast(self, lengths: Lengths) -> Forecast:
        """How fast it is at most. Raises ValueError where such a request is longer than max_model_len."""
        tokens_in, tokens_out = lengths.within(self.layout.max_model_len)
        return forecast(self.layout, self.layout.target, tokens_in=tokens_in, tokens_out=tokens_out)

    def named(self, config: EngineConfig) -> EngineConfig:
        """The config with what was laid out where it leaves that open, for whoever lays it out again."""
        num_blocks, rows = self.layout.ledger.num_blocks, self.layout.max_num_seqs
        return dataclasses.replace(config, max_num_seqs=rows, num_blocks=num_blocks, kv_memory_bytes=None)


OnPaper = Generating | Encoding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A model and a config whose mesh is open. max_seq_length: that the checkpoint's texts may have, None where it has
    no limit of its own."""

    spec: AnySpec
    config: EngineConfig
    max_seq_length: int | None = None

    def with_mesh(self, mesh: str) -> Subject:
        return self.with_fields(mesh=mesh)

    def with_fields(self, **fields: Any) -> Subject:
        """The subject with other values of these fields of its config."""
        return dataclasses.replace(self, config=dataclasses.replace(self.config, **fields))

    def on(self, mesh: Mesh, temporaries_of: Callable[[Layout], int] = expected_temporaries) -> OnPaper:
        """The model on a mesh. temporaries_of: see `fit`.

        Raises ValueError with every reason why it cannot run there, TooSmall where that is the memory.
        """
        if not isinstance(self.spec, ModelSpec):
            return Encoding(layout=lay_out_encoder(self.spec, self.config, mesh, self.max_seq_length))
        layout = fit(self.spec, self.config, mesh, temporaries_of=temporaries_of)
        refuse_overfull(layout)
        return Generating(layout=layout)
