"""Makes tests/goldens/images/: what the Pillow processors of transformers make of pictures and of prompts with images.

    python -m scripts.make_image_goldens [--out tests/goldens/images]

Needs torch, transformers and Pillow (made with transformers 5.23, Pillow 13); the tests need Pillow alone.
`cases.json` has for each case the processor's file, the picture's size and the grid; `pixels.npz` has its values:

    patches_NAME float32, those that `sampled` takes of [t * h * w, values]; of Gemma 3 [crops, 3, H, W], of
    Mistral 3 [1, 3, H, W]
    ids_FAMILY_I int32, a prompt's ids by its processor    positions_I int32 [3, T], by get_rope_index of Qwen3-VL

`tokenizer.json` is a small one with the special tokens of all families.
"""

import argparse
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np

from scripts.goldens.pictures import picture, sampled

_READ = json.loads((Path(__file__).parent / "goldens" / "image_processors.json").read_text())
QWEN2, QWEN3, GEMMA, GEMMA4, GLM, PIXTRAL = (
    _READ["settings"][name] for name in ("qwen2", "qwen3", "gemma", "gemma4", "glm", "pixtral")
)
# of each: sizes of images, and a text with their placeholders
QWEN_PROMPTS, GEMMA_PROMPTS, GEMMA4_PROMPTS, GLM_PROMPTS, PIXTRAL_PROMPTS = (
    _READ["prompts"][name] for name in ("qwen", "gemma", "gemma4", "glm", "pixtral")
)
SMALL = {**QWEN3, "size": {"longest_edge": 128 * 128, "shortest_edge": 64 * 64}}
SMALL_GLM = {**GLM, "size": {"shortest_edge": 64 * 64, "longest_edge": 128 * 128}}
PATCH = 16  # of its tower, which merges 2 x 2
NARROW = {**PIXTRAL, "size": {"longest_edge": 160}}
SCANNED = {**GEMMA, "do_pan_and_scan": True, "size": {"height": 112, "width": 112}, "image_seq_length": 4}

