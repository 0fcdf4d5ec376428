"""Pictures that image goldens are made of: the same bytes wherever they are drawn."""

import numpy as np


def picture(height: int, width: int, seed: int) -> np.ndarray:
    """uint8 [height, width, 3]: waves, edges and noise, so that every filter has something to do."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    steps = random.integers(3, 30, (3, 2))
    waves = [(x // a + y // b) % 2 * 120 + (x * a + y * b) % 97 for a, b in steps]
    noise = random.integers(0, 40, (height, width, 3))
    return (np.stack(waves, axis=2) + noise).clip(0, 255).astype(np.uint8)


def sampled(values: np.ndarray, count: int = 1500) -> np.ndarray:
    """Up to `count` values at places that depend on the size alone."""
    flat = values.reshape(-1)
    return flat if len(flat) <= count else flat[np.random.default_rng(flat.size).integers(0, flat.size, count)]
