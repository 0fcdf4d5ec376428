"""A model's specification in integers and floats, read from its config.json, free of any array.

Fields stand in groups, one for each kind of layer. Names are Hugging Face's where there are such, without words that
the group's name has: attention_bias is `attention.bias`. Errors name the key of config.json.
"""

from ferrum_jax.models.spec.feed_forward import ExpertsSpec, MlpSpec
from ferrum_jax.models.spec.heads import AttentionSpec, IndexerSpec, Kept, LatentSpec, QkNorm
from ferrum_jax.models.spec.model_spec import CacheGroup, LayerInputSpec, ModelSpec, NormSpec, StreamsSpec
from ferrum_jax.models.spec.positions import RopeSpec, Temperature
from ferrum_jax.models.spec.recurrence import GatedDeltaSpec, KimiDeltaSpec, Mamba2Spec, RecurrenceSpec, ShortConvSpec
from ferrum_jax.models.spec.sound import SoundSpec
from ferrum_jax.models.spec.vision import VisionSpec
