"""Reading a config.json so that nothing in it is silently ignored.

A key is either read by the family, or in the table of keys that change nothing here, or refused by name.
A key whose value is null or an empty list or dict counts as absent, as in the reference implementation.
"""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from checkpoints.formats import KEYS, refusal
from ferrum_jax.models.families.bounds import BOUNDS, MAX_LISTED, MAX_TOKEN_ID, check_number, shown
from ferrum_jax.models.spec import CacheGroup

# Keys that do not change a token's logits: book-keeping, training, and defaults of generation (which an engine
# takes from generation_config.json or the request).
HARMLESS_KEYS = frozenset(
    """
    architectures model_type transformers_version _name_or_path name_or_path torch_dtype dtype use_cache
    initializer_range attention_dropout router_aux_loss_coef router_jitter_noise
    resid_pdrop embd_pdrop auto_map is_llama_config transformers.js_config max_sequence_length
    output_router_logits pretraining_tp cache_implementation
    bos_token_id pad_token_id eos_token_id sep_token_id decoder_start_token_id tokenizer_class prefix
    task_specific_params
    return_dict output_hidden_states output_attentions torchscript chunk_size_feed_forward is_encoder_decoder is_decoder
    add_cross_attention cross_attention_hidden_size tie_encoder_decoder finetuning_task id2label label2id num_labels
    problem_type use_bfloat16 tf_legacy_loss bad_words_ids begin_suppress_tokens suppress_tokens
    forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty
    do_sample temperature top_k top_p typical_p min_length max_length num_beams num_beam_groups num_return_sequences
    diversity_penalty early_stopping length_penalty repetition_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size output_scores return_dict_in_generate
    """.split()  # noqa: SIM905
)
_KINDS: Mapping[type, tuple[Any, str]] = {
    bool: (bool, "true or false"),
    int: (int, "a whole number"),
    float: (int | float, "a number"),
    str: (str, "a string"),
    list: (list | tuple, "a list"),
    dict: (Mapping, "an object"),
}


class ConfigReader:
    """Hands out the values of a config and remembers which keys were asked for.

    defaults: a family's own, of keys for which its config is silent. architecture: the one that is read. asked: keys.
    """

    def __init__(
        self, config: Mapping[str, Any], defaults: Mapping[str, Any] = MappingProxyType({}), architecture: str = ""
    ) -> None:
        self.config, self.architecture = config, architecture
        self._defaults = defaults
        self._values = {key: value for key, value in config.items() if value not in (None, [], {})}
        self._nulls = {key for key, value in config.items() if value is None}
        self.asked: set[str] = set()

    def get(self, key: str, default: Any) -> Any:
        """The value of key; where it is absent, null or empty, the family's default, or else this one.

        Raises ValueError for a value of another type than the default's, where one of None takes all, and for a number
        beyond its BOUNDS.
        """
        return self._checked(key, self._defaults.get(key, default))

    def _checked(self, key: str, default: Any) -> Any:
        self.asked.add(key)
        value = self._values.get(key, default)
        kinds, what = _KINDS.get(type(default), (object, ""))
        if not isinstance(value, kinds) or (isinstance(value, bool) and type(default) in (int, float)):
            raise ValueError(f"{key} is {shown(value)}; it must be {what}")
        if type(default) in (int, float) or (key in BOUNDS and value is not None):
            check_number(key, value)
        elif isinstance(value, list | tuple) and len(value) > MAX_LISTED:
            raise ValueError(f"{key} has {len(value)} entries; it must have at most {MAX_LISTED}")
        return value

    def nullable(self, key: str, default: Any) -> Any:
        """The value of key, None where it is null, and default where it is absent: for keys whose null means none."""
        self.asked.add(key)
        return None if key in self._nulls else self.get(key, default)

    def said(self, key: str) -> Any:
        """The value of key; None where the config is silent, whatever the family's default is."""
        return self._checked(key, None)

    def default(self, key: str, otherwise: Any) -> Any:
        """The family's default of a key."""
        return self._defaults.get(key, otherwise)

    def flag(self, key: str, default: bool = False) -> bool:
        """The value of a key that is true or false."""
        return self.get(key, default)

    def leave(self, *keys: str) -> None:
        """Takes note of keys that change nothing in this family."""
        for key in keys:
            self.get(key, None)

    def require(self, key: str, like: Any = 0) -> Any:
        """The value of key, of the type of `like`. Raises ValueError when nothing says it, or for another type."""
        if key not in self._values and key not in self._defaults:
            raise ValueError(f"config.json has no {key!r}, which this architecture needs")
        return self.get(key, like)

    def only(self, **values: Any) -> None:
        """Raises ValueError where the config has one of these keys with another value than the one a family knows."""
        for key, value in values.items():
            if self.get(key, value) != value:
                raise ValueError(
                    f"{key} is {shown(self.get(key, value))}; of this architecture it must be {json.dumps(value)}"
                )

    def token_ids(self, key: str) -> tuple[int, ...]:
        """A token id or a list of them, as a tuple; empty when absent. Raises ValueError for anything else."""
        value = self.get(key, None)
        ids = value if isinstance(value, list | tuple) else () if value is None else (value,)
        if any(type(i) is not int or not 0 <= i < MAX_TOKEN_ID for i in ids):
            raise ValueError(f"{key} is {shown(value, repr)}; it must be a token id or a list of them")
        return tuple(ids)

    def alike(self, key: str, default: int) -> int:
        """A number, or a list that says the same number for each layer. Raises ValueError where they differ."""
        value = self._values.get(key)
        if not isinstance(value, list | tuple):
            return self.get(key, default)
        self.asked.add(key)
        if len(value) > MAX_LISTED or any(each != value[0] for each in value):
            raise ValueError(f"{key} is {shown(value)}; layers that differ in it are not served")
        check_number(key, value[0])
        return value[0]

    def flags(self, key: str, default: list[int]) -> list[int]:
        """A 1 or 0 for each layer, as many as the default has. Raises ValueError for anything else."""
        flags = self.get(key, default)
        if len(flags) != len(default) or any(type(flag) not in (int, bool) or flag not in (0, 1) for flag in flags):
            raise ValueError(f"{key} is {shown(flags)}; it must be a 1 or 0 for each of {len(default)} layers")
        return list(flags)

    def finish(self) -> None:
        """Raises one ValueError that names every key nobody understood."""
        unknown = sorted(set(self._values) - self.asked - HARMLESS_KEYS)
        for key in set(KEYS) & set(unknown):
            raise ValueError(refusal(key, self._values[key]))
        if unknown:
            pairs = ", ".join(f"{key} = {shown(self._values[key])}" for key in unknown)
            raise ValueError(
                f"config.json has keys that this architecture does not understand: {pairs}. They may change the "
                "result, so they are not ignored; remove them if they do not matter for this model"
            )


