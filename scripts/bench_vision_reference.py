"""Times `transformers` for bench_vision.py: run by an interpreter with torch and transformers.

    PYTHON scripts/bench_vision_reference.py FOLDER THREADS

FOLDER: has the config.json of a Qwen3-VL, gets random weights in float32, and has prompt.npz: prompt [T] and grids
[images, 3] int32, patches [patches, values] float32. Each line that is read is answered by one of JSON: the seconds of
the tower alone and of the whole prompt up to its last logits, by the clock and of the CPU; the logits are written to
FOLDER/reference.npz.
"""

import json
import pathlib
import sys
import time

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]


def main() -> None:
    folder, threads = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.Qwen3VLForConditionalGeneration._from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    given = np.load(folder / "prompt.npz")
    ids = torch.from_numpy(given["prompt"]).long()[None]
    grids, patches = torch.from_numpy(given["grids"]).long(), torch.from_numpy(given["patches"])
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "reference_attention": config._attn_implementation,
        "parameters": sum(weight.numel() for weight in model.parameters()),
    }
    print(json.dumps(versions), flush=True)
    for _ in sys.stdin:
        with torch.inference_mode():
            started = _clocks()
            model.model.visual(patches, grid_thw=grids)
            seen = _clocks()
            logits = model(
                input_ids=ids,
                mm_token_type_ids=(ids == config.image_token_id).int(),
                pixel_values=patches,
                image_grid_thw=grids,
                logits_to_keep=1,
            ).logits
            done = _clocks()
        np.savez(folder / "reference.npz", logprobs=torch.log_softmax(logits[0, -1], dim=-1).numpy())
        tower, prompt = seen - started, done - seen
        said = {"tower_s": tower[0], "tower_cpu_s": tower[1], "prompt_s": prompt[0], "prompt_cpu_s": prompt[1]}
        print(json.dumps(said), flush=True)


def _clocks() -> np.ndarray:
    """Seconds by the clock, and of the CPU in all threads."""
    return np.array([time.perf_counter(), time.process_time()])


if __name__ == "__main__":
    main()
