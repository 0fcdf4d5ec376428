"""Images and clips of a prompt on their way to the engine: base64 of their bytes, and where their tokens stand."""

import base64
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ferrum_jax.inputs.audio.clip import ProcessedClip
from ferrum_jax.inputs.images.image import Normalising, ProcessedImage
from ferrum_jax.inputs.prompt import EncodableImage, MediaSpan

_PLAIN = ("temporal", "grid", "num_tokens", "token_rows", "kind")  # of an image: what JSON holds as it is
_PLAIN_OF_CLIP = ("grid", "num_frames", "num_tokens", "seconds")


def wire_images(images: Sequence[EncodableImage], media: Sequence[MediaSpan]) -> dict[str, Any]:
    """A prompt's images, or its clip, as options of its request; empty without one."""
    if not images:
        return {}
    if isinstance(images[0], ProcessedClip):
        clips = [each for each in images if isinstance(each, ProcessedClip)]
        return {"clips": [_wire_clip(each) for each in clips], "media": _wire_media(media)}
    return {
        "images": [
            [
                base64.b64encode(image.pixels.tobytes()).decode(),
                list(image.pixels.shape),
                dataclasses.asdict(image.normalising),
                image.digest.hex(),
                {name: getattr(image, name) for name in _PLAIN},
            ]
            for image in images
            if isinstance(image, ProcessedImage)
        ],
        "media": _wire_media(media),
    }


def held_bytes(images: Sequence[EncodableImage]) -> int:
    """Bytes of memory that images or clips take until the engine has them."""
    return sum(each.pixels.nbytes if isinstance(each, ProcessedImage) else each.patches.nbytes for each in images)


def _wire_media(media: Sequence[MediaSpan]) -> list[list[Any]]:
    return [[span.kind, span.digest.hex(), span.start, span.length] for span in media]


def _wire_clip(clip: ProcessedClip) -> list[Any]:
    content = base64.b64encode(np.ascontiguousarray(clip.features, "<f4").tobytes()).decode()
    return [content, clip.digest.hex(), {name: getattr(clip, name) for name in _PLAIN_OF_CLIP}]


def _clip(content: str, digest: str, plain: Mapping[str, Any]) -> ProcessedClip:
    features = np.frombuffer(base64.b64decode(content), "<f4").reshape(math.prod(plain["grid"]), -1)
    known = {**plain, "grid": tuple(plain["grid"])}
    return ProcessedClip(features=features, digest=bytes.fromhex(digest), **known)


def with_images(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as they came, with images and media in place of what was sent of them."""
    found = dict(options)
    if "media" not in found:
        return found
    clips = [_clip(*sent) for sent in found.pop("clips", ())]
    found["images"] = clips or [_image(*sent) for sent in found["images"]]
    found["media"] = [
        MediaSpan(kind=kind, digest=bytes.fromhex(digest), start=start, length=length)
        for kind, digest, start, length in found["media"]
    ]
    return found


def _image(
    content: str, shape: Sequence[int], normalising: Mapping[str, Any], digest: str, plain: Mapping[str, Any]
) -> ProcessedImage:
    mean, std = (tuple(normalising[name]) for name in ("mean", "std"))
    return ProcessedImage(
        pixels=np.frombuffer(base64.b64decode(content), np.uint8).reshape(shape),
        normalising=Normalising(scale=normalising["scale"], mean=mean, std=std),
        digest=bytes.fromhex(digest),
        **{**plain, "grid": tuple(plain["grid"])},
    )
