"""Mistral Large 4's text model with a head, which the reference implementation has in the whole model alone."""

from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from transformers import conversion_mapping  # pyright: ignore[reportMissingImports]
from transformers.core_model_loading import WeightRenaming  # pyright: ignore[reportMissingImports]
from transformers.modeling_outputs import CausalLMOutput  # pyright: ignore[reportMissingImports]

_KIND = "mistral_large4_text"
# Names of Mistral's checkpoints, which the whole model says of its parts, and the names here.
_OF_THE_WHOLE = {
    r"^tok_embeddings\.": "model.embed_tokens.",
    r"^lerope\.alpha": "model.rotary_emb.alpha",
    r"^layers\.": "model.layers.",
    r"^norm\.": "model.norm.",
    r"^output\.": "lm_head.",
    r"\.wo\.": ".o_proj.",
    r"\.(feed_forward|shared_experts)\.w1\.": r".\1.gate_proj.",
    r"\.(feed_forward|shared_experts)\.w2\.": r".\1.down_proj.",
    r"\.(feed_forward|shared_experts)\.w3\.": r".\1.up_proj.",
}


def text_model_class() -> type[Any]:
    """The class; from then on such models are saved under Mistral's names, and read."""
    own = [WeightRenaming(theirs, ours) for theirs, ours in _OF_THE_WHOLE.items()]
    known = conversion_mapping.get_checkpoint_conversion_mapping(_KIND)
    conversion_mapping.register_checkpoint_conversion_mapping(_KIND, [*own, *known], overwrite=True)
    return MistralLarge4TextForCausalLM


class MistralLarge4TextForCausalLM(transformers.MistralLarge4PreTrainedModel):
    """The text model, its head, and the cap of logits."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = transformers.MistralLarge4TextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> CausalLMOutput:
        cap = self.config.final_logit_softcapping
        hidden = self.model(input_ids, use_cache=use_cache).last_hidden_state
        return CausalLMOutput(logits=cap * torch.tanh(self.lm_head(hidden) / cap))
