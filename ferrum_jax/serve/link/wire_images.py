"""Images of a prompt on their way to the engine: pixels as base64 of their bytes, and where their tokens stand."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ferrum_jax.prompt import MediaSpan
from ferrum_jax.vision.image import Normalising, ProcessedImage


def wire_images(images: Sequence[ProcessedImage], media: Sequence[MediaSpan]) -> dict[str, Any]:
    """A prompt's images as options of its request; empty without images."""
    if not images:
        return {}
    return {
        "images": [
            [
                base64.b64encode(image.pixels.tobytes()).decode(),
                list(image.pixels.shape),
                image.temporal,
                dataclasses.asdict(image.normalising),
                list(image.grid),
                image.num_tokens,
                image.token_rows,
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


def _image(
    content: str,
    shape: Sequence[int],
    temporal: int,
    normalising: Mapping[str, Any],
    grid: Sequence[int],
    num_tokens: int,
    token_rows: int,
    digest: str,
) -> ProcessedImage:
    frames, rows, columns = grid
    mean, std = (tuple(normalising[name]) for name in ("mean", "std"))
    return ProcessedImage(
        pixels=np.frombuffer(base64.b64decode(content), np.uint8).reshape(shape),
        normalising=Normalising(scale=normalising["scale"], mean=mean, std=std),
        temporal=temporal,
        grid=(frames, rows, columns),
        num_tokens=num_tokens,
        token_rows=token_rows,
        digest=bytes.fromhex(digest),
    )
