"""Orders of bundles: what to make executables of, and the plan that an order comes to.

An order is text and numbers, so it crosses processes; its plan is laid out, and has the programs to compile.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from jax.sharding import Mesh

from checkpoints import stored_forms
from checkpoints.sentence import read_sentence_layout
from ferrum_jax.config import EngineConfig
from ferrum_jax.inputs.sizes.speculative import asks_the_model
from ferrum_jax.io.files.json_files import read_json
from ferrum_jax.models.families import registry
from ferrum_jax.models.sharding import make_mesh, takes_all_hosts
from ferrum_jax.models.spec import ModelSpec
from ferrum_jax.planning.meshes.choices import MeshFit
from ferrum_jax.planning.meshes.on_paper import OnPaper, Subject
from ferrum_jax.planning.meshes.settle import choose_mesh
from ferrum_jax.runtime.compile.bundle import Purpose, purpose_of
from ferrum_jax.runtime.compile.compile import Program
from ferrum_jax.runtime.compile.topology import target_devices
from ferrum_jax.runtime.layout import Layout
from ferrum_jax.runtime.placing.fit import TooSmall, changes_that_fit, expected_temporaries, temporaries_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class BundleOrder:
    """An order for a bundle.

    model: a folder whose config.json is read, and of its weights names and dtypes where they are there. target: a name
    that runtime/compile/topology.py knows. why_mesh: in a sentence, where `settled` chose the mesh.
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
        return dataclasses.replace(self, config=self.subject.with_mesh(choice.mesh).config, why_mesh=choice.why)

    def plan(self, least: int = 0) -> BundlePlan:
        """The order's plan. least: bytes that a step was seen to need. Raises ValueError as `laid_out` does.

        Programs that need more than shapes say come first, so they are found early.
        """
        if self.config.mesh is None:
            return self.settled().plan(least)
        model = self.laid_out(lambda probe: max(expected_temporaries(probe), least))
        chosen = model.named(self.config)
        return BundlePlan(
            order=dataclasses.replace(self, config=chosen),
            purpose=purpose_of(self.target, chosen, model.layout.mesh, self.subject.spec),
            programs=model.programs(),
            promised=model.layout.ledger.temporaries_bytes,
            tried=frozenset(range(model.num_tried)),
        )

    def laid_out(self, temporaries_of: Callable[[Layout], int] | None = None) -> OnPaper:
        """The model on its mesh. Raises ValueError with every reason why the target cannot run it.

        temporaries_of: see `fit`; without it the compiler is asked, which takes minutes for a large model.
        """
        if self.config.mesh is None:
            return self.settled().laid_out(temporaries_of)
        asked = functools.partial(temporaries_bytes, executable_cache=None)
        try:
            return self.subject.on(self._mesh(), temporaries_of or asked)
        except TooSmall as small:
            assert isinstance(self.subject.spec, ModelSpec), "only models that generate are fitted"
            changes = changes_that_fit(self.subject.spec, self.config, target_devices(self.target), small)
            advice = f"Any one of these would do: {', '.join(changes)}" if changes else "No mesh would do"
            raise ValueError(f"{small.what}. {advice}") from small

    @functools.cached_property
    def subject(self) -> Subject:
        """The model and its config. Raises ValueError without a config.json, or for an unknown one."""
        folder = Path(self.model)
        config = read_json(folder / "config.json")
        if not registry.is_encoder(config):
            mtp = asks_the_model(self.config.speculative_config)
            spec = registry.spec_of(config, stored=stored_forms(folder, config), mtp=mtp)
            return Subject(spec=spec, config=self.config)
        longest = read_sentence_layout(folder).max_seq_length
        return Subject(spec=registry.encoder_spec_of(config), config=self.config, max_seq_length=longest)

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
    """The programs to compile, the largest first.

    order: with the size of the pools in it (free memory may be another when a process asks). promised: bytes beside
    their arguments that `tried` of the programs may need, which the size of the pools counts on.
    """

    order: BundleOrder
    purpose: Purpose
    programs: list[Program]
    promised: int = 0
    tried: frozenset[int] = frozenset()
