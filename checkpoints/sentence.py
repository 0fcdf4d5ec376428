"""The files by which sentence-transformers says how a model's hidden states become one vector.

    modules.json                        the steps: a transformer, a pooling, perhaps linear layers and a normalisation
    1_Pooling/config.json               which tokens the vector is made of
    2_Dense/                            a linear layer of the pooled vector: config.json, model.safetensors
    1_LogitScore/config.json            in place of these, of a model that scores pairs: the tokens whose logits it is
    sentence_bert_config.json           the longest text in tokens; whether text is put in lower case
    config_sentence_transformers.json   texts that are put before others, by name ("query", "document")

A folder without them says nothing. What would change a vector and is not understood is refused by name.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

import numpy as np
from safetensors.numpy import load_file

from checkpoints.folder import LENGTHS, MODULES, PROMPTS, sentence_modules
from ferrum_jax.io.files.json_files import read_json, read_optional_json

_VECTOR = "sentence_embedding"
_MODES = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_lasttoken": "last"}
_OTHER_MODES = ("pooling_mode_max_tokens", "pooling_mode_mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens")
_NAMES = {"mean": "mean", "cls": "cls", "lasttoken": "last"}  # as newer files spell the mode
ACTIVATIONS = ("sigmoid", "identity")  # of a score


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseStep:
    """A linear layer behind the pooling. place: in the folder. digest: of its weights.

    activation: "Identity" or "Tanh".
    """

    place: str
    digest: str
    activation: str

    def load(self, folder: Path) -> Callable[[np.ndarray], np.ndarray]:
        """The layer: [n, I] float32 -> [n, O]."""
        tensors = load_file(folder / self.place / "model.safetensors")
        weight, bias = tensors["linear.weight"].astype(np.float32), tensors.get("linear.bias", np.float32(0))

        def layer(vectors: np.ndarray) -> np.ndarray:
            found = vectors @ weight.T + bias.astype(np.float32)
            return np.tanh(found) if self.activation == "Tanh" else found

        return layer


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogitScore:
    """A score of a pair, made of logits after its last token.

    true_id: whose logit it is; false_id: whose is taken off that. activation: "sigmoid" or "identity". template: what
    the chat template is given beside the pair.
    """

    true_id: int
    false_id: int | None = None
    activation: str = "sigmoid"
    template: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentenceLayout:
    """How a checkpoint's vectors are made; the defaults are those of a folder that does not say.

    pooling: "mean", "cls" or "last". prompts: texts that are put before others, by name; default_prompt: one of the
    names. pools_prompt: a mean is over the prompt's tokens too. logit_score: of a model that scores pairs.
    """

    pooling: str | None = None
    normalize: bool = False
    max_seq_length: int | None = None
    lower_case: bool = False
    prompts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    default_prompt: str | None = None
    pools_prompt: bool = True
    dense: tuple[DenseStep, ...] = ()
    logit_score: LogitScore | None = None


def read_sentence_layout(folder: Path) -> SentenceLayout:
    """The layout of a sentence-transformers folder. Raises ValueError naming the file and the unknown key."""
    steps = sentence_modules(folder)
    if not steps:
        return SentenceLayout()
    kinds = [kind for kind, _ in steps]
    if kinds == ["Transformer", "LogitScore"] and steps[0][1] == PurePosixPath():
        return _scoring_layout(folder, steps[1][1])
    behind = kinds[2:-1] if kinds[-1] == "Normalize" else kinds[2:]
    if kinds[:2] != ["Transformer", "Pooling"] or set(behind) - {"Dense"} or steps[0][1] != PurePosixPath():
        raise ValueError(
            f"{folder / MODULES} names the steps {[(kind, str(place)) for kind, place in steps]}; supported are a "
            "Transformer in the folder itself, a Pooling, then Dense layers if any, and at most a Normalize"
        )
    file = folder / steps[1][1] / "config.json"
    pooling = read_json(file)
    lengths, (texts, default) = read_optional_json(folder / LENGTHS), _prompts(folder)
    longest = lengths.get("max_seq_length")
    if longest is not None and (type(longest) is not int or not 1 <= longest < 2**31):
        raise ValueError(
            f"{folder / LENGTHS} has a max_seq_length that is not a number of tokens: {str(longest)[:100]}"
        )
    return SentenceLayout(
        pooling=_pooling(pooling, file),
        normalize="Normalize" in kinds,
        max_seq_length=longest,
        lower_case=bool(lengths.get("do_lower_case", False)),
        prompts=texts,
        default_prompt=default,
        pools_prompt=bool(pooling.get("include_prompt", True)),
        dense=tuple(_dense(folder, place) for kind, place in steps if kind == "Dense"),
    )


def _prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    """Prompts by name, and the name of the one that is put where nobody names one."""
    found = read_optional_json(folder / PROMPTS)
    texts, default = found.get("prompts") or {}, found.get("default_prompt_name")
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise ValueError(f"{folder / PROMPTS} has prompts that are no object of texts by name")
    if default is not None and not isinstance(default, str):
        raise ValueError(f"{folder / PROMPTS} has a default_prompt_name that is not text")
    return dict(texts), default


def _scoring_layout(folder: Path, place: PurePosixPath) -> SentenceLayout:
    """The layout of a model that generates and scores pairs by its logits."""
    file, own = folder / place / "config.json", read_optional_json(folder / LENGTHS)
    config, (texts, default) = read_json(file), _prompts(folder)
    true_id, false_id = config.get("true_token_id"), config.get("false_token_id")
    if not _is_token(true_id) or not (false_id is None or _is_token(false_id)):
        raise ValueError(
            f"{file} names the tokens {true_id} and {false_id}; true_token_id must be a token id, "
            "false_token_id one or null"
        )
    named = str(read_optional_json(folder / PROMPTS).get("activation_fn") or "Sigmoid")
    activation = named.rpartition(".")[2].lower()
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"{folder / PROMPTS} has the activation_fn {named[:100]!r}; supported are Sigmoid and Identity"
        )
    processing = own.get("processing_kwargs") or {}
    template = processing.get("chat_template") or {} if isinstance(processing, dict) else None
    if not isinstance(template, dict) or (isinstance(processing, dict) and set(processing) - {"chat_template"}):
        raise ValueError(
            f"{folder / LENGTHS} has the processing_kwargs {str(processing)[:200]}; supported is chat_template alone"
        )
    score = LogitScore(true_id=true_id, false_id=false_id, activation=activation, template=template)
    return SentenceLayout(prompts=texts, default_prompt=default, logit_score=score)


def _is_token(value: Any) -> TypeGuard[int]:
    return type(value) is int and value >= 0


def _dense(folder: Path, place: PurePosixPath) -> DenseStep:
    file, weights = folder / place / "config.json", folder / place / "model.safetensors"
    config = read_json(file)
    activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in ("Identity", "Tanh") or config.get("module_input_name", _VECTOR) != _VECTOR:
        raise ValueError(
            f"{file} asks for {str(config)[:200]}; supported is a linear layer of the sentence's vector, with Identity "
            "or Tanh"
        )
    if not weights.is_file():
        raise ValueError(f"{weights} is missing; the layer's weights stand there, on this machine")
    digest = hashlib.blake2b(weights.read_bytes(), digest_size=16).hexdigest()
    return DenseStep(place=str(place), digest=digest, activation=activation)


def _pooling(config: Mapping[str, Any], file: Path) -> str:
    named = config.get("pooling_mode")
    chosen = [how for key, how in _MODES.items() if config.get(key)]
    chosen += [key for key in _OTHER_MODES if config.get(key)]
    chosen += [] if named is None else [_NAMES.get(str(named), str(named)[:100])]
    if len(chosen) != 1 or chosen[0] not in _NAMES.values():
        raise ValueError(f"{file} asks for the pooling {chosen}; exactly one of mean, cls and last is supported")
    return chosen[0]
