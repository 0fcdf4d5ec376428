"""Images of a prompt on their way to the engine: patches as base64 of float32, and where their tokens stand."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ferrum_jax.prompt import EncodableImage, MediaSpan
from ferrum_jax.vision.image import ProcessedImage


def wire_images(images: Sequence[EncodableImage], media: Sequence[MediaSpan]) -> dict[str, Any]:
    """What is sent of a prompt's images, as options of its request; nothing where there are none."""
    if not images:
        return {}
    return {
        "images": [
            [
                base64.b64encode(np.ascontiguousarray(image.patches, "<f4").tobytes()).decode(),
                list(image.grid),
                image.num_tokens,
                image.digest.hex(),
            ]
            for image in images
        ],
        "media": [[span.digest.hex(), span.start, span.length] for span in media],
    }


def with_images(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as they came, with images and media in place of what was sent of them."""
    if "images" not in options:
        return dict(options)
    images = [_image(*sent) for sent in options["images"]]
    media = [
        MediaSpan(kind="image", digest=bytes.fromhex(digest), start=start, length=length)
        for digest, start, length in options["media"]
    ]
    return {**options, "images": images, "media": media}


def _image(content: str, grid: Sequence[int], num_tokens: int, digest: str) -> ProcessedImage:
    frames, rows, columns = grid
    values = np.frombuffer(base64.b64decode(content), "<f4").astype(np.float32)
    return ProcessedImage(
        patches=values.reshape(frames * rows * columns, -1),
        grid=(frames, rows, columns),
        num_tokens=num_tokens,
        digest=bytes.fromhex(digest),
    )
