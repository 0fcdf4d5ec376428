"""KimiK25ForConditionalGeneration: the text part of Kimi-K2.5, a DeepSeek-V3.

Source: Moonshot AI 2026 (Kimi K2.5); keys as in Hugging Face's config.
"""

from __future__ import annotations

from ferrum_jax.models.families import deepseek
from ferrum_jax.models.families.text_part import text_part_of

# Keys that concern images and videos alone.
_OF_IMAGES = (
    *("vision_config", "projection_hidden_size", "projection_layer_norm_eps", "image_token_id", "video_token_id"),
    *("vision_start_token_id", "vision_end_token_id", "media_placeholder_token_id", "ignore_index"),
    *("use_unified_vision_chunk", "video_placeholder"),
)
FAMILIES = {
    "KimiK25ForConditionalGeneration": text_part_of(
        deepseek.FAMILIES["DeepseekV3ForCausalLM"],
        _OF_IMAGES,
        models="Kimi-K2.5",
        notes=f"its text part; images are refused; {deepseek.LATENT}",
    )
}
