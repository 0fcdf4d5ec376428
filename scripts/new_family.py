"""Says what a family of the reference implementation needs here: its config's keys and its tensors, beside the nearest.

    python -m scripts.new_family NAME        NAME is a model_type of transformers

Needs torch and transformers. Every family that is served reads the default config of the new one; the nearest is the
one that leaves the fewest keys and tensors over. Printed are the keys that it does not understand, the tensors that it
wants and that are not there, those that its rules do not name, and what to begin with: the family's file, the golden's
config.json and its row.
"""

import argparse
import dataclasses
import json
import re
from typing import Any

from checkpoints.rules import expand
from ferrum_jax.models.families.family import Family
from ferrum_jax.models.families.registry import FAMILIES

_TINY = {
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 190,
    "intermediate_size": 60,
    "pad_token_id": 0,
}
_DEFAULTS = ("max_position_embeddings", "hidden_act", "rms_norm_eps", "tie_word_embeddings", "sliding_window")
_UNKNOWN = re.compile(r"(\w+) = ")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """How near a family is. refused: why it does not read the config at all, empty where it does."""

    architecture: str
    refused: str
    new_keys: tuple[str, ...]
    missing: tuple[str, ...]
    left_over: tuple[str, ...]

    @property
    def distance(self) -> tuple[bool, int]:
        """What is least of the nearest family."""
        return bool(self.refused), len(self.new_keys) + len(self.missing) + len(self.left_over)


def main() -> None:
    """Prints the nearest family and the recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="model_type of the reference implementation")
    name = parser.parse_args().name
    config, tensors = reference(name)
    compared = (compare(each, family, config, tensors) for each, family in FAMILIES.items())
    found = sorted(compared, key=lambda comparison: comparison.distance)
    for comparison in found[:3]:
        show(comparison)
    print(f"\nferrum_jax/models/families/{name}.py, and its name in registry.py beside it:\n{module(name, config)}")
    print(f"\ntests/goldens/{name}/config.json:\n{tiny(config)}")
    print(f'\ntests/goldens/families.toml:\n{name} = {{ mesh = "dp=2,tp=2" }}')


def reference(name: str) -> tuple[dict[str, Any], set[str]]:
    """The config.json that the reference's tiny model of this type is saved with, and names of its tensors."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    if name not in transformers.CONFIG_MAPPING:
        raise SystemExit(f"{name!r} is no model_type of transformers {transformers.__version__}")
    config = transformers.CONFIG_MAPPING[name](**_TINY)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return config.to_dict() | {"architectures": [type(model).__name__]}, set(model.state_dict())


def compare(architecture: str, family: Family, config: dict[str, Any], tensors: set[str]) -> Comparison:
    """What this family makes of the config and of the tensors."""
    config, keys = config | {"architectures": [architecture]}, ()
    for _ in range(2):  # again without the keys that it does not understand
        try:
            spec = family.spec_from_config(config, architecture)
        except ValueError as error:
            unknown = str(error).partition("does not understand: ")[2].partition(". They may")[0]
            if not unknown or keys:
                return Comparison(
                    architecture=architecture, refused=str(error), new_keys=keys, missing=(), left_over=()
                )
            keys = tuple(key for key in _UNKNOWN.findall(unknown) if key in config)
            config = {key: value for key, value in config.items() if key not in keys}
        else:
            wanted = {source.name for sources in expand(family.weight_rules(spec)).values() for source in sources}
            return Comparison(
                architecture=architecture,
                refused="",
                new_keys=keys,
                missing=_patterns(wanted - tensors),
                left_over=_patterns(tensors - wanted),
            )
    raise AssertionError("a config was refused twice for keys that it does not have")


def _patterns(names: set[str]) -> tuple[str, ...]:
    """The names with a star for every number, each once."""
    return tuple(sorted({re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names}))


def show(comparison: Comparison) -> None:
    """Prints one comparison."""
    print(f"\n{comparison.architecture}")
    if comparison.refused:
        print(f"  refuses the config: {comparison.refused[:300]}")
    for what in ("new_keys", "missing", "left_over"):
        for each in getattr(comparison, what):
            print(f"  {what.replace('_', ' ')}: {each}")


def tiny(config: dict[str, Any]) -> str:
    """The golden's config.json to begin with; its sizes must all differ."""
    sizes = {key: value for key, value in _TINY.items() if key in config}
    said = {key: config[key] for key in ("architectures", "model_type")} | {"dtype": "bfloat16"}
    ends = {"max_position_embeddings": 512, "bos_token_id": 2, "eos_token_id": 1}
    rope = {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
    return json.dumps(said | sizes | ends | rope, indent=2)


def module(name: str, config: dict[str, Any]) -> str:
    """The family's file to begin with; what differs from `plain.py` is said in its spec, its defaults and its rules."""
    architecture = config["architectures"][0]
    said = {key: config[key] for key in _DEFAULTS if config.get(key) is not None}
    return f'''"""{architecture}: what it is, in a sentence.

Source: who and when; keys as in Hugging Face's config of {name}.
"""

from ferrum_jax.models.families.family import Family
from ferrum_jax.models.families.plain import spec_from

FAMILIES = {{
    "{architecture}": Family(
        read=spec_from,
        defaults={said!r},
        models="its models",
    )
}}'''


if __name__ == "__main__":
    main()
