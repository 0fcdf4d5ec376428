"""Times `transformers` for bench_encoder.py: run by an interpreter with torch and transformers.

    PYTHON scripts/bench_encoder_reference.py FOLDER TEXTS.json THREADS

FOLDER: has the config.json of an encoder, and gets random weights. TEXTS: [[token ids], ...]. They run from the longest
to the shortest, 32 at a time, padded to the longest of their batch, in float32 and under the mean of their tokens, as
sentence-transformers does it. Writes FOLDER/reference.npy, [texts, D] float32, and prints the seconds as JSON.
"""

import json
import pathlib
import sys
import time

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

BATCH = 32


def main() -> None:
    folder, texts, threads = pathlib.Path(sys.argv[1]), json.loads(pathlib.Path(sys.argv[2]).read_text()), sys.argv[3]
    torch.set_num_threads(int(threads))
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(folder), dtype=torch.float32)
    model.eval().save_pretrained(folder)
    embed(model, texts)  # memory is taken
    started = time.perf_counter()
    vectors = embed(model, texts)
    wall_s = time.perf_counter() - started
    np.save(folder / "reference.npy", vectors)
    print(json.dumps({"wall_s": wall_s, "torch": torch.__version__, "transformers": transformers.__version__}))


def embed(model: torch.nn.Module, texts: list[list[int]]) -> np.ndarray:
    """[texts, D] float32, in the order of the texts."""
    order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
    found: dict[int, np.ndarray] = {}
    for begin in range(0, len(order), BATCH):
        members = order[begin : begin + BATCH]
        width = len(texts[members[0]])
        ids = torch.tensor([texts[i] + [0] * (width - len(texts[i])) for i in members])
        mask = torch.tensor([[1] * len(texts[i]) + [0] * (width - len(texts[i])) for i in members])
        with torch.inference_mode():
            states = model(input_ids=ids, attention_mask=mask).last_hidden_state
        pooled = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        found |= dict(zip(members, pooled.numpy(), strict=True))
    return np.stack([found[index] for index in range(len(texts))])


if __name__ == "__main__":
    main()
