"""EngineConfig: every choice a user makes about an engine, checked when it is made; EngineSizes: what came of it."""

from __future__ import annotations

import dataclasses
import functools
import numbers
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ferrum_jax.forms import made_form
from ferrum_jax.ints import pool_blocks

_IMPLEMENTATIONS = (None, "xla", "mosaic_tpu", "mosaic_gpu")
_DTYPES = ("auto", "float32", "bfloat16")
_ON_RECOMPILE = ("warn", "error")
_ADAPTER_TARGETS = ("attention", "mlp", "experts", "head")
_PRODUCT_IMPLEMENTATIONS = ("auto", "xla", "mosaic_tpu")
_CHECK = ("auto", "off")
_READY = ("first", "all")
_KINDS = {
    "int": (numbers.Integral, "a whole number"),
    "bool": (bool, "true or false"),
    "str": (str, "a text"),
    "tuple[int, ...]": (tuple, "a list of device ids, devices of jax, a mesh of jax"),
}
_KV_DTYPES = (*_DTYPES, "int8", "fp8_e4m3", "fp8_e5m2")
MANY_ROWS, _ROWS_ON_CPU = 256, 16  # that run at once: where throughput counts; where each row slows the others
_MOST_OF_IMAGES = 1 << 30  # tokens or patches, which are counted in 32 bits


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Devices along each axis of a mesh. dp: data shards, each with rows of its own. tp: devices that share their work.

    has_experts_once: the experts are spread over all devices, and every shard sends its tokens there; otherwise each
    shard has all experts.
    """

    dp: int = 1
    tp: int = 1
    has_experts_once: bool = True

    @classmethod
    def parse(cls, text: str) -> MeshShape:
        """The shape of a text such as "tp=4" or "dp=2,tp=4". Raises ValueError with what it should be.

        ep is the number of devices that the experts are spread over: tp or, by default, dp * tp. Given alone, it is
        dp, too.
        """
        sizes: dict[str, int] = {}
        for part in text.split(","):
            name, _, size = part.strip().partition("=")
            if name not in ("dp", "tp", "ep") or name in sizes or not size.isdecimal() or int(size) < 1:
                raise ValueError(
                    f"mesh is {text!r}; it must name numbers of devices along dp and tp, such as 'tp=4' or "
                    "'dp=2,tp=4', and may name those that the experts are spread over, as in 'dp=2,tp=4,ep=4'"
                )
            sizes[name] = int(size)
        ep = sizes.pop("ep", None)
        dp, tp = (ep or 1, 1) if not sizes else (sizes.get("dp", 1), sizes.get("tp", 1))
        if ep not in (None, tp, dp * tp):
            choices = " or ".join(str(size) for size in dict.fromkeys((tp, dp * tp)))
            raise ValueError(
                f"mesh is {text!r}; ep is {ep}, and experts are spread over the devices of a shard or of "
                f"all: ep may be {choices}"
            )
        return cls(dp=dp, tp=tp, has_experts_once=ep in (None, dp * tp))

    @property
    def size(self) -> int:
        return self.dp * self.tp

    @property
    def ep(self) -> int:
        """Devices that the experts are spread over."""
        return self.size if self.has_experts_once else self.tp

    def __str__(self) -> str:
        text = f"tp={self.tp}" if self.dp == 1 else f"dp={self.dp},tp={self.tp}"
        return text if self.has_experts_once else f"{text},ep={self.tp}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reach:
    """Upper bounds for the steps of a known set of requests: no executable is made for larger steps.

    num_rows: choices of all requests. num_tokens: all their tokens, in and out. request_tokens: those of the longest
    request; None if that is not known, or if block tables shall be as wide as max_model_len.
    """

    num_rows: int
    num_tokens: int
    request_tokens: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How an engine runs. Defaults suit the platform; names are vLLM's where it has one.

    dtype: of weights and activations; "auto" is float32 on the CPU, elsewhere the checkpoint's own, or bfloat16 if that
    is float16.
    weights: what dense weights are quantised to while they load: "int8", "fp8", "int4" and others that
    `forms.made_form` lists; "auto" leaves them as they are. Embeddings, norms, routers, gates and the head stay.
    kv_dtype: of the KV pool; "auto" is dtype. int8 has a scale per token and head, fp8_e4m3 and fp8_e5m2 none; all
    three change logits a little (`ferrum-jax bench --workload kv_error` says how much).
    block_size: tokens per KV block; None chooses it: 16 on the CPU, elsewhere the smallest power of two from 16 to 128
    whose block has 32 KB per device and layer.
    max_model_len: most tokens (prompt + output) of a request; None takes the model's own limit.
    Models with longrope (Phi) use its long factors for all positions if this is more than their original length.
    max_num_seqs: rows that run at once; None is 16 on the CPU, 256 elsewhere and for `ferrum-jax batch`.
    max_num_batched_tokens: tokens in one step.
    kv_memory_bytes: KV pool size; None is what is left of an accelerator. On the CPU it is the largest of 1 GiB, the
    weights' size and one row at max_model_len, within a quarter of the free memory. num_blocks overrides it.
    host_cache_bytes: host memory for cached blocks that the KV pools give up; they come back on a hit. 0 keeps none.
    enable_prefix_caching: reuse blocks and prompts; off stores nothing. max_cached_prompts: whole prompts whose repeat
    computes no token; 0 keeps none. min_cached_prompt_tokens: shorter ones are not kept.
    max_state_snapshots: for a model with recurrent layers, how many states of prefixes are kept beside those of rows;
    up to half of these are states of answers that are being generated.
    invariant: on the CPU in float32, logits are bit-identical whatever runs beside a request.
    implementation: of attention, "xla", "mosaic_tpu" or "mosaic_gpu"; None follows what a check found on this chip.
    product_implementation: of products with quantised weights, "xla", or on TPUs "mosaic_tpu"; "auto" takes the
    latter where `ferrum-jax check` found it right and no slower on this chip, for every form that the model has.
    attention_tiles: of decode in "mosaic_tpu", such as "tile_kv=256,items=2"; None takes what `ferrum-jax check --tune`
    found fastest on this chip, else the kernel's own choice.
    check: "auto" checks the attention kernel before weights are read if this chip has no verdict on it, and uses "xla"
    in place of a wrong one; "off" checks nothing and follows no verdict.
    mesh: devices that share a step's work: "tp=4" divides one model among four; "dp=2,tp=4" has two data shards of
    four devices, each with rows and a KV pool of its own. max_num_seqs, max_num_batched_tokens, num_blocks,
    kv_memory_bytes (of a device) and the limits of kept prompts and states hold for each data shard. Experts are
    spread over all devices; "dp=2,tp=4,ep=4" has them on each data shard instead, and "ep=8" is "dp=8,tp=1".
    devices: the ids of those that the mesh is made of, in this order; devices of jax or a mesh of jax stand for their
    ids. None takes the first that there are. So a trainer in the same process has the others.
    request_log: a file to which each request is written when it ends, with its whole prompt, for `ferrum-jax cache
    simulate`.
    check_writes: check after each step that it wrote nothing that other requests may read; slow, for finding faults.
    compilation_cache_dir: where compiled executables are kept between starts, a folder or a URL such as gs:// that
    machines share; None keeps none. Who may write there may run code here.
    on_recompile: "warn" or "error" if a step compiles, which it should not, as all executables are made at the start.
    ready: "first" answers as soon as a few executables are compiled that can serve every request; another process
    compiles the rest meanwhile, and steps use them as they come. "all" compiles everything first. "first" holds on the
    CPU, in one process, with a compilation_cache_dir and without a bundle; elsewhere it means "all".
    seed: a request without a seed gets one from this, its content and its index.
    max_image_tokens: tokens of images whose embeddings are kept on the device; 0 serves a model that sees images for
    text alone. max_image_patches: patches of the largest image, and of all that are encoded before a step of others.
    allow_image_hosts: names whose http and https URLs images are fetched from, as in "example.com,b.org:8080"; "*" is
    every host with a public address. image_root: the folder below which `file:` URLs name images; None is none.
    return_routed_experts: outputs of `LLM.generate` and `chat` have the experts of each token, of a model that has
    some. Their requests then take no hits, because tokens that are not computed go to no expert.
    max_adapters: LoRA adapters that rows can use at once, each in a slot on the device; 0 has none. max_adapter_rank:
    the largest rank of one. adapter_targets: the weights that have slots, of "attention", "mlp", "experts" and
    "head".

    score_tokens: a model that generates scores pairs by its logits of these tokens, such as "yes,no" for
    Qwen3-Reranker; with one token, by its logit alone. None scores where the folder's modules.json has a LogitScore.

    Raises ValueError with the field, its value and what is allowed.
    """

    dtype: str = "auto"
    weights: str = "auto"
    kv_dtype: str = "auto"
    block_size: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int = 2048
    kv_memory_bytes: int | None = None
    num_blocks: int | None = None
    host_cache_bytes: int = 0
    enable_prefix_caching: bool = True
    max_cached_prompts: int = 256
    min_cached_prompt_tokens: int = 8
    max_state_snapshots: int = 64
    invariant: bool = False
    implementation: str | None = None
    product_implementation: str = "auto"
    attention_tiles: str | None = None
    check: str = "auto"
    mesh: str = "tp=1"
    devices: tuple[int, ...] | None = None
    on_recompile: str = "warn"
    ready: str = "first"
    seed: int = 0
    request_log: str | None = None
    check_writes: bool = False
    max_image_tokens: int = 8192
    max_image_patches: int = 16384
    allow_image_hosts: str = ""
    image_root: str | None = None
    return_routed_experts: bool = False
    max_adapters: int = 0
    max_adapter_rank: int = 32
    adapter_targets: str = "attention,mlp"
    score_tokens: str | None = None
    compilation_cache_dir: str | None = "~/.cache/ferrum_jax/executables"

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", _ids_of(self.devices))
        self._check_types()
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; it must be one of {_DTYPES}")
        if self.kv_dtype not in _KV_DTYPES:
            raise ValueError(f"kv_dtype is {self.kv_dtype!r}; it must be one of {_KV_DTYPES}")
        if self.implementation not in _IMPLEMENTATIONS:
            raise ValueError(f"implementation is {self.implementation!r}; it must be one of {_IMPLEMENTATIONS}")
        if self.product_implementation not in _PRODUCT_IMPLEMENTATIONS:
            raise ValueError(
                f"product_implementation is {self.product_implementation!r}; it must be one of "
                f"{_PRODUCT_IMPLEMENTATIONS}"
            )
        if self.check not in _CHECK:
            raise ValueError(f"check is {self.check!r}; it must be one of {_CHECK}")
        if self.on_recompile not in _ON_RECOMPILE:
            raise ValueError(f"on_recompile is {self.on_recompile!r}; it must be one of {_ON_RECOMPILE}")
        if self.ready not in _READY:
            raise ValueError(f"ready is {self.ready!r}; it must be one of {_READY}")
        if not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed is {self.seed}; it must fit in 64 bits")
        wrong = [one for one in self.devices or () if not isinstance(one, numbers.Integral) or isinstance(one, bool)]
        if self.devices is not None and (wrong or not self.devices):
            raise ValueError(f"devices is {self.devices!r}; it must name device ids, such as (4, 5, 6, 7)")
        made_form(self.weights)  # refuses a name that means nothing
        _ = self.mesh_shape, tiles_of(self.attention_tiles)  # refuse a text that means nothing
        if self.block_size is not None and (self.block_size < 8 or self.block_size & (self.block_size - 1)):
            raise ValueError(f"block_size is {self.block_size}; it must be a power of two, 8 or more")
        if self.max_num_batched_tokens < 1:
            raise ValueError(f"max_num_batched_tokens is {self.max_num_batched_tokens}; it must be at least 1")
        for field in (
            "max_cached_prompts",
            "max_state_snapshots",
            "host_cache_bytes",
            "max_image_tokens",
            "max_adapters",
        ):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} is {getattr(self, field)}; it must be 0 (none) or more")
        if self.max_image_patches < 1:
            raise ValueError(f"max_image_patches is {self.max_image_patches}; it must be at least 1")
        for name in ("max_image_tokens", "max_image_patches"):
            if getattr(self, name) > _MOST_OF_IMAGES:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at most {_MOST_OF_IMAGES}")
        if self.max_adapter_rank < 1:
            raise ValueError(f"max_adapter_rank is {self.max_adapter_rank}; it must be at least 1")
        targets = [part.strip() for part in self.adapter_targets.split(",")]
        if len(set(targets)) < len(targets) or not set(targets) <= set(_ADAPTER_TARGETS):
            raise ValueError(
                f"adapter_targets is {self.adapter_targets!r}; it must name some of "
                f"{', '.join(_ADAPTER_TARGETS)}, once each, such as 'attention,mlp'"
            )
        texts = [] if self.score_tokens is None else self.score_tokens.split(",")
        if len(texts) > 2 or not all(text.strip() for text in texts):
            raise ValueError(f"score_tokens is {self.score_tokens!r}; it must be one token or two, such as 'yes,no'")
        if self.min_cached_prompt_tokens < 1:
            raise ValueError(f"min_cached_prompt_tokens is {self.min_cached_prompt_tokens}; it must be at least 1")
        for field in ("max_num_seqs", "max_model_len", "kv_memory_bytes", "num_blocks"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"{field} is {value}; it must be at least 1")
        if self.max_num_seqs is not None:
            _refuse_more_rows_than_tokens(self.max_num_seqs, self.max_num_batched_tokens)

    def on(self, platform: str) -> EngineConfig:
        """This config for a platform, with the rows chosen that it leaves open: never more than a step has tokens."""
        return self.with_rows(_ROWS_ON_CPU if platform == "cpu" else MANY_ROWS)

    def with_rows(self, num_rows: int) -> EngineConfig:
        """This config with so many rows where it leaves that open, as far as a step has tokens for them."""
        if self.max_num_seqs is not None:
            return self
        return dataclasses.replace(self, max_num_seqs=min(num_rows, self.max_num_batched_tokens))

    @property
    def num_rows(self) -> int:
        """max_num_seqs of a config that leaves it open no longer; see `on`."""
        assert self.max_num_seqs is not None, "the rows were not chosen: EngineConfig.on does it"
        return self.max_num_seqs

    @functools.cached_property
    def mesh_shape(self) -> MeshShape:
        """What `mesh` says. The text is parsed here and nowhere else."""
        return MeshShape.parse(self.mesh)

    def among(self, devices: Sequence[Any]) -> list[Any]:
        """Those of the devices that the mesh is made of. Raises ValueError for ids that none of them has."""
        if self.devices is None:
            return list(devices)
        by_id = {device.id: device for device in devices}
        unknown = [id for id in self.devices if id not in by_id]
        if unknown or len(set(self.devices)) < len(self.devices):
            what = (
                f"{unknown}, and there are {sorted(by_id)}" if unknown else f"{list(self.devices)}, one of them twice"
            )
            raise ValueError(f"devices names {what}; name each device that is to work once")
        return [by_id[id] for id in self.devices]

    def _check_types(self) -> None:
        """Raises ValueError for a field whose value does not have the type that its annotation names."""
        for field in dataclasses.fields(self):
            name, *optional = str(field.type).split(" | ")
            value, (kind, what) = getattr(self, field.name), _KINDS[name]
            if (value is None and optional) or (isinstance(value, kind) and isinstance(value, bool) == (kind is bool)):
                continue
            raise ValueError(f"{field.name} is {value!r}; it must be {what}{' or None' if optional else ''}")


