"""Every layer in NumPy float64, written from its definition, one token at a time where that is plainer."""

import math

import numpy as np


def linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """[T, I], [O, I], [O] -> [T, O]."""
    y = x @ weight.T
    return y if bias is None else y + bias


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """[..., D], [D] -> [..., D]."""
    return weight * x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def rotate(x: np.ndarray, positions: np.ndarray, frequencies: np.ndarray, factor: float = 1.0) -> np.ndarray:
    """[T, heads, H] at positions [T], as products of complex numbers x[i] + j x[i + H/2] with e^(j angle)."""
    half = x.shape[-1] // 2
    turns = factor * np.exp(1j * positions[:, None] * frequencies)[:, None, :]
    turned = (x[..., :half] + 1j * x[..., half:]) * turns
    return np.concatenate((turned.real, turned.imag), axis=-1)


def softmax(x: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def causal_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
    chunked: bool = False,
) -> np.ndarray:
    """[T, N, H], [T, K, H], [T, K, H] -> [T, N, H], one query and one head at a time; of the last `window` tokens.

    chunked: of those since the last multiple of `window` instead.

    sinks: [N], of each head the logit of one more key, whose value is zero.
    """
    T, N, _ = q.shape
    group = N // k.shape[1]
    out = np.zeros_like(q)
    for t in range(T):
        for n in range(N):
            oldest = 0 if window is None else t // window * window if chunked else max(t + 1 - window, 0)
            seen = slice(oldest, t + 1)
            logits = k[seen, n // group] @ q[t, n] * scale
            logits = logits if soft_cap is None else soft_cap * np.tanh(logits / soft_cap)
            weights = softmax(logits if sinks is None else np.append(logits, sinks[n]))
            out[t, n] = weights[: len(logits)] @ v[seen, n // group]
    return out


def clamped_swiglu(gate: np.ndarray, up: np.ndarray, limit: float, alpha: float) -> np.ndarray:
    gate, up = np.where(gate > limit, limit, gate), np.where(np.abs(up) > limit, np.sign(up) * limit, up)
    return (up + 1) * gate / (1 + np.exp(-alpha * gate))


def limited_gate(gate: np.ndarray, up: np.ndarray, limit: float) -> np.ndarray:
    """What is gated, its two factors no larger than a limit; silu is above -1."""
    return np.minimum(silu(gate), limit) * np.maximum(np.minimum(up, limit), -limit)


def route(
    x: np.ndarray, router: np.ndarray, num_chosen: int, normalise: bool, bias: np.ndarray | float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """[T, D], [E, D] -> (expert ids [T, X], weights [T, X]), best first."""
    probabilities = softmax(x @ router.T + bias)
    ids = np.argsort(-probabilities, axis=-1, kind="stable")[:, :num_chosen]
    weights = np.take_along_axis(probabilities, ids, axis=-1)
    return ids, weights / weights.sum(axis=-1, keepdims=True) if normalise else weights


def route_among_rivals(
    x: np.ndarray, router: np.ndarray, num_chosen: int, within: float
) -> tuple[np.ndarray, np.ndarray]:
    """[T, D], [E, D] -> (expert ids [T, X], weights [T, X]): each the best that is left, and its softmax over those
    left that are behind it by at most `within`, as a share of the larger of its logit and the size of theirs."""
    logits, ids, weights = x @ router.T, [], []
    for row in logits:
        left = list(range(len(row)))
        for _ in range(num_chosen):
            best = max(left, key=lambda e: row[e])
            rivals = [e for e in left if (row[best] - row[e]) / max(abs(row[e]), row[best]) <= within]
            ids.append(best)
            weights.append(1 / sum(math.exp(row[e] - row[best]) for e in rivals))
            left.remove(best)
    return np.reshape(ids, (len(x), -1)), np.reshape(weights, (len(x), -1))


def kimi_delta(x: np.ndarray, w: dict[str, np.ndarray], bound: float | None, eps: float) -> np.ndarray:
    """[T, D] -> [T, D], one head and one token at a time. w: the layer's parameters by name."""
    T, N = len(x), len(w["b_heads.weight"])

    def low_rank_or_one(name: str) -> np.ndarray:
        if f"{name}_heads.weight" in w:
            return linear(x, w[f"{name}_heads.weight"])
        return linear(linear(x, w[f"{name}_a.weight"]), w[f"{name}_b.weight"])

    def convolved(name: str) -> np.ndarray:
        taps = w[f"{name}_conv"][:, 0]
        padded = np.pad(linear(x, w[f"{name}_heads.weight"]), ((taps.shape[1] - 1, 0), (0, 0)))
        return silu(sum(padded[i : i + T] * taps[:, i] for i in range(taps.shape[1]))).reshape(T, N, -1)

    q, k, v = map(convolved, "qkv")
    q, k = (y / np.sqrt(np.sum(y * y, axis=-1, keepdims=True) + 1e-6) for y in (q, k))
    rates = np.exp(w["a_log"] if "a_log" in w else w["a_log_by_head"].ravel())[:, None]
    forget = (low_rank_or_one("f") + w["dt_bias"]).reshape(q.shape)
    decay = np.exp(-rates * np.log1p(np.exp(forget)) if bound is None else bound / (1 + np.exp(-rates * forget)))
    beta = 1 / (1 + np.exp(-linear(x, w["b_heads.weight"])))
    out = np.zeros_like(v)
    for n in range(N):
        S = np.zeros((q.shape[-1], v.shape[-1]))
        for t in range(T):
            S = decay[t, n][:, None] * S
            S += np.outer(k[t, n], beta[t, n] * (v[t, n] - k[t, n] @ S))
            out[t, n] = q[t, n] @ S / math.sqrt(q.shape[-1])
    gate = 1 / (1 + np.exp(-low_rank_or_one("g").reshape(out.shape)))
    return linear((rms_norm(out, w["norm.weight"], eps) * gate).reshape(T, -1), w["o.weight"])


def llama3_frequencies(
    head_dim: int, theta: float, factor: float, low: float, high: float, context: int
) -> list[float]:
    """Wavelengths beyond context / low are divided by factor, those under context / high kept, others blended."""
    found = []
    for i in range(0, head_dim, 2):
        frequency = theta ** (-i / head_dim)
        turns = context * frequency / (2 * math.pi)  # in the original context
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        found.append(frequency * (kept + (1 - kept) / factor))
    return found


def dynamic_frequencies(head_dim: int, theta: float, factor: float, longest: int, context: int) -> list[float]:
    """Frequencies of a larger theta, by how far the longest context is beyond the original one."""
    stretched = theta * (factor * longest / context - (factor - 1)) ** (head_dim / (head_dim - 2))
    return [stretched ** (-i / head_dim) for i in range(0, head_dim, 2)]


def yarn_frequencies(head_dim: int, theta: float, factor: float, fast: float, slow: float, context: int) -> list[float]:
    """A linear ramp over dimensions, from kept (more than fast turns) to divided by factor (fewer than slow)."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = max(math.floor(dimension(fast)), 0), min(math.ceil(dimension(slow)), head_dim - 1)
    found = []
    for j in range(head_dim // 2):
        divided = min(max((j - first) / (last - first), 0.0), 1.0)
        found.append(theta ** (-2 * j / head_dim) * ((1 - divided) + divided / factor))
    return found


def longrope_frequencies(head_dim: int, theta: float, factors: list[float]) -> list[float]:
    """Each frequency is divided by a factor of its own."""
    return [theta ** (-2 * j / head_dim) / factor for j, factor in enumerate(factors)]
