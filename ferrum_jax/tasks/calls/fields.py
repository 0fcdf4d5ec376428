"""Fields of EngineConfig as keywords of LLM, beside them the names that vLLM has for the same.

A name of vLLM's that has no meaning here is taken where its value asks for what is done anyway. Any other value is
refused, with what to use instead.
"""

import dataclasses
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from ferrum_jax.config import EngineConfig
from ferrum_jax.inputs.setting import settings_of
from ferrum_jax.inputs.sizes.mesh_shape import MeshShape
from ferrum_jax.io.error_text import Elsewhere, require_harmless
from ferrum_jax.io.error_text.known_fields import require, whole

_FIELDS = {field.name: field for field in dataclasses.fields(EngineConfig)}
_DEFAULTS = EngineConfig()
AXES = {"tensor_parallel_size": "tp", "data_parallel_size": "dp"}
_RENAMED = {said.vllm: field.name for field, said in settings_of(EngineConfig) if said.vllm not in (None, field.name)}


ELSEWHERE: Mapping[str, Elsewhere] = {
    "gpu_memory_utilization": Elsewhere(
        (), "the KV pool takes what weights and the largest step leave; kv_memory_bytes or num_blocks give it a size"
    ),
    "swap_space": Elsewhere((0,), "host memory for cached blocks is host_cache_bytes, in bytes"),
    "cpu_offload_gb": Elsewhere((0,), "weights stay on the devices; mesh='tp=2' or more divides them"),
    "enforce_eager": Elsewhere(
        (False,), "every step is a compiled program; compilation_cache_dir keeps them between starts"
    ),
    "max_seq_len_to_capture": Elsewhere((None,), "every step is compiled, whatever its length: leave it out"),
    "compilation_config": Elsewhere((None,), "compilation_cache_dir keeps compiled programs, bundle= brings them"),
    "trust_remote_code": Elsewhere(
        (False,), "no code of a checkpoint is run; models are those of ferrum_jax.models.families: leave it out"
    ),
    "quantization": Elsewhere(
        (None,),
        "a checkpoint's own format is found in its config.json; weights='fp8' or 'int8' quantises while weights load",
    ),
    "load_format": Elsewhere(("auto", "safetensors"), "weights are read from safetensors: leave it out"),
    "tokenizer_mode": Elsewhere(("auto",), "the checkpoint's tokenizer.json is used: leave it out"),
    "skip_tokenizer_init": Elsewhere((False,), "detokenize=False of SamplingParams leaves texts out"),
    "tokenizer_revision": Elsewhere((None,), "revision is of model and tokenizer; tokenizer= names another folder"),
    "code_revision": Elsewhere((None,), "no code of a checkpoint is run: leave it out"),
    "hf_overrides": Elsewhere((None,), "a config.json is taken as it is; change it in a copy of the folder"),
    "hf_token": Elsewhere((None,), "set the environment variable HF_TOKEN"),
    "download_dir": Elsewhere((None,), "set the environment variable HF_HOME or HF_HUB_CACHE"),
    "pipeline_parallel_size": Elsewhere((1,), "layers are not spread over devices; mesh='dp=2,tp=4' divides each"),
    "enable_expert_parallel": Elsewhere(
        (True,), "experts are spread over all devices; mesh='dp=2,tp=4,ep=4' has all of them in each data shard"
    ),
    "distributed_executor_backend": Elsewhere(
        (None,),
        "one process has all devices of a host; ferrum_jax.distributed.join makes one engine of several",
    ),
    "enable_chunked_prefill": Elsewhere((True,), "prompts go in chunks of at most max_num_batched_tokens"),
    "disable_sliding_window": Elsewhere((False,), "windows are as the checkpoint says; max_model_len bounds lengths"),
    "enable_lora": Elsewhere((False,), "max_adapters=8 has slots for adapters, which LLM.load_adapter loads"),
    "disable_log_stats": Elsewhere((True, False), "nothing is logged; LLM.stats() has the counters"),
    "task": Elsewhere((None, "auto", "generate", "embed"), "LLM.generate and LLM.embed need no task: leave it out"),
    "runner": Elsewhere((None, "auto", "generate", "pooling"), "LLM.generate and LLM.embed need none: leave it out"),
}


def engine_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of EngineConfig that these names ask for.

    None stands for the default where a field may not be None. Raises TypeError for a name that neither has, ValueError
    for a value that asks for something there is not here and for two names that ask for one field.
    """
    fields: dict[str, Any] = {}
    for name, value in given.items():
        field = "mesh" if name in AXES else _RENAMED.get(name, name)
        if name in ELSEWHERE:
            require_harmless(name, value, ELSEWHERE)
        elif field not in _FIELDS:
            raise TypeError(_refusal(name))
        elif field != name and field in given:
            raise ValueError(f"{name} and {field} are both given, and both set {field}; give one of them")
        elif name not in AXES and (value is not None or "None" in str(_FIELDS[field].type)):
            fields[field] = "fp8_e4m3" if (name, value) == ("kv_cache_dtype", "fp8") else value
    sizes = {
        AXES[name]: require(name, value, whole(1))
        for name, value in given.items()
        if name in AXES and value is not None
    }
    mesh = MeshShape(dp=sizes.get("dp", 1), tp=sizes.get("tp", 1))
    return fields | ({"mesh": str(mesh)} if sizes else {})


def with_fields(config: EngineConfig | None, fields: Mapping[str, Any]) -> EngineConfig | None:
    """The config with the fields set; None without either.

    Raises ValueError where config sets a field to something else than its default, and `fields` to another value.
    """
    if not fields:
        return config
    made = dataclasses.replace(config or _DEFAULTS, **fields)
    for name in fields:
        before, now = getattr(config or _DEFAULTS, name), getattr(made, name)
        if before not in (now, getattr(_DEFAULTS, name)):
            raise ValueError(f"{name} is {now!r}, and config has {name}={before!r}; give it once")
    return made


def _refusal(name: str) -> str:
    meant = get_close_matches(name, [*_FIELDS, *AXES, *_RENAMED], n=1)
    hint = f" (did you mean {meant[0]}?)" if meant else ""
    return f"LLM has no argument {name}{hint}; beside its own it takes the fields of EngineConfig: {', '.join(_FIELDS)}"
