"""GptOssForCausalLM: experts with biases and a clamped gate, attention with sinks, a window in every second layer.

The experts' weights lie as [E, in, out], gate and up interleaved; published ones are MXFP4
(`checkpoints/formats/mxfp4.py`), and stay so.
Source: OpenAI 2025 (gpt-oss model card); keys as in Hugging Face's GptOssConfig.
"""

from checkpoints.rules import Rule, TensorSlice
from ferrum_jax.models.families import tensors
from ferrum_jax.models.families.config_reader import ConfigReader, window_within
from ferrum_jax.models.families.family import Family
from ferrum_jax.models.families.plain import attention_from, experts_from, spec_from, windows_of
from ferrum_jax.models.families.rope_reader import rope_from
from ferrum_jax.models.spec import MlpSpec, ModelSpec


def _spec(reader: ConfigReader) -> ModelSpec:
    layers = range(reader.require("num_hidden_layers"))
    kinds = reader.get("layer_types", [("sliding_attention", "full_attention")[i % 2] for i in layers])
    rope = rope_from(reader)
    _refuse(reader, rope.original_max_position_embeddings)
    num_experts = reader.get("num_local_experts", reader.get("num_experts", 128))
    return spec_from(
        reader,
        attention=attention_from(reader, biases="attention_bias", sinks=True, rope=rope),
        mlp=MlpSpec(
            intermediate_size=reader.require("intermediate_size"),
            swiglu_limit=float(reader.get("swiglu_limit", 7.0)),
            swiglu_alpha=float(reader.get("swiglu_alpha", 1.702)),
        ),
        experts=experts_from(reader, num_experts, norm_topk_prob=True, bias=True),
        cache_groups=windows_of(reader, kinds, window_within(reader)),
    )


def _refuse(reader: ConfigReader, original_context: int) -> None:
    """Raises ValueError where two names of one thing disagree."""
    act = reader.get("hidden_act", "silu")
    if act != "silu":
        raise ValueError(f"hidden_act is {act!r}; this architecture has its own clamped SwiGLU, said as 'silu'")
    chosen = reader.get("num_experts_per_tok", 4)
    for name, also, value in (
        ("experts_per_token", "num_experts_per_tok", chosen),
        ("initial_context_length", "original_max_position_embeddings of the rope", original_context),
    ):
        if reader.get(name, value) != value:
            raise ValueError(f"{name} is {reader.get(name, value)} and {also} {value}; they must be equal")


def _rules(spec: ModelSpec) -> tuple[Rule, ...]:
    every = tuple(range(spec.num_hidden_layers))
    gate_up, down = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
    return (
        *tensors.frame_rules(spec),
        *tensors.attention_rules(spec),
        *tensors.per_layer("self_attn.sinks", "attention.sinks", every),
        *tensors.linear("mlp.router", "mlp.router", every, True),
        *tensors.per_layer(gate_up, "mlp.experts.gate", every, TensorSlice(axis=2, step=2, transposed=True)),
        *tensors.per_layer(gate_up, "mlp.experts.up", every, TensorSlice(axis=2, start=1, step=2, transposed=True)),
        *tensors.per_layer(down, "mlp.experts.down", every, TensorSlice(transposed=True)),
        *tensors.per_layer(f"{gate_up}_bias", "mlp.experts.gate_bias", every, TensorSlice(axis=1, step=2)),
        *tensors.per_layer(f"{gate_up}_bias", "mlp.experts.up_bias", every, TensorSlice(axis=1, start=1, step=2)),
        *tensors.per_layer(f"{down}_bias", "mlp.experts.down_bias", every),
    )


FAMILIES = {
    "GptOssForCausalLM": Family(
        read=_spec,
        defaults={
            "torch_dtype": "bfloat16",  # of the published weights, whose config says nothing
            "max_position_embeddings": 131072,
            "head_dim": 64,
            "attention_bias": True,
            "rope_theta": 150000.0,
            "sliding_window": 128,
            "num_experts_per_tok": 4,
            "rms_norm_eps": 1e-5,
        },
        weight_rules=_rules,
        models="gpt-oss 20b, 120b",
        notes="MXFP4 weights are kept packed",
    )
}
