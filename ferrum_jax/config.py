"""EngineConfig: every choice a user makes about an engine, checked when it is made."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from checkpoints.stored_weight import made_form
from ferrum_jax.inputs.setting import check_settings, described, setting, some_of
from ferrum_jax.inputs.sizes.engine_sizes import refuse_more_rows_than_tokens
from ferrum_jax.inputs.sizes.kv_events import endpoints_of
from ferrum_jax.inputs.sizes.mesh_shape import MeshShape, devices_of, ids_of, wrong_ids
from ferrum_jax.inputs.sizes.speculative import SpeculativeConfig, speculative_of
from ferrum_jax.inputs.sizes.tiles import tiles_of

_DTYPES = ("auto", "float32", "bfloat16")
MANY_ROWS, _ROWS_ON_CPU = 256, 16  # that run at once: where throughput counts; where each row slows the others
_MAX_OF_IMAGES = 1 << 30  # tokens or patches, which are counted in 32 bits


def _wrong_tokens(text: str) -> str | None:
    texts = text.split(",")
    return None if len(texts) <= 2 and all(text.strip() for text in texts) else "be one token or two, such as 'yes,no'"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How an engine runs. Defaults suit the platform; names are vLLM's where it has one.

    docs/reference/configuration.md says what each field means, and `help(EngineConfig)`, from what stands beside it.
    Raises ValueError with the field, its value and what is allowed.
    """

    dtype: str = setting(
        "auto",
        "dtype of weights and activations",
        more="auto is float32 on the CPU, elsewhere the checkpoint's own, or bfloat16 if that is float16",
        choices=_DTYPES,
        is_common=True,
        vllm="dtype",
        unlike="auto is float32 on the CPU, else the checkpoint's own; there is no float16",
    )
    weights: str = setting(
        "auto",
        "quantise dense weights while they load: int8 or fp8 (with -a16: activations stay in 16 bits), mxfp4, int4 or "
        "int4-gN (a scale for each N inputs)",
        more="auto leaves them as they are; embeddings, norms, routers, gates and the head always stay",
        rule=made_form,
        is_common=True,
        metavar="FORM",
    )
    kv_dtype: str = setting(
        "auto",
        "dtype of the KV pool",
        more="auto is dtype. int8 has a scale per token and head, fp8_e4m3 and fp8_e5m2 none; all three change logits "
        "a little (`ferrum-jax bench --workload kv_error` says how much)",
        choices=(*_DTYPES, "int8", "fp8_e4m3", "fp8_e5m2"),
        vllm="kv_cache_dtype",
        unlike='"fp8" is "fp8_e4m3"; there is int8 too',
    )
    block_size: int | None = setting(
        None,
        "tokens per KV block, a power of two",
        more="None chooses the smallest power of two from 16 to 128 whose block has 32 KB per device and layer, or a "
        "larger one, up to 256, where attention has no room for its tables",
        unset="16 on the CPU, else what suits the chip",
        rule=lambda size: "be a power of two, 8 or more" if size < 8 or size & (size - 1) else None,
        vllm="block_size",
        unlike="a power of two, 8 or more",
    )
    max_model_len: int | None = setting(
        None,
        "most tokens in a request, prompt and output together",
        more="models with longrope (Phi) use its long factors for all positions if it is more than their original "
        "length",
        unset="the model's own limit",
        least=1,
        is_common=True,
        vllm="max_model_len",
    )
    max_num_seqs: int | None = setting(
        None,
        "most requests that run at once",
        more="where it is left open, they are fewer if attention or memory has no room for more of max_model_len",
        unset="16 on the CPU, else 256; batch 256",
        least=1,
        is_common=True,
        vllm="max_num_seqs",
        unlike="rows of a data shard",
    )
    max_num_batched_tokens: int = setting(2048, "most tokens in one step", least=1, vllm="max_num_batched_tokens")
    kv_memory_bytes: int | None = setting(
        None,
        "size of the KV pool in bytes",
        more="on the CPU it is the largest of 1 GiB, the weights' size and one row at max_model_len, within a quarter "
        "of the memory and half of what is free",
        unset="all that is left; on the CPU 1 GiB or more",
        least=1,
        vllm="kv_cache_memory_bytes",
        unlike="bytes on each device",
    )
    num_blocks: int | None = setting(
        None,
        "size of the KV pool in blocks, instead of in bytes",
        least=1,
        vllm="num_gpu_blocks_override",
    )
    host_cache_bytes: int = setting(
        0,
        "host memory in bytes for cached blocks that the KV pool evicts; 0 keeps none",
        more="they come back on a hit",
        least=0,
    )
    kv_tier: str | None = setting(
        None,
        "folder or URL such as gs:// or s3://, shared by any number of engines, that keeps cached prefixes beyond them",
        more="written behind, and read where that is faster than computing; who may write there may change answers",
        unset="none",
        is_planned=False,
        metavar="DIR",
    )
    kv_tier_bytes: int = setting(
        1 << 36, "most bytes there; what was used least recently goes first", least=1 << 20, is_planned=False
    )
    enable_prefix_caching: bool = setting(
        True,
        "reuse blocks and prompts",
        more="off computes every prompt token and stores nothing",
        vllm="enable_prefix_caching",
        unlike="also for models with sliding windows and recurrent layers",
    )
    max_cached_prompts: int = setting(256, "most whole prompts whose repeat computes no token; 0 keeps none", least=0)
    min_cached_prompt_tokens: int = setting(8, "shortest prompt that is kept as a whole", least=1, is_planned=False)
    max_state_snapshots: int = setting(
        64,
        "most snapshots of recurrent states; 0 keeps none",
        more="these are states of prefixes, beside those of rows; up to half of them are states of answers that are "
        "being generated",
        least=0,
    )
    generation_config: str = setting(
        "auto",
        "how requests that say nothing are sampled: auto as generation_config.json says, none plainly",
        more="temperature, top_k, top_p, min_p, repetition_penalty and max_new_tokens are read",
        choices=("auto", "none"),
        is_planned=False,
        vllm="generation_config",
        unlike='"none" is vLLM\'s "vllm"; no folder is named',
    )
    invariant: bool = setting(
        False,
        "the same bits whatever runs beside a request; only on the CPU in float32, where it is the default of batch "
        "and cache save",
    )
    implementation: str | None = setting(
        None,
        "implementation of attention",
        unset="what a check found on this chip",
        choices=("xla", "mosaic_tpu", "mosaic_gpu"),
    )
    product_implementation: str = setting(
        "auto",
        "implementation of products with quantised weights and, on TPUs, of experts and recurrences; mosaic_tpu on "
        "TPUs and mosaic_gpu on Hopper GPUs alone",
        more="auto takes the chip's kernels where `ferrum-jax check` found them right and no slower on this chip, for "
        "every form that the model has",
        choices=("auto", "xla", "mosaic_tpu", "mosaic_gpu"),
    )
    attention_tiles: str | None = setting(
        None,
        "tiles of decode in mosaic_tpu, such as tile_kv=256,items=2",
        unset="what `ferrum-jax check --tune` found fastest on this chip, else the kernel's own choice",
        rule=tiles_of,
        metavar="TILES",
    )
    check: str = setting(
        "auto",
        "check the kernel of attention at the start on a chip that has no verdict",
        more="xla works in place of a wrong one; off checks nothing and follows no verdict",
        choices=("auto", "off"),
        is_planned=False,
    )
    mesh: str | None = setting(
        None,
        "devices by axis, such as tp=4 or dp=2,tp=4",
        more="tp=4 divides one model among four; dp=2,tp=4 has two data shards of four devices, each with rows and a "
        "KV pool of its own. max_num_seqs, max_num_batched_tokens, num_blocks, kv_memory_bytes (of a device) and the "
        "limits of kept prompts and states hold for each data shard. Experts are spread over all devices; "
        "dp=2,tp=4,ep=4 has them on each data shard instead, and ep=8 is dp=8,tp=1. Where none is named, all devices "
        "are looked at as `ferrum-jax plan` does, and on the CPU one is taken",
        unset="the fastest that fits",
        rule=MeshShape.parse,
        is_common=True,
        metavar="MESH",
    )
    devices: tuple[int, ...] | None = setting(
        None,
        "ids of the devices that the mesh is made of, in this order, such as 2,3",
        more="devices of jax or a mesh of jax stand for their ids; name them where a trainer in the same process has "
        "the others",
        unset="the first",
        rule=wrong_ids,
        is_planned=False,
        metavar="IDS",
    )
    on_recompile: str = setting(
        "warn",
        "what to do when a step compiles, which it should not",
        choices=("warn", "error"),
        is_planned=False,
    )
    ready: str = setting(
        "first",
        "'first': serve once the first executables are compiled; 'all': once all are",
        more="a few can serve every request; each of the others is compiled meanwhile once it would have saved more "
        "than its compile takes. first holds on the CPU, in one process, with a compilation_cache_dir and without a "
        "bundle; elsewhere it means all",
        choices=("first", "all"),
        is_planned=False,
    )
    seed: int = setting(
        0,
        "seed from which requests without one get theirs",
        more="beside it their content and index decide",
        rule=lambda seed: None if -(2**63) <= seed < 2**64 else "fit in 64 bits",
        is_planned=False,
        vllm="seed",
        unlike="a request without a seed gets one from this, its content and its index",
    )
    speculative_config: SpeculativeConfig | None = setting(  # noqa: RUF009
        None,
        "how tokens are drafted: an object with method (ngram, suffix or mtp), and keys that vLLM has for it",
        more="answers are the same with and without; a request with speculative=False has no drafts",
        unset="no drafts; batch suffix",
        metavar="JSON",
        vllm="speculative_config",
        unlike="no second model drafts: method is ngram, suffix or mtp",
    )
    request_log: str | None = setting(
        None,
        "append each request to this file when it ends, with its whole prompt, for `ferrum-jax cache simulate`",
        is_planned=False,
        metavar="FILE",
    )
    kv_events: str | None = setting(
        None,
        "tell routers what is cached, in vLLM's form over ZeroMQ, at an endpoint such as tcp://*:5557",
        more="`,topic=NAME` may follow, and `,replay=tcp://*:5558` for those who missed some. Whoever listens sees the "
        "tokens of prompts",
        rule=endpoints_of,
        is_planned=False,
        metavar="ENDPOINT",
        vllm="kv_events_config",
        unlike="a text: endpoint, topic and replay endpoint; one socket tells of all data shards",
    )
    check_writes: bool = setting(
        False, "prove after each step that it wrote nothing that others may read; slow", is_planned=False
    )
    max_image_tokens: int = setting(
        8192,
        "tokens of images or sounds whose embeddings are kept on the device; 0 serves such a model for text",
        least=0,
        most=_MAX_OF_IMAGES,
    )
    max_image_patches: int = setting(
        16384, "most patches of an image or frames of a sound, and of a step's", least=1, most=_MAX_OF_IMAGES
    )
    allow_image_hosts: str = setting(
        "",
        "hosts whose http and https URLs of media are fetched, such as example.com,b.org:8080, or * for all",
        more="* is every host with a public address",
        is_planned=False,
        metavar="HOSTS",
        vllm="allowed_media_domains",
        unlike='a text: "example.com,b.org:8080"; no host is allowed by default',
    )
    image_root: str | None = setting(
        None,
        "folder below which file: URLs name images and other media",
        is_planned=False,
        metavar="DIR",
        vllm="allowed_local_media_path",
    )
    return_routed_experts: bool = setting(
        False,
        "outputs of `LLM.generate` and `chat` have the experts of each token, of a model that has some",
        more="hits come with them, from host memory; where all layers have a window, requests take no hits",
        is_planned=False,
        has_flag=False,  # arrays, for callers in Python
        vllm="enable_return_routed_experts",
        unlike="the last token has none",
    )
    return_sampling_mask: bool = setting(
        False,
        "outputs of `LLM.generate` and `chat` have for each token which ones could have been drawn there, as bits",
        is_planned=False,
        has_flag=False,  # arrays, for callers in Python
        vllm="enable_return_sampling_mask",
        unlike="packed bits of the vocabulary",
    )
    max_adapters: int = setting(
        0,
        "LoRA adapters that rows can use at once, each in a slot on the device; 0 has no slots",
        least=0,
        vllm="max_loras",
        unlike="0 has none; there is no `enable_lora` beside it",
    )
    max_adapter_rank: int = setting(32, "largest rank of an adapter", least=1, vllm="max_lora_rank")
    adapter_targets: str = setting(
        "attention,mlp",
        "weights that adapters may add to, from attention, mlp, experts and head",
        rule=some_of("attention", "mlp", "experts", "head"),
        metavar="NAMES",
    )
    tool_form: str | None = setting(
        None,
        "form in which the model writes tool calls, such as hermes, by our name or vLLM's for its parser",
        unset="as the chat template shows",
        is_planned=False,
        metavar="NAME",
        vllm="tool_call_parser",
        unlike="needed only where the chat template does not show it",
    )
    reasoning_form: str | None = setting(
        None,
        "form in which the model writes what it thinks, such as deepseek_r1, by our name or vLLM's for its parser",
        unset="as the chat template shows",
        is_planned=False,
        metavar="NAME",
        vllm="reasoning_parser",
        unlike="needed only where the chat template does not show it",
    )
    score_tokens: str | None = setting(
        None,
        "score pairs by the logits of these tokens, such as yes,no for Qwen3-Reranker",
        more="with one token, by its logit alone; None scores where the folder's modules.json has a LogitScore",
        rule=_wrong_tokens,
        is_planned=False,
        metavar="TEXTS",
    )
    compilation_cache_dir: str | None = setting(
        "~/.cache/ferrum_jax/executables",
        "where compiled executables are kept, a folder or a URL such as gs://; '' keeps none",
        more="machines may share a URL. Who may write there may run code here",
        is_planned=False,
        metavar="DIR",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", ids_of(self.devices))
        object.__setattr__(self, "compilation_cache_dir", self.compilation_cache_dir or None)  # '' is not this folder
        object.__setattr__(self, "speculative_config", speculative_of(self.speculative_config))
        check_settings(self)
        if self.kv_tier is not None and (self.return_routed_experts or not self.enable_prefix_caching):
            raise ValueError(
                f"kv_tier is {self.kv_tier!r}; it needs enable_prefix_caching, and keeps no experts beside its blocks "
                "for return_routed_experts; leave one of them out"
            )
        if self.max_num_seqs is not None:
            refuse_more_rows_than_tokens(self.max_num_seqs, self.max_num_batched_tokens)

    def rows_on(self, platform: str) -> int:
        """Rows that run at once on a platform, as named or chosen."""
        return self.rows_or(_ROWS_ON_CPU if platform == "cpu" else MANY_ROWS)

    def rows_or(self, num_rows: int) -> int:
        """max_num_seqs, or where it is left open so many, as far as a step has tokens for them."""
        return self.max_num_seqs or min(num_rows, self.max_num_batched_tokens)

    @property
    def num_rows(self) -> int:
        """max_num_seqs of a config that leaves it open no longer, as `LLM.config` does."""
        assert self.max_num_seqs is not None, "the rows are chosen when an LLM is opened"
        return self.max_num_seqs

    @functools.cached_property
    def mesh_shape(self) -> MeshShape:
        """The parsed `mesh` of a config that names one. The text is parsed here and nowhere else."""
        assert self.mesh is not None, "the mesh was not chosen: meshes.settle does it"
        return MeshShape.parse(self.mesh)

    def among(self, devices: Sequence[Any]) -> list[Any]:
        """The devices that the mesh is made of. Raises ValueError for ids that none of `devices` has."""
        return list(devices) if self.devices is None else devices_of(self.devices, devices)


EngineConfig.__doc__ = f"{EngineConfig.__doc__}\n{described(EngineConfig)}\n"
