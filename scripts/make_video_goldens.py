"""Makes tests/goldens/videos/: what transformers makes of films, of prompts with them, and what tiny models answer.

    python -m scripts.make_video_goldens [--out tests/goldens/videos]

Needs torch, torchvision and transformers (made with torch 2.13, torchvision 0.29, transformers 5.24); the tests need
none of them. `gemma4/` is a tiny checkpoint whose images may be long; of Qwen those of tests/goldens/vision serve.

    cases.json, frames.npz     of video processors: settings, film, indices, grid; patches_NAME float32, as `sampled`
    resized.npz                film_I uint8 [H, W, 3] and resized_I by torchvision, resample_I Pillow's number
    FAMILY.npz                 ids_I int32, a prompt's; tokens_I int32 [24], greedy; logits_I float32 [V], of the first
                               rope_I int32 [3, T], of Qwen
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from torchvision.transforms.v2 import functional  # pyright: ignore[reportMissingImports]
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil  # pyright: ignore[reportMissingImports]
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor  # pyright: ignore[reportMissingImports]
from transformers.models.gemma4.video_processing_gemma4 import Gemma4VideoProcessor  # pyright: ignore[reportMissingImports]
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil  # pyright: ignore[reportMissingImports]
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor  # pyright: ignore[reportMissingImports]
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor  # pyright: ignore[reportMissingImports]
from transformers.video_utils import VideoMetadata  # pyright: ignore[reportMissingImports]

from scripts.goldens import video_folder
from scripts.goldens.folder import draw
from scripts.goldens.pictures import picture, sampled
from scripts.goldens.recipe import first_seed
from scripts.goldens.reference import MARGIN, load, whole_skeleton
from scripts.goldens.video_folder import FIRST_SPECIAL, SHOWN, WEIGHTS, Shown, film
from scripts.make_vision_goldens import law_of

SEED, NUM_GREEDY = 37, 24
_QWEN = {"video_processor_type": "Qwen3VLVideoProcessor", "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_QWEN |= {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "processor_class": "Qwen3VLProcessor"}
QWEN3 = {**_QWEN, "size": {"longest_edge": 25165824, "shortest_edge": 4096}}
SMALL = {**_QWEN, "size": {"longest_edge": 300_000, "shortest_edge": 60_000}}
CAPPED = {**SMALL, "cap_pixels_per_frame": True, "max_video_tokens": 12, "max_frames": 5}
GEMMA4 = {"video_processor_type": "Gemma4VideoProcessor", "max_soft_tokens": 70, "num_frames": 32}

# Settings of a processor; frames, height, width and frames a second of a film.
CASES: dict[str, tuple[dict[str, Any], tuple[int, int, int, float]]] = {
    "qwen3": (QWEN3, (9, 120, 201, 2.0)),
    "qwen3_two": (QWEN3, (2, 64, 96, 24.0)),
    "qwen3_narrow": (QWEN3, (6, 13, 400, 2.0)),
    "small_shrunk": (SMALL, (40, 300, 211, 4.0)),
    "small_grown": (SMALL, (5, 40, 50, 29.97)),
    "capped": (CAPPED, (33, 250, 120, 3.7)),
    "gemma4": (GEMMA4, (40, 200, 333, 24.0)),
    "gemma4_long": (GEMMA4 | {"num_frames": 5}, (11, 20, 300, 1.0)),
}
RESIZED = [
    ((37, 53), (64, 32)),
    ((120, 80), (120, 31)),
    ((9, 300), (30, 77)),
    ((64, 64), (41, 64)),
    ((301, 23), (7, 5)),
]
# In tokens of the images' tokenizer: texts around a film.
QWEN_TEXT = "<|im_start|>user\n<|vision_start|><|video_pad|><|vision_end|>\n\nWhat is it?<|im_end|>\n"
GEMMA_TEXT = "<start_of_turn>user\n\n<|video|>\nWhat is it?<end_of_turn>\n"


def processor_of(settings: dict[str, Any]) -> Any:
    """The reference's video processor of a file's settings."""
    given = {key: x for key, x in settings.items() if not key.endswith(("_type", "_class"))}
    is_qwen = settings["video_processor_type"] == "Qwen3VLVideoProcessor"
    return (Qwen3VLVideoProcessor if is_qwen else Gemma4VideoProcessor)(**given)


def processed(settings: dict[str, Any], frames: np.ndarray, fps: float) -> dict[str, Any]:
    """What the reference makes of a film; of one with fewer frames than are to be taken, all of them."""
    most = settings.get("num_frames")
    if most is not None and most > len(frames):
        settings = settings | {"num_frames": len(frames)}
    metadata = VideoMetadata(total_num_frames=len(frames), fps=fps)
    given = {"video_metadata": [metadata], "return_metadata": True, "return_tensors": "np"}
    return dict(processor_of(settings)(videos=[frames], input_data_format="channels_last", **given))


def cases() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    said, arrays = {}, {}
    for name, (settings, (count, height, width, fps)) in CASES.items():
        found = processed(settings, film(count, height, width, 0), fps)
        values = np.asarray(found["pixel_values_videos"], np.float32)
        if "video_grid_thw" in found:
            grid = [int(n) for n in found["video_grid_thw"][0]]
        else:
            places = np.asarray(found["video_position_ids"])
            real = places[0, :, 0] >= 0
            grid = [len(values), *(int(n) for n in places[0][real].max(axis=0)[::-1] + 1)]
            values = np.ascontiguousarray(values[:, real])
        indices = np.asarray(found["video_metadata"][0].frames_indices).tolist()[: len(values)]
        said[name] = {"settings": settings, "film": [count, height, width, fps], "indices": indices, "grid": grid}
        arrays[f"patches_{name}"] = sampled(values, 4000)
    return said, arrays


def resized() -> dict[str, np.ndarray]:
    modes = {2: functional.InterpolationMode.BILINEAR, 3: functional.InterpolationMode.BICUBIC}
    arrays = {}
    for i, (before, after) in enumerate(sizes for sizes in RESIZED for _ in modes):
        number = 2 + i % 2
        given = picture(*before, i)
        tensor = torch.from_numpy(given).permute(2, 0, 1)[None].contiguous()
        out = functional.resize(tensor, list(after), interpolation=modes[number], antialias=True)
        arrays |= {
            f"film_{i}": given,
            f"resized_{i}": out[0].permute(1, 2, 0).numpy(),
            f"resample_{i}": np.int32(number),
        }
    return arrays


def words(name: str, images: Any, videos: Any) -> Any:
    """A family's processor of prompts, without what would want more than texts."""
    if name == "gemma4":
        found = Gemma4Processor.__new__(Gemma4Processor)
        found.boi_token, found.eoi_token = "<|image>", "<image|>"
        found.image_token, found.video_token = "<|image|>", "<|video|>"
    else:
        found = Qwen3VLProcessor.__new__(Qwen3VLProcessor)
        found.image_token, found.video_token = "<|image_pad|>", "<|video_pad|>"
        found.vision_start_token, found.vision_end_token = "<|vision_start|>", "<|vision_end|>"
    found.image_processor, found.video_processor = images, videos
    return found


