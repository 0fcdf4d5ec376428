"""Settling: what an order leaves open is chosen here, before anything is loaded; nothing later rewrites a config."""

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from ferrum_jax.config import EngineConfig
from ferrum_jax.core.scheduler.request_log import require_request_log
from ferrum_jax.engine.startup.choose_attention import AttentionChoice, choose_attention, for_unfamiliar
from ferrum_jax.engine.startup.choose_products import ProductChoice, choose_products, recorded_products
from ferrum_jax.engine.startup.load_request import LoadRequest
from ferrum_jax.io.files.store import open_store
from ferrum_jax.io.paths import require_folder_of
from ferrum_jax.models.families import registry
from ferrum_jax.models.sharding import make_mesh
from ferrum_jax.models.spec import ModelSpec
from ferrum_jax.planning.meshes.on_paper import Subject
from ferrum_jax.planning.meshes.settle import MeshChoice, choose_mesh
from ferrum_jax.runtime.compile.bundle import BundledExecutables, spec_digest
from ferrum_jax.runtime.compile.executable_store import ExecutableCache, ExecutableStore
from ferrum_jax.runtime.distributed.processes import current, refuse_several_processes, require_all_processes, told


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chosen:
    """config: with mesh and implementations named. why_mesh: a sentence where there was a choice of meshes, or "".

    attention, products: how their implementations were chosen. store, bundled: where executables come from.
    """

    config: EngineConfig
    mesh: Mesh
    why_mesh: str
    attention: AttentionChoice
    products: ProductChoice
    store: ExecutableStore | None
    bundled: BundledExecutables | None

    @property
    def executable_cache(self) -> ExecutableCache | None:
        return self.bundled or self.store


def choose(order: LoadRequest, max_seq_length: int | None) -> Chosen:
    """All that is chosen for an order. max_seq_length: that the checkpoint's texts may have.

    Raises ValueError for what cannot run here.
    """
    spec, config = order.source.spec, order.config
    attention, products = AttentionChoice(implementation=None), ProductChoice(implementation="xla")
    before = _choose_before(order, spec) if isinstance(spec, ModelSpec) else None
    devices = config.among(jax.devices())
    taken = choose_mesh(Subject(spec=spec, config=config, max_seq_length=max_seq_length), devices)
    taken = MeshChoice(**told(dataclasses.asdict(taken)))
    if order.source.reads_whole:
        refuse_several_processes(spec.architecture)
    config = dataclasses.replace(config, mesh=taken.mesh)
    mesh = make_mesh(config.mesh_shape, devices)
    if isinstance(spec, ModelSpec):
        require_all_processes(mesh)
        attention, products = _choose_attention(order, spec, config, mesh, before), _choose_products(order, spec, mesh)
        config = dataclasses.replace(
            config,
            implementation=attention.implementation,
            attention_tiles=_tiles(attention, config),
            product_implementation=products.implementation,
        )
    store, bundled = _executable_caches(order, mesh.devices.flatten().tolist())
    return Chosen(
        config=config,
        mesh=mesh,
        why_mesh=taken.why,
        attention=attention,
        products=products,
        store=store,
        bundled=bundled,
    )


def _choose_before(order: LoadRequest, spec: ModelSpec) -> AttentionChoice | None:
    """The choice of attention that is made before the devices are opened, which a child may have to do first."""
    config = order.config
    if config.kv_tier is not None:
        refuse_several_processes("kv_tier")
        open_store(config.kv_tier)
    if config.request_log is not None:
        require_folder_of(config.request_log, "request log")
        require_request_log(config.request_log)
    if current() is not None or order.begun_with:
        return None
    return choose_attention(spec, config, is_bundled=order.bundle is not None, rehearsal=order.rehearsal)


def _choose_attention(
    order: LoadRequest, spec: ModelSpec, config: EngineConfig, mesh: Mesh, before: AttentionChoice | None
) -> AttentionChoice:
    """The choice of attention, the same in all processes; warns where a kernel is set aside. config: with its mesh."""
    device, processes, is_bundled = mesh.devices.flat[0], current(), order.bundle is not None
    choice = AttentionChoice(implementation=config.implementation)
    if before is not None:
        choice = before.on(device)
    elif config.implementation is None and device.device_kind in order.begun_with:
        choice = AttentionChoice.recorded(recorded_products(order.begun_with[device.device_kind])[0])
    elif processes is None or processes.leads:
        shared = None if processes is None else mesh
        choice = choose_attention(spec, config, mesh=shared, is_bundled=is_bundled)
    if choice.implementation is None and not choice.why:
        choice = for_unfamiliar(device)
    choice = AttentionChoice(**told(dataclasses.asdict(choice)))
    if choice.is_set_aside:
        warnings.warn(choice.why, RuntimeWarning, stacklevel=5)
    return choice


def _choose_products(order: LoadRequest, spec: ModelSpec, mesh: Mesh) -> ProductChoice:
    """The implementation of quantised products, equal in all processes.

    A job that goes on takes what it began with, and a bundle's executables are those of its config.
    """
    config, device, named = order.config, mesh.devices.flat[0], order.config.product_implementation
    if named == "auto" and device.device_kind in order.begun_with:
        named = recorded_products(order.begun_with[device.device_kind])[1]
    if named == "auto" and order.bundle is not None:
        named = "xla"
    choice = ProductChoice(implementation=named)
    if named == "auto":
        choice = choose_products(registry.quantised_spec(spec, config.weights), config, device)
    return ProductChoice(**told(dataclasses.asdict(choice)))  # told in every case: only process 0 knows begun_with


def _tiles(choice: AttentionChoice, config: EngineConfig) -> str | None:
    """The tiles of the choice; named ones do not count where a check chose "xla"."""
    if choice.implementation == "xla" != config.implementation:
        return None
    return choice.tiles or config.attention_tiles


def _executable_caches(
    order: LoadRequest, devices: Sequence[Any]
) -> tuple[ExecutableStore | None, BundledExecutables | None]:
    """The store, if the config names one, and before it the bundle."""
    folder = order.config.compilation_cache_dir
    store = None if folder is None else ExecutableStore(folder, devices)
    if order.bundle is None:
        return store, None
    return store, BundledExecutables(
        order.bundle,
        devices,
        spec=spec_digest(order.source.spec),
        fallback=store,
        required=order.require_bundle,
        on_problem=order.on_problem,
    )
