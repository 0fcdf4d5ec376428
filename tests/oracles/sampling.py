"""Sampling in float64 NumPy, one row at a time, by sorting: what the device must agree with."""

from collections.abc import Sequence

import numpy as np

from ferrum_jax.sampling_params import SamplingParams


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.asarray(logits, np.float64) - np.max(logits)
    return shifted - np.log(np.exp(shifted).sum())


def edited_logits(
    logits: np.ndarray, sampling: SamplingParams, prompt: Sequence[int], output: Sequence[int], stop_ids: Sequence[int]
) -> np.ndarray:
    """Logits [V] after logit_bias, min_tokens, repetition, frequency and presence penalty."""
    x = np.asarray(logits, np.float64).copy()
    for token, bias in (sampling.logit_bias or {}).items():
        x[token] += bias
    if len(output) < sampling.min_tokens:
        x[list(stop_ids)] = -np.inf
    for token in set(prompt) | set(output):
        x[token] = x[token] / sampling.repetition_penalty if x[token] > 0 else x[token] * sampling.repetition_penalty
    for token in set(output):
        x[token] -= sampling.frequency_penalty * list(output).count(token) + sampling.presence_penalty
    return x


def kept_probabilities(edited: np.ndarray, sampling: SamplingParams) -> np.ndarray:
    """The distribution [V] that is drawn from: temperature, min-p, top-k, top-p of what is left; equals stay
    together."""
    scaled = (edited - edited.max()) / sampling.temperature
    weights = np.exp(scaled)
    order = np.argsort(-scaled, kind="stable")
    kept = weights >= sampling.min_p
    if 0 < sampling.top_k < len(scaled):
        kept &= scaled >= scaled[order[sampling.top_k - 1]]
    if sampling.top_p < 1.0:
        mass = np.cumsum(np.where(kept, weights, 0.0)[order])
        last = int(np.argmax(mass >= sampling.top_p * mass[-1]))
        kept &= scaled >= scaled[order[last]]
    weights = np.where(kept, weights, 0.0)
    return weights / weights.sum()


def rank(logits: np.ndarray, token: int) -> int:
    return 1 + int(np.sum(logits > logits[token]))


def top_ids(logits: np.ndarray, count: int) -> np.ndarray:
    return np.argsort(-np.asarray(logits), kind="stable")[:count]