def ids_of_texts(tokenizer: Path) -> dict[str, np.ndarray]:
    """Ids of prompts whose time stamps meet a tokenizer that joins characters."""
    library = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer))
    arrays = {}
    for family, text, case in (("qwen", QWEN_TEXT, "qwen3"), ("gemma4", GEMMA_TEXT, "gemma4_long")):
        settings, (count, height, width, fps) = CASES[case]
        found = processed(settings, film(count, height, width, 0), fps)
        how = words("gemma4" if family == "gemma4" else "qwen3_vl", None, processor_of(settings))
        replaced = [how.replace_video_token(found, 0)]
        (whole,), _ = how.get_text_with_replacements([text], videos_replacements=replaced)
        arrays[f"ids_{family}"] = np.asarray(library(whole)["input_ids"], np.int32)
    return arrays


def inputs_of(name: str, shown: Shown, tokenizer: Any) -> dict[str, torch.Tensor]:
    """What the reference's model is given for a prompt."""
    is_gemma = name == "gemma4"
    settings = video_folder.GEMMA_VIDEOS if is_gemma else video_folder.QWEN_VIDEOS
    of_images = video_folder.GEMMA_IMAGES if is_gemma else video_folder.QWEN_IMAGES
    own = {key: x for key, x in of_images.items() if not key.endswith("_type")}
    images = (Gemma4ImageProcessorPil if is_gemma else Qwen2VLImageProcessorPil)(**own)
    how = words(name, images, processor_of(settings))
    films = [
        processed(settings, frames, sizes[3])
        for frames, sizes in zip(video_folder.films_of(shown), shown.films, strict=True)
    ]
    inputs: dict[str, Any] = {}
    replaced = []
    if shown.images:
        found = images(video_folder.images_of(shown), input_data_format="channels_last", return_tensors="np")
        replaced = [how.replace_image_token(found, i) for i in range(len(shown.images))]
        for key in ("pixel_values", "image_grid_thw", "image_position_ids"):
            inputs |= {key: torch.as_tensor(np.asarray(found[key]))} if key in found else {}
    for key in ("pixel_values_videos", "video_grid_thw", "video_position_ids", "num_frames_per_video"):
        if films and key in films[0]:
            inputs[key] = torch.as_tensor(np.concatenate([np.asarray(each[key]) for each in films]))
    of_films = [how.replace_video_token(each, 0) for each in films]
    (text,), _ = how.get_text_with_replacements(
        [shown.text_for(name)], images_replacements=replaced, videos_replacements=of_films
    )
    return {"input_ids": torch.tensor(tokenizer.encode(text).ids)[None], **inputs}


