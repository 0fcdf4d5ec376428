"""Orders of bundles: what to make executables of, and the plan that an order comes to.

An order is text and numbers, so it crosses processes; its plan is laid out, and has the programs to compile.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from checkpoints import stored_forms
from checkpoints.sentence import read_sentence_layout
from ferrum_jax.config import EngineConfig
from ferrum_jax.embeddings.encoder_runtime import EncoderLayout, encoder_programs, lay_out_encoder
from ferrum_jax.executables.bundle import Purpose, purpose_of
from ferrum_jax.executables.topology import target_devices
from ferrum_jax.files.json_files import read_json
from ferrum_jax.meshes.choices import MeshFit, Subject
from ferrum_jax.meshes.settle import choose_mesh
from ferrum_jax.models import registry
from ferrum_jax.models.encoder_spec import EncoderSpec
from ferrum_jax.runtime.block_copies import BlockCopies
from ferrum_jax.runtime.compile import Program
from ferrum_jax.runtime.fit import (
    TooSmall,
    changes_that_fit,
    expected_temporaries,
    fit,
    refuse_overfull,
    temporaries_bytes,
)
from ferrum_jax.runtime.layout import Layout
from ferrum_jax.runtime.programs import largest_first, programs_of
from ferrum_jax.sharding import make_mesh, takes_all_hosts
from ferrum_jax.spec import ModelSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class BundleOrder:
    """What to make a bundle of.

    model: a folder whose config.json is read, and of its weights names and dtypes where they are there. target: a name
    that executables/topology.py knows. why_mesh: in a sentence, where `settled` chose the mesh.
    """

    model: str
    target: str
    config: EngineConfig
    why_mesh: str = ""

    def settled(self, meshes: Sequence[MeshFit] | None = None) -> BundleOrder:
        """The order with a mesh named, as `choose_mesh` does. meshes: of the target's devices, where they are known.

        Raises ValueError where the model fits none.
        """
        if self.config.mesh is not None:
            return self
        choice = choose_mesh(self.subject, target_devices(self.target), meshes=meshes)
        return dataclasses.replace(self, config=dataclasses.replace(self.config, mesh=choice.mesh), why_mesh=choice.why)

    @property
    def subject(self) -> Subject:
        """What runs, for the choice of a mesh."""
        if not self.is_encoder:
            return Subject(spec=self.spec, config=self.config)
        spec, longest = registry.encoder_spec_of(self._model), read_sentence_layout(Path(self.model)).max_seq_length
        return Subject(spec=spec, config=self.config, max_seq_length=longest)

    def plan(self, least: int = 0) -> BundlePlan:
        """What the order comes to. least: bytes that a step was seen to need. Raises ValueError as `lay_out` does.

        The largest programs come first: they take longest, and one of them alone at the end would leave cores idle.
        Those that need more than shapes say are found early so.
        """
        if self.config.mesh is None:
            return self.settled().plan(least)
        if self.is_encoder:
            encoder = self.lay_out_encoder()
            purpose = purpose_of(self.target, self.config, encoder.mesh, encoder.spec)
            return BundlePlan(order=self, purpose=purpose, programs=[*reversed(encoder_programs(encoder).values())])
        layout = self.lay_out(lambda probe: max(expected_temporaries(probe), least))
        chosen = dataclasses.replace(
            layout.settled(self.config), num_blocks=layout.ledger.num_blocks, kv_memory_bytes=None
        )
        programs = programs_of(layout)
        promised = layout.ledger.temporaries_bytes
        return BundlePlan(
            order=dataclasses.replace(self, config=chosen),
            purpose=purpose_of(self.target, chosen, layout.mesh, self.spec),
            programs=[
                *(programs[part] for part in largest_first(programs, layout) if programs[part].is_kept),
                *BlockCopies(layout, None).programs().values(),
            ],
            promised=promised,
            tried=frozenset(range(len(layout.ladder.largest_parts))) if promised else frozenset(),
        )

    def lay_out(self, temporaries_of: Callable[[Layout], int] | None = None) -> Layout:
        """The engine's layout. Raises ValueError with every reason why the target cannot run it.

        temporaries_of: see `fit`; without it the compiler is asked, which takes minutes for a large model.
        """
        if self.config.mesh is None:
            return self.settled().lay_out(temporaries_of)
        asked = functools.partial(temporaries_bytes, executable_cache=None)
        try:
            layout = fit(self.spec, self.config, self._mesh(), temporaries_of=temporaries_of or asked)
        except TooSmall as small:
            changes = changes_that_fit(self.spec, self.config, target_devices(self.target), small)
            advice = f"Any one of these would do: {', '.join(changes)}" if changes else "No mesh would do"
            raise ValueError(f"{small.what}. {advice}") from small
        refuse_overfull(layout)
        return layout

    def lay_out_encoder(self) -> EncoderLayout:
        """An encoder's layout. Raises ValueError as `lay_out` does."""
        if self.config.mesh is None:
            return self.settled().lay_out_encoder()
        subject = self.subject
        assert isinstance(subject.spec, EncoderSpec)
        return lay_out_encoder(subject.spec, self.config, self._mesh(), subject.max_seq_length)

    @functools.cached_property
    def spec(self) -> ModelSpec:
        """Raises ValueError where there is no config.json, it is not understood, or it is of an encoder."""
        if self.is_encoder:
            raise ValueError(f"{self.model} is an encoder, and has none of the pools that would be planned")
        return registry.spec_of(self._model, stored=stored_forms(Path(self.model), self._model))

    @property
    def is_encoder(self) -> bool:
        return registry.is_encoder(self._model)

    @functools.cached_property
    def _model(self) -> Mapping[str, Any]:
        return read_json(Path(self.model) / "config.json")

    def _mesh(self) -> Mesh:
        shape, devices = self.config.mesh_shape, target_devices(self.target)
        if not takes_all_hosts(shape, devices):
            raise ValueError(
                f"mesh is {str(shape)!r}, {shape.size} of the {len(devices)} devices of {self.target}, a slice of "
                f"several hosts, which all run every step; name a mesh of all {len(devices)}, or a slice of "
                f"{shape.size}"
            )
        return make_mesh(shape, devices)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BundlePlan:
    """What is to be compiled, the largest programs first.

    order: with the size of the pools in it (free memory may be another when a process asks). promised: bytes beside
    their arguments that `tried` of the programs may need, which the size of the pools counts on.
    """

    order: BundleOrder
    purpose: Purpose
    programs: list[Program]
    promised: int = 0
    tried: frozenset[int] = frozenset()