def cache_groups(
    kinds: Sequence[str], num_layers: int, window: int | None, windowed_kind: str = "sliding_attention"
) -> tuple[CacheGroup, ...]:
    """The layers that attend to all tokens and those that attend to a window, each where there are any.

    kinds: of each layer, as in layer_types; without a window all attend to all. windowed_kind: "sliding_attention", or
    "chunked_attention", whose windows begin at their multiples. Raises ValueError for other kinds and for another
    number of them.
    """
    odd = sorted(set(map(str, kinds)) - {"full_attention", windowed_kind})
    if odd:
        raise ValueError(f"layer_types has {odd}; known are 'full_attention' and {windowed_kind!r}")
    if len(kinds) != num_layers:
        raise ValueError(f"layer_types names {len(kinds)} layers, and num_hidden_layers is {num_layers}")
    slides = [window is not None and kind == windowed_kind for kind in kinds]
    if any(slides) and (type(window) is not int or window < 1):
        name = "sliding_window" if windowed_kind == "sliding_attention" else "attention_chunk_size"
        raise ValueError(f"{name} is {shown(window)}; it must be a whole number, 1 or more, or null for none")
    full = tuple(layer for layer, does in enumerate(slides) if not does)
    windowed = tuple(layer for layer, does in enumerate(slides) if does)
    groups = (CacheGroup(kind="full", layers=full),) if full else ()
    chunked = windowed_kind == "chunked_attention"
    return (*groups, CacheGroup(kind="window", layers=windowed, window=window, chunked=chunked)) if windowed else groups


def part_reader(config: object, key: str) -> ConfigReader:
    """The reader of a part of a config.json, under this key. Raises ValueError for what is no object."""
    if not isinstance(config, Mapping):
        raise ValueError(f"{key} is {shown(config)}; it must be an object")
    return ConfigReader(config)


def axial_tower_readers(config: object) -> tuple[ConfigReader, ConfigReader]:
    """Readers of a `vision_config` and of its rope_parameters. Raises ValueError for a rotation that is not axial."""
    reader = part_reader(config, "vision_config")
    rope = ConfigReader(reader.get("rope_parameters", {}))
    if rope.get("rope_type", "axial") != "axial":
        raise ValueError(f"vision_config's rope_type is {shown(rope.get('rope_type', 'axial'))}; it must be 'axial'")
    return reader, rope


def window_within(reader: ConfigReader) -> int | None:
    """The sliding window; None where the config says null, or one that is as long as the longest context."""
    window = reader.nullable("sliding_window", None)
    return None if window is None or window >= reader.require("max_position_embeddings") else window


def stored_dtype(reader: ConfigReader) -> str:
    """The dtype a checkpoint says it is stored in; float32 where it is silent."""
    return str(reader.get("dtype", reader.get("torch_dtype", "float32"))).removeprefix("torch.")