CASES: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "qwen2": (QWEN2, (120, 201)),
    "qwen3": (QWEN3, (300, 411)),
    "qwen3_grown": (QWEN3, (40, 33)),
    "small_shrunk": (SMALL, (500, 333)),
    "small_long": (SMALL, (13, 1000)),
    "small_equal": (SMALL, (96, 64)),
    "small_half": (SMALL, (80, 112)),  # halves of a unit, which are rounded to even
    "gemma": (GEMMA, (200, 333)),
    "gemma_scan_wide": (SCANNED, (300, 801)),
    "gemma_scan_tall": (SCANNED, (1301, 300)),
    "gemma_scan_narrow": (SCANNED, (200, 900)),  # crops would be too small
    "gemma_scan_square": (SCANNED, (300, 310)),
    "gemma4": (GEMMA4, (200, 333)),
    "gemma4_shrunk": (GEMMA4, (700, 411)),
    "gemma4_tall": (GEMMA4, (1900, 9)),
    "glm": (GLM, (300, 411)),
    "glm_grown": (GLM, (40, 33)),
    "glm_shrunk": (SMALL_GLM, (500, 333)),
    "glm_short": (SMALL_GLM, (13, 400)),  # less than a merged patch
    "glm_half": (SMALL_GLM, (70, 98)),  # halves of a unit, which are rounded to even
    "pixtral": (PIXTRAL, (200, 333)),
    "pixtral_shrunk": (NARROW, (500, 333)),
    "pixtral_long": (NARROW, (13, 1000)),
    "pixtral_equal": (NARROW, (96, 64)),
}
SPECIAL = (
    *("<pad>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>"),
    *("<image_soft_token>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
    *("<|video_pad|>", "<|image>", "<|image|>", "<image|>"),
    *("[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<|begin_of_image|>", "<|end_of_image|>"),
    "<|video|>",
)


def tokenizer_file(path: Path) -> None:
    """A byte-level tokenizer whose line breaks join into tokens of two and three, as published ones do."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    merges = [("Ċ", "Ċ"), ("ĊĊ", "Ċ"), ("ĊĊ", "ĊĊ"), ("Ġ", "a"), ("Ġ", "c"), ("h", "e"), ("i", "s"), ("Ġ", "is")]
    for pair in merges:
        vocabulary["".join(pair)] = len(vocabulary)
    library = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    library.save(str(path))


def reference(settings: dict[str, Any]) -> Any:
    """The Pillow processor of transformers for a file's settings, with the defaults of Gemma's processor."""
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil  # pyright: ignore[reportMissingImports]
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor  # pyright: ignore[reportMissingImports]
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil  # pyright: ignore[reportMissingImports]
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil  # pyright: ignore[reportMissingImports]
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil  # pyright: ignore[reportMissingImports]
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil  # pyright: ignore[reportMissingImports]

    given = {name: value for name, value in settings.items() if not name.endswith(("_type", "_class"))}
    if settings["image_processor_type"].startswith("Gemma4"):
        return Gemma4ImageProcessorPil(**given)
    if settings["image_processor_type"].startswith("Glm"):
        return Glm4vImageProcessorPil(**given)
    if settings["image_processor_type"].startswith("Pixtral"):  # its processor of prompts says the unit of a size
        return PixtralImageProcessorPil(**given | {"patch_size": {"height": 2 * PATCH, "width": 2 * PATCH}})
    if settings["image_processor_type"].startswith("Qwen"):
        return Qwen2VLImageProcessorPil(**given)
    given.pop("image_seq_length", None)
    defaults = {name: value for name, value in Gemma3Processor.images_kwargs.items() if given.get(name) is None}
    return Gemma3ImageProcessorPil(**given | defaults)


def images_of(sizes: list[tuple[int, int]]) -> list[np.ndarray]:
    return [picture(height, width, seed) for seed, (height, width) in enumerate(sizes)]


def processed(name: str) -> tuple[np.ndarray, list[int]]:
    """The reference's values of a case's picture, and the grid in patches."""
    settings, size = CASES[name]
    found = reference(settings)(picture(*size, 0), input_data_format="channels_last", return_tensors="np")
    values = np.asarray(found["pixel_values"], np.float32)
    if "image_position_ids" in found:
        places = np.asarray(found["image_position_ids"])[0]
        real = places[:, 0] >= 0
        _, rows, columns = grid = [1, *(int(n) for n in places[real].max(axis=0)[::-1] + 1)]
        return values[0][real].reshape(rows, columns, -1), grid
    if "image_grid_thw" in found:
        return values, [int(n) for n in found["image_grid_thw"][0]]
    patch = PATCH if "image_sizes" in found else 14
    return values, [len(values), values.shape[2] // patch, values.shape[3] // patch]


def _pixtral_processor() -> Any:
    """Without what would want a tokenizer, and with what it takes of torchvision's processor from Pillow's."""
    from transformers.models.pixtral import image_processing_pil_pixtral  # pyright: ignore[reportMissingImports]

    sys.modules.setdefault("transformers.models.pixtral.image_processing_pixtral", image_processing_pil_pixtral)
    from transformers.models.pixtral.processing_pixtral import PixtralProcessor  # pyright: ignore[reportMissingImports]

    return object.__new__(PixtralProcessor)


def _with_images(processor: Any, sizes: list[tuple[int, int]], text: str) -> tuple[str, Any]:
    """A prompt with the tokens of its images, and what the processor made of these."""
    found = processor.image_processor(images_of(sizes), input_data_format="channels_last", return_tensors="np")
    replaced = [processor.replace_image_token(found, index) for index in range(len(sizes))]
    texts, _ = processor.get_text_with_replacements([text], images_replacements=replaced)
    return texts[0], found


def prompts(folder: Path) -> dict[str, np.ndarray]:
    """Ids of prompts by all families' processors, and Qwen's positions."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import PreTrainedTokenizerFast  # pyright: ignore[reportMissingImports]
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor  # pyright: ignore[reportMissingImports]
    from transformers.models.gemma4.processing_gemma4 import Gemma4Processor  # pyright: ignore[reportMissingImports]
    from transformers.models.glm4v.processing_glm4v import Glm4vProcessor  # pyright: ignore[reportMissingImports]
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel  # pyright: ignore[reportMissingImports]
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor  # pyright: ignore[reportMissingImports]

    special = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    file = str(folder / "tokenizer.json")
    gemma_tokenizer = PreTrainedTokenizerFast(tokenizer_file=file, extra_special_tokens=special)
    gemma = Gemma3Processor(reference(SCANNED), gemma_tokenizer, image_seq_length=4)
    arrays = {}
    for i, (sizes, text) in enumerate(GEMMA_PROMPTS):
        given = {"images": [images_of(sizes)], "do_pan_and_scan": True, "input_data_format": "channels_last"}
        arrays[f"ids_gemma3_{i}"] = gemma(text=[text], **given)["input_ids"][0]
    gemma4 = Gemma4Processor.__new__(Gemma4Processor)  # likewise
    gemma4.image_processor, gemma4.image_token = reference(GEMMA4), "<|image|>"
    gemma4.boi_token, gemma4.eoi_token = "<|image>", "<image|>"
    glm = Glm4vProcessor.__new__(Glm4vProcessor)  # likewise
    glm.image_processor, glm.image_token = reference(SMALL_GLM), "<|image|>"
    pixtral = _pixtral_processor()
    pixtral.image_processor, pixtral.patch_size, pixtral.spatial_merge_size = reference(NARROW), PATCH, 2
    pixtral.image_token, pixtral.image_break_token, pixtral.image_end_token = "[IMG]", "[IMG_BREAK]", "[IMG_END]"
    families = ("gemma4", gemma4, GEMMA4_PROMPTS), ("glm", glm, GLM_PROMPTS), ("pixtral", pixtral, PIXTRAL_PROMPTS)
    for name, processor, asked in families:
        for i, (sizes, text) in enumerate(asked):
            arrays[f"ids_{name}_{i}"] = gemma_tokenizer(_with_images(processor, sizes, text)[0])["input_ids"]
    qwen = Qwen3VLProcessor.__new__(Qwen3VLProcessor)  # a whole one wants torchvision, for videos
    qwen.image_processor, qwen.image_token = reference(SMALL), "<|image_pad|>"
    qwen_tokenizer = PreTrainedTokenizerFast(tokenizer_file=file)
    model = types.SimpleNamespace(
        config=types.SimpleNamespace(vision_config=types.SimpleNamespace(spatial_merge_size=2)),
        get_vision_position_ids=lambda *a, **k: Qwen3VLModel.get_vision_position_ids(model, *a, **k),  # type: ignore[arg-type]
    )
    for i, (sizes, text) in enumerate(QWEN_PROMPTS):
        written, found = _with_images(qwen, sizes, text)
        ids = np.array(qwen_tokenizer(written)["input_ids"])
        kinds = (ids == qwen_tokenizer.convert_tokens_to_ids("<|image_pad|>")).astype(np.int32)
        grids = torch.tensor(np.asarray(found["image_grid_thw"]))
        positions, _ = Qwen3VLModel.get_rope_index(
            model,  # type: ignore[arg-type]
            torch.tensor(ids)[None],
            torch.tensor(kinds)[None],
            image_grid_thw=grids,
        )
        arrays |= {f"ids_qwen_{i}": ids, f"positions_{i}": positions[:, 0].numpy()}
    return {name: np.asarray(value, np.int32) for name, value in arrays.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("tests/goldens/images"))
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer_file(folder / "tokenizer.json")
    cases, arrays = {}, prompts(folder)
    for name, (settings, size) in CASES.items():
        values, grid = processed(name)
        cases[name] = {"settings": settings, "size": size, "grid": grid}
        arrays[f"patches_{name}"] = sampled(values)
    (folder / "cases.json").write_text(json.dumps(cases, indent=1) + "\n")
    np.savez_compressed(folder / "pixels.npz", allow_pickle=False, **arrays)


if __name__ == "__main__":
    main()
