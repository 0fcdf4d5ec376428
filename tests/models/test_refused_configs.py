"""What the readers of config.json refuse: a published config with one change, and what the sentence says of it."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ferrum_jax.models.families.registry import FAMILIES, abstract_model, encoder_spec_of, spec_of
from scripts.published import config_of
from tests.models.tiny import TINY, TINY_NEXT
from tests.support import GOLDENS

BERT = json.loads((GOLDENS / "encoders" / "bert" / "config.json").read_text())
CONFIGS: dict[str, dict[str, Any]] = {"tiny": TINY, "tiny next": TINY_NEXT, "bert": BERT}
ROPE = config_of("Llama-3.2-1B")["rope_scaling"]
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
LONG_PHI = {"max_position_embeddings": 131072, "sliding_window": 262144, "rope_scaling": LONGROPE}
PHI_128K = config_of("Phi-3-mini-128k")["rope_scaling"]
ODD_PHI = {"hidden_size": 32 * 84, "partial_rotary_factor": 0.75}
MSCALES = {"short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122}
PHIMOE_ROPE = {"type": "longrope", "original_max_position_embeddings": 4096, **MSCALES}
PHIMOE_ROPE |= {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
LARGE = config_of("Mistral-Large-4-1T-A52B")["text_config"]
NEGATIVE = {"layer_types": ["sliding_attention"] * 2, "sliding_window": -4, "use_sliding_window": True}
ABSENT = object()
# By the config that changes: the change, and what is said. Plain ones are in refused_configs.json.
CODED = {
    "tiny": [
        (NEGATIVE, "window is -4"),
    ],
    "Qwen3-0.6B": [
        ({"layer_types": ["full_attention"] * 2}, "layer_types names 2 layers, and num_hidden_layers is 28"),
        ({"layer_types": ["linear_attention"] * 28}, r"layer_types has \['linear_attention'\]; known are"),
    ],
    "Qwen3-30B-A3B": [
        ({"mlp_only_layers": [1] * 100_000}, "mlp_only_layers has 100000 entries"),
    ],
    "tiny next": [
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types is .*'full_attention', 'linear_attention'"),
        ({"layer_types": ["linear_attention"] * 4}, "cache_groups are .*'state' must come once at most"),
    ],
    "GLM-5.2": [
        ({"index_topk_pattern": "SF" * 39}, r'index_topk_pattern is "SFSF.*, and must say .*full. of the first'),
    ],
    "Llama-3-8B": [
        ({"architectures": ["GPT2LMHeadModel"]}, f"'GPT2LMHeadModel'; supported are \\['{min(FAMILIES)}', "),
        ({"architectures": ABSENT}, "must name one of"),
        ({"hidden_size": ABSENT}, "no 'hidden_size'"),
        ({"hidden_size": 10**400}, "hidden_size is a whole number of 1329 bits"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be a number from 1 to 1000"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is NaN"),
        ({"rope_theta": math.inf}, "rope_theta is Infinity"),
        ({"eos_token_id": 10**12}, "eos_token_id is 1000000000000; it must be a token id"),
        ({"rope_scaling": ROPE | {"low_freq_factor": 4.5}}, "more than high_freq_factor"),
        ({"rope_scaling": ROPE | {"factor": math.nan}}, "factor is NaN"),
    ],
    "Gemma-3-4B": [
        (
            {"rope_theta": ABSENT, "rope_local_base_freq": ABSENT, "rope_scaling": ABSENT}
            | {"rope_parameters": {"default": {}}},
            r"rope_parameters has \['default'\]; known are",
        ),
    ],
    "Phi-3-mini-4k": [
        (
            LONG_PHI | {"rope_scaling": LONGROPE | {"short_factor": [1.0] * 47}},
            "47 short and 48 long factors; half of the dimensions that turn are 48",
        ),
        (
            LONG_PHI | {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48}},
            r"lacks \['long_factor'\]",
        ),
        (LONG_PHI | {"attention_bias": True}, "attention_bias is true; of this architecture it must be"),
        (LONG_PHI | {"lm_head_bias": True}, "lm_head_bias is true; of this architecture it must be"),
        (LONG_PHI | {"full_attn_mod": 2}, "full_attn_mod is 2; of this architecture it must be"),
        (
            ODD_PHI | {"hidden_size": 32 * 83, "partial_rotary_factor": 1.0},
            "head_dim is 83, and 83 of its dimensions turn",
        ),
        (ODD_PHI | {"rope_scaling": PHI_128K}, "63 of its dimensions turn; .* of type 'longrope' need an"),
    ],
    "Phi-3-mini-128k": [
        ({"rope_scaling": PHI_128K | {"short_factor": [math.nan] * 48}}, "short_factor is NaN"),
    ],
    "Mistral-Large-4-1T-A52B": [
        (
            {"text_config": LARGE | {"kv_source_layers": [*range(71), 70]}},
            "71 attends to the latents of 70; that must be the last layer before it that lends, of those with posit",
        ),
        (
            {"text_config": LARGE | {"kv_source_layers": [0, 0, *range(2, 72)]}},
            "1 has latents of 0 and an indexer of its own; a cache of an indexer's keys alone is not served",
        ),
    ],
    "Phi-3.5-MoE": [
        (
            {"rope_scaling": PHIMOE_ROPE | {"long_mscale": 1.3}},
            "long_mscale 1.3 of the rope; they must be one number",
        ),
    ],
}
PLAIN = json.loads(Path(__file__).with_name("refused_configs.json").read_text())
ROWS = [(name, *row) for table in (PLAIN, CODED) for name, rows in table.items() for row in rows]


@pytest.mark.parametrize(("name", "change", "said"), ROWS, ids=[f"{n}-{said[:40]}" for n, _, said in ROWS])
def test_a_config_that_cannot_be_is_refused_by_key_and_value(name: str, change: dict[str, Any], said: str) -> None:
    config = (CONFIGS[name] if name in CONFIGS else config_of(name)) | change
    config = {key: value for key, value in config.items() if value is not ABSENT}
    read = encoder_spec_of if name == "bert" else spec_of
    with pytest.raises(ValueError, match=said):
        read(config)


def test_an_activation_that_there_is_not_is_refused_where_the_model_is_made():
    with pytest.raises(ValueError, match="hidden_act is 'tanhshrink'; supported are"):
        abstract_model(spec_of(TINY | {"hidden_act": "tanhshrink"}))
