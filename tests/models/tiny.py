"""Small configs of families, of sizes that all differ."""

from scripts.published import config_of

TINY = config_of("Qwen3-0.6B") | {
    "vocab_size": 40,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "head_dim": 8,
    "num_key_value_heads": 3,
    "intermediate_size": 20,
}
TINY_NEXT = config_of("Qwen3-Next-80B-A3B") | {
    "num_hidden_layers": 4,
    "hidden_size": 8,
    "vocab_size": 20,
    "num_experts": 12,
    "head_dim": 16,
}
