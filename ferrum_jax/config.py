"""EngineConfig: every choice a user makes about an engine, checked when it is made."""

from __future__ import annotations

import dataclasses
import numbers

_IMPLEMENTATIONS = (None, "xla", "mosaic_tpu", "mosaic_gpu")
_DTYPES = ("auto", "float32", "bfloat16")
_ON_RECOMPILE = ("warn", "error")
_KINDS = {"int": (numbers.Integral, "a whole number"), "bool": (bool, "true or false"), "str": (str, "a text")}
_KV_DTYPES = (*_DTYPES, "int8", "fp8_e4m3", "fp8_e5m2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Devices along each axis of a mesh. dp: shards with rows of their own. tp: devices that share one's work.

    has_experts_once: the experts are spread over all devices, to which every shard sends its tokens; else each shard
    has all of them.
    """

    dp: int = 1
    tp: int = 1
    has_experts_once: bool = True

    @classmethod
    def parse(cls, text: str) -> MeshShape:
        """The shape of a text such as "tp=4" or "dp=2,tp=4". Raises ValueError with what it should be.

        ep is the number of devices that the experts are spread over: tp or, by default, dp * tp. Alone it is dp.
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
    """The most that the steps of a known set of requests hold: executables beyond it are not made.

    num_rows: choices of all requests. num_tokens: of all of them, in and out. request_tokens: of the longest one; None
    where that is not known, or block tables are to be as wide as max_model_len.
    """

    num_rows: int
    num_tokens: int
    request_tokens: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How an engine runs. Defaults suit the platform; names are vLLM's where it has one.

    dtype: of weights and activations; "auto" is float32 on the CPU, elsewhere the checkpoint's own, or bfloat16 for
    one in float16.
    kv_dtype: of the KV pool; "auto" is dtype. int8 has a scale per token and head, fp8_e4m3 and fp8_e5m2 none; all
    three change logits a little (`ferrum-jax bench --workload kv_error` says how much).
    block_size: tokens per KV block; None takes the platform's: the smallest power of two from 16 to 128 whose block
    has 32 KB a device and layer, 16 on the CPU.
    max_model_len: most tokens (prompt + output) of a request; None takes the model's own limit.
    Models with longrope (Phi) turn their heads by the long factors if it is beyond the original length.
    max_num_seqs: rows that run at once. max_num_batched_tokens: tokens in one step.
    kv_memory_bytes: KV pool size; None is a quarter of the free memory on the CPU. num_blocks overrides it.
    host_cache_bytes: host memory for cached blocks that the KV pools give up; they come back on a hit. 0 keeps none.
    enable_prefix_caching: reuse blocks and prompts; off stores nothing. max_cached_prompts: whole prompts whose repeat
    computes no token; 0 keeps none. min_cached_prompt_tokens: shorter ones are not kept.
    max_state_snapshots: of a model with recurrent layers, states of prefixes that are kept beside those of rows.
    invariant: on the CPU in float32, logits are bit-identical whatever runs beside a request.
    implementation: of attention, "xla", "mosaic_tpu" or "mosaic_gpu"; None takes the platform's own, on GPUs "xla".
    mesh: devices that share a step's work: "tp=4" divides one model among four; "dp=2,tp=4" has two data shards of
    four devices, each with rows and a KV pool of its own. max_num_seqs, max_num_batched_tokens, num_blocks,
    kv_memory_bytes (of a device) and what is kept of prompts and states are those of each data shard. Experts are
    spread over all devices; "dp=2,tp=4,ep=4" has them on each data shard instead, and "ep=8" is "dp=8,tp=1".
    trace: a file to which each request is appended when it ends, for `ferrum-jax cache simulate`; prompts in full.
    check_writes: prove after each step that it wrote nothing that others may read; slow, to find faults.
    compilation_cache_dir: where compiled executables are kept between starts; None keeps none.
    on_recompile: "warn" or "error", where a step compiles though every executable was made at the start.
    seed: from which a request without a seed gets one, with its content and its index.

    Raises ValueError with the field, its value and what is allowed.
    """

    dtype: str = "auto"
    kv_dtype: str = "auto"
    block_size: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
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
    mesh: str = "tp=1"
    on_recompile: str = "warn"
    seed: int = 0
    trace: str | None = None
    check_writes: bool = False
    compilation_cache_dir: str | None = "~/.cache/ferrum_jax/executables"

    def __post_init__(self) -> None:
        self._check_types()
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; it must be one of {_DTYPES}")
        if self.kv_dtype not in _KV_DTYPES:
            raise ValueError(f"kv_dtype is {self.kv_dtype!r}; it must be one of {_KV_DTYPES}")
        if self.implementation not in _IMPLEMENTATIONS:
            raise ValueError(f"implementation is {self.implementation!r}; it must be one of {_IMPLEMENTATIONS}")
        if self.on_recompile not in _ON_RECOMPILE:
            raise ValueError(f"on_recompile is {self.on_recompile!r}; it must be one of {_ON_RECOMPILE}")
        if not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed is {self.seed}; it must fit in 64 bits")
        MeshShape.parse(self.mesh)
        if self.block_size is not None and (self.block_size < 8 or self.block_size & (self.block_size - 1)):
            raise ValueError(f"block_size is {self.block_size}; it must be a power of two, 8 or more")
        for field in ("max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}; it must be at least 1")
        for field in ("max_cached_prompts", "max_state_snapshots", "host_cache_bytes"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} is {getattr(self, field)}; it must be 0 (none) or more")
        if self.min_cached_prompt_tokens < 1:
            raise ValueError(f"min_cached_prompt_tokens is {self.min_cached_prompt_tokens}; it must be at least 1")
        for field in ("max_model_len", "kv_memory_bytes", "num_blocks"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"{field} is {value}; it must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, less than max_num_seqs, "
                f"{self.max_num_seqs}; a step must hold one token of every row"
            )

    def _check_types(self) -> None:
        """Raises ValueError for a field whose value is of no kind that its annotation names."""
        for field in dataclasses.fields(self):
            name, *optional = str(field.type).split(" | ")
            value, (kind, what) = getattr(self, field.name), _KINDS[name]
            if (value is None and optional) or (isinstance(value, kind) and isinstance(value, bool) == (kind is bool)):
                continue
            raise ValueError(f"{field.name} is {value!r}; it must be {what}{' or None' if optional else ''}")
