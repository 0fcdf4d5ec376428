"""NemotronHForCausalLM: Nemotron-H and Nemotron Nano, whose layers are Mamba2, attention, an MLP or experts, one each.

There are no positions, and MLPs and experts have no gate.
Source: NVIDIA 2025 (Nemotron-H); keys as in Hugging Face's NemotronHConfig and in the configs of its first models.
"""

from checkpoints.rules import Rule
from ferrum_jax.models.families import deepseek, tensors
from ferrum_jax.models.families.bounds import shown
from ferrum_jax.models.families.config_reader import ConfigReader
from ferrum_jax.models.families.family import IN_KERNELS, ONE_TOKEN, Family, with_unserved
from ferrum_jax.models.families.mamba2_reader import mamba2_groups, mamba2_rules, step_limit
from ferrum_jax.models.families.plain import attention_from, layers_where, mlp_from, norm_from, spec_from
from ferrum_jax.models.spec import Mamba2Spec, ModelSpec

_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_WITHOUT_CACHE = ("mlp", "moe")
# How training began, how kernels work, layers that predict several tokens, and keys that nothing reads.
_LEFT = (
    *("use_mamba_kernels", "rescale_prenorm_residual", "chunk_size", "expand", "time_step_min", "time_step_max"),
    *("time_step_floor", "time_step_rank", "mamba_ssm_cache_dtype", "num_logits_to_keep", "hidden_dropout"),
    *("moe_shared_expert_overlap", "num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern"),
    *("rope_theta", "partial_rotary_factor", "rope_parameters", "norm_eps", "rms_norm_eps"),
)
_ONLY = {
    **dict.fromkeys(("use_bias", "mlp_bias", "attention_bias", "mamba_proj_bias", "residual_in_fp32"), False),
    "mamba_hidden_act": "silu",
    "n_shared_experts": 1,
    "moe_latent_size": None,
    "sliding_window": None,
}


def _spec(reader: ConfigReader) -> ModelSpec:
    reader.leave("hybrid_override_pattern", "layers_block_type", *_LEFT)
    reader.only(**_ONLY)
    kinds = _kinds(reader)
    act = reader.get("mlp_hidden_act", "relu2")
    shared = reader.get("moe_shared_expert_intermediate_size", 7688)
    moe = layers_where(kind == "moe" for kind in kinds)
    experts = deepseek.experts_from(reader, moe, shared_intermediate_size=shared, has_gates=False)
    return spec_from(
        reader,
        attention=attention_from(reader, rope=None),
        mlp=mlp_from(reader, hidden_act=act, gated=False),
        experts=experts,
        without_mlp=layers_where(kind not in _WITHOUT_CACHE for kind in kinds),
        norm=norm_from(reader, key="layer_norm_epsilon"),
        recurrence=Mamba2Spec(
            num_heads=reader.get("mamba_num_heads", 128),
            head_dim=reader.get("mamba_head_dim", 64),
            state_dim=reader.get("ssm_state_size", 128),
            num_groups=reader.get("n_groups", 8),
            conv_kernel_dim=reader.get("conv_kernel", 4),
            conv_bias=reader.flag("use_conv_bias", True),
            step_limit=step_limit(reader),
        ),
        cache_groups=mamba2_groups(kinds, len(kinds), _WITHOUT_CACHE),
    )


def _kinds(reader: ConfigReader) -> list[str]:
    """The kind of each layer, given by name or by letter."""
    pattern = reader.get("hybrid_override_pattern", "")
    if any(letter not in _LETTERS for letter in pattern):
        raise ValueError(f"hybrid_override_pattern is {shown(pattern, repr)}; its letters are {''.join(_LETTERS)}")
    kinds = reader.get("layers_block_type", [_LETTERS[letter] for letter in pattern])
    if not kinds:
        raise ValueError(
            "config.json has no 'hybrid_override_pattern' and no 'layers_block_type'; one of them is needed"
        )
    return list(kinds)


def _rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """Layers have one norm and one mixer each."""
    mixing = spec.mixing_layers
    others = tuple(layer for layer in range(spec.num_hidden_layers) if layer not in mixing)
    names = {"up": "up_proj", "down": "down_proj"}
    rules = (
        Rule(source="model.embeddings.weight", target="embed.weight"),
        Rule(source="model.norm_f.weight", target="norm.weight"),
        *tensors.per_layer("norm.weight", "attention_norm.weight", mixing),
        *tensors.per_layer("norm.weight", "mlp_norm.weight", others),
        *tensors.attention_rules(spec),
        *mamba2_rules(spec, "mixer"),
        *tensors.mlp_rules(spec),
        *tensors.expert_rules(spec, names=names, shared="shared_experts"),
    )
    head = () if spec.tie_word_embeddings else (Rule(source="lm_head.weight", target="head.weight"),)
    return (*(rule.renamed(_as_mixer) for rule in rules), *head)


def _as_mixer(name: str) -> str:
    for block in (".self_attn.", ".mlp."):
        name = name.replace(block, ".mixer.")
    return name.replace("model.", "backbone.", 1)


FAMILIES = {
    "NemotronHForCausalLM": Family(
        read=_spec,
        defaults={
            "max_position_embeddings": 4096,
            "intermediate_size": 21504,
            "layer_norm_epsilon": 1e-5,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
        },
        respell=lambda config: {**config, "num_hidden_layers": len(_kinds(ConfigReader(config)))},
        weight_rules=_rules,
        harmless=with_unserved("mtp.*"),
        models="Nemotron-H, Nemotron Nano 2 and 3",
        notes=f"Mamba2 layers, {IN_KERNELS}; {ONE_TOKEN}",
    )
}