def _answered(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[np.ndarray, np.ndarray] | None:
    """Greedy tokens, none special, and the first logits; None where two logits nearly tie."""
    given, found, first = dict(inputs), [], None
    for _ in range(NUM_GREEDY):
        ids = given["input_ids"]
        kinds = (ids == FIRST_SPECIAL).int() + 2 * (ids == FIRST_SPECIAL + 1).int()
        with torch.no_grad():
            logits = model(**given, mm_token_type_ids=kinds, use_cache=False).logits[0, -1]
        first = logits.numpy() if first is None else first
        top = torch.topk(logits[:FIRST_SPECIAL], 2)
        if top.values[0] - top.values[1] < MARGIN * top.values.abs().max():
            return None
        found.append(int(top.indices[0]))
        given["input_ids"] = torch.cat([ids, top.indices[None, :1]], dim=1)
    assert first is not None
    return np.array(found, np.int32), first


def answers(name: str, model: Any, tokenizer: Any) -> dict[str, np.ndarray] | None:
    arrays: dict[str, np.ndarray] = {}
    for i, shown in enumerate(SHOWN[name]):
        inputs = inputs_of(name, shown, tokenizer)
        if (said := _answered(model, inputs)) is None:
            return None
        ids = inputs["input_ids"]
        arrays |= {f"ids_{i}": ids[0].numpy().astype(np.int32), f"tokens_{i}": said[0], f"logits_{i}": said[1]}
        if "video_grid_thw" in inputs:
            kinds = (ids == FIRST_SPECIAL).int() + 2 * (ids == FIRST_SPECIAL + 1).int()
            grids = [inputs.get("image_grid_thw"), inputs["video_grid_thw"]]
            rope, _ = model.model.get_rope_index(ids, kinds, *grids)
            arrays[f"rope_{i}"] = rope[:, 0].numpy().astype(np.int32)
    return arrays


def make_model(name: str, out: Path) -> None:
    """FAMILY.npz, and of Gemma 4 the checkpoint, of the first seed for which no token depends on rounding."""
    from tokenizers import Tokenizer  # pyright: ignore[reportMissingImports]

    video_folder.write_tokenizer(out / "characters.json", name)
    tokenizer = Tokenizer.from_file(str(out / "characters.json"))
    (out / "characters.json").unlink()
    folder = out.parent / WEIGHTS[name]
    like = whole_skeleton(folder)
    if name != "gemma4":
        found = answers(name, load(like, folder, lambda tensors: tensors), tokenizer)
        assert found is not None, f"{name} has tokens that depend on rounding; change its prompts"
    else:
        draw(like, folder, SEED, law_of(like))
        found = first_seed(folder, SEED, lambda: answers(name, load(like, folder, lambda x: x), tokenizer))
    np.savez_compressed(out / f"{name}.npz", allow_pickle=False, **found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("tests/goldens/videos"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    said, arrays = cases()
    (out / "cases.json").write_text(json.dumps(said, indent=1) + "\n")
    arrays |= ids_of_texts(out.parent / "images" / "tokenizer.json")
    np.savez_compressed(out / "frames.npz", allow_pickle=False, **arrays)
    np.savez_compressed(out / "resized.npz", allow_pickle=False, **resized())
    for name in SHOWN:
        make_model(name, out)


if __name__ == "__main__":
    main()