def _ids_of(devices: Any) -> Any:
    """The ids of devices or of a mesh; what is neither is left for the check."""
    if hasattr(devices, "axis_names"):
        devices = devices.devices.flatten().tolist()
    if not isinstance(devices, Sequence) or isinstance(devices, str):
        return devices
    return tuple(getattr(device, "id", device) for device in devices)


def tiles_of(text: str | None) -> dict[str, int]:
    """The tiles of a text such as "tile_kv=256,items=2". Raises ValueError where it is none."""
    if text is None:
        return {}
    if not re.fullmatch(r"[a-z_]+=[1-9]\d{0,6}(,[a-z_]+=[1-9]\d{0,6})*", text):
        raise ValueError(f"attention_tiles is {text!r}; it must name numbers of tiles, such as 'tile_kv=256,items=2'")
    parts = [part.split("=") for part in text.split(",")]
    found = {name: int(size) for name, size in parts}
    if len(found) < len(parts):
        raise ValueError(f"attention_tiles is {text!r}; it must name each tile once, as 'tile_kv=256,items=2' does")
    return found


def tiles_text(tiles: Mapping[str, int]) -> str:
    """The text that `tiles_of` reads."""
    return ",".join(f"{name}={size}" for name, size in sorted(tiles.items()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSizes:
    """What each of an engine's `num_shards` data shards has room for. Null ids are not counted.

    group_blocks, windows: for each cache group, its blocks, and how many positions a query sees, None for all.
    block_bytes, host_block_bytes: for each group, bytes of a block in all its layers, for the metrics; may be empty.
    num_host_blocks: blocks of each group in host memory; 0 without a host tier. max_snapshots: states kept beside the
    rows' own; None for a model without recurrent layers. state_bytes: bytes of one recurrent state.
    num_image_runs: runs of image embeddings, shared by all shards; 0 where the engine takes no images.
    max_image_patches: the most patches that a step encodes while rows run.
    max_num_seqs, max_num_batched_tokens, max_model_len, max_cached_prompts, min_cached_prompt_tokens: see EngineConfig.

    Raises ValueError if a step cannot hold one token of every row.
    """

    block_size: int
    group_blocks: Sequence[int]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    windows: Sequence[int | None] = (None,)
    block_bytes: Sequence[int] = ()
    num_host_blocks: int = 0
    host_block_bytes: Sequence[int] = ()
    max_cached_prompts: int = 0
    min_cached_prompt_tokens: int = 8
    max_snapshots: int | None = None
    state_bytes: int = 0
    num_shards: int = 1
    num_image_runs: int = 0
    max_image_patches: int = 0

    def __post_init__(self) -> None:
        _refuse_more_rows_than_tokens(self.max_num_seqs, self.max_num_batched_tokens)
        assert len(self.group_blocks) == len(self.windows), "a cache group has blocks and no window, or none and one"

    @property
    def num_blocks(self) -> int:
        """Blocks of the largest cache group."""
        return max(self.group_blocks)

    def with_pool(self, num_blocks: int) -> EngineSizes:
        """The sizes of this engine with `num_blocks` in its largest cache group, and caching on."""
        counts = [
            pool_blocks(
                window,
                num_blocks,
                block_size=self.block_size,
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                keeps_cache=True,
            )
            for window in self.windows
        ]
        return dataclasses.replace(self, group_blocks=counts)


def _refuse_more_rows_than_tokens(max_num_seqs: int, max_num_batched_tokens: int) -> None:
    if max_num_batched_tokens < max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens is {max_num_batched_tokens}, less than max_num_seqs, {max_num_seqs}; a step must "
            "hold one token of every row"
        )
