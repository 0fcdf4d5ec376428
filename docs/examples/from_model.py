"""Generates with a flax.nnx model that is in memory: here one with random weights, as at the start of a training.

python docs/examples/from_model.py
"""

from __future__ import annotations

from flax import nnx

from ferrum_jax import LLM, EngineConfig, SamplingParams
from ferrum_jax.models.families.decoder import Decoder
from ferrum_jax.models.families.registry import spec_of

CONFIG = {  # what a config.json says
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}
SIZES = EngineConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64)


def main(config: EngineConfig = SIZES) -> list[tuple[int, ...]]:
    model = Decoder(spec_of(CONFIG), rngs=nnx.Rngs(0))
    llm = LLM.from_model(model, config)  # there is no tokenizer, so prompts are token ids
    outputs = llm.generate([[5, 6, 7], [5, 6, 8]], SamplingParams(max_tokens=8, seed=1, ignore_eos=True))
    for output in outputs:
        print(output.prompt_token_ids, "->", output.token_ids)
    return [output.token_ids for output in outputs]


if __name__ == "__main__":
    main()
