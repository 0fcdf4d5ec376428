"""Classifiers: a text's class, or its reward, from the final hidden state of its last token and a small head.

A decoder is read like one of embeddings, through the engine and its prefix cache, and the head is computed on the host
from each vector by itself: neither batch nor cache changes a bit that they do not change of the vector. An encoder has
its head on the device, and gives logits.
"""

from collections.abc import Sequence

import numpy as np

from checkpoints import CLASSES as HEAD
from checkpoints import Checkpoint
from ferrum_jax.core.outputs import ClassOutput, RequestOutput, RewardOutput
from ferrum_jax.models.families.encoder_spec import Labels, labels_of
from ferrum_jax.tasks.task import vector_in

ARCHITECTURES = ("ForSequenceClassification", "ForRewardModel")  # how names of those with a head end
_Layer = tuple[np.ndarray, np.ndarray]  # weight [O, I] and bias [O], float64


class Classifier:
    """A model's labels, and what stands behind its vectors. layers: linear, a ReLU between two; none gives logits.

    pad: the config's pad_token_id; the head reads the last token that is another, as transformers does.
    """

    def __init__(self, labels: Labels, layers: Sequence[_Layer] = (), pad: int | None = None) -> None:
        self.labels, self._layers, self._pad = labels, layers, pad

    def read_tokens(self, token_ids: Sequence[int]) -> Sequence[int]:
        """A text's tokens up to the one that the head reads; the first alone if all are pads."""
        last = next((n for n in range(len(token_ids), 1, -1) if token_ids[n - 1] != self._pad), 1)
        return token_ids[:last]

    def logits(self, state: np.ndarray) -> np.ndarray:  # [D] -> [n] float32
        found = state.astype(np.float64)
        for place, (weight, bias) in enumerate(self._layers):
            found = weight @ (np.maximum(found, 0) if place else found) + bias
        return found.astype(np.float32)

    def class_of(self, outputs: Sequence[RequestOutput]) -> ClassOutput:
        """The class of the text of one output."""
        logits = self.logits(vector_in(outputs[0]))
        probs = self.labels.probabilities(logits)
        return ClassOutput(
            prompt=outputs[0].prompt,
            prompt_token_ids=outputs[0].prompt_token_ids,
            label=self.labels.names[int(np.argmax(probs))],
            probs=probs,
            logits=logits,
            num_cached_tokens=outputs[0].num_cached_tokens,
        )

    def reward_of(self, outputs: Sequence[RequestOutput]) -> RewardOutput:
        """The reward of the text of one output."""
        return RewardOutput(
            prompt=outputs[0].prompt,
            prompt_token_ids=outputs[0].prompt_token_ids,
            reward=float(self.logits(vector_in(outputs[0]))[0]),
            num_cached_tokens=outputs[0].num_cached_tokens,
        )


def head_of(checkpoint: Checkpoint, hidden_size: int) -> Classifier | None:
    """The classifier of a decoder's checkpoint; None of a model without such a head.

    Raises ValueError for tensors that are no head of this model.
    """
    (name,) = checkpoint.config.get("architectures") or [""]
    if not str(name).endswith(ARCHITECTURES):
        return None
    if checkpoint.kind != "huggingface":
        raise ValueError(f"{name}: its head is not in folders that `convert` wrote; name the one it was made from")
    labels = labels_of(checkpoint.config)
    tensors = {key.removeprefix(HEAD): value for key, value in checkpoint.tensors.items() if key.startswith(HEAD)}
    prefixes = ("",) if "weight" in tensors else ("0.", "2.")
    needed = {f"{prefix}weight" for prefix in prefixes}
    known = needed | {f"{prefix}bias" for prefix in prefixes}
    if not needed <= tensors.keys() <= known:
        raise ValueError(
            f"{name} has the tensors {sorted(HEAD + key for key in tensors)[:8]}; supported are score.weight, or "
            "score.0.weight and score.2.weight, with or without biases"
        )
    widths = [hidden_size] * len(prefixes) + [len(labels.names)]
    layers = []
    for prefix, width, out in zip(prefixes, widths, widths[1:], strict=False):
        weight, bias = tensors[f"{prefix}weight"], tensors.get(f"{prefix}bias")
        if tuple(weight.shape) != (out, width) or (bias is not None and tuple(bias.shape) != (out,)):
            raise ValueError(
                f"{HEAD}{prefix}weight has the shape {tuple(weight.shape)}; with {len(labels.names)} labels and "
                f"vectors of {hidden_size} it must be {(out, width)}"
            )
        wide = np.zeros(out) if bias is None else np.asarray(bias).astype(np.float64)
        layers.append((np.asarray(weight).astype(np.float64), wide))
    return Classifier(labels, layers, checkpoint.config.get("pad_token_id"))


def require_classifier(classifier: Classifier | None, name: str) -> Classifier:
    """Raises ValueError for a model that tells no classes apart. name: of its architecture."""
    if classifier is None:
        raise ValueError(
            f"{name} is read as no classifier; name a checkpoint whose architecture ends in "
            f"{' or '.join(ARCHITECTURES)}"
        )
    return classifier


def require_reward(classifier: Classifier | None, name: str) -> Classifier:
    """Raises ValueError for a model that gives no single number."""
    found = require_classifier(classifier, name)
    if len(found.labels.names) > 1:
        raise ValueError(
            f"the model has {len(found.labels.names)} labels, and a reward is one number; ask LLM.classify"
        )
    return found
