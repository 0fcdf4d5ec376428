"""Times `transformers` generate for bench_offline.py: run by an interpreter with torch and transformers.

    PYTHON scripts/bench_reference.py FOLDER REQUESTS.json THREADS

REQUESTS.json: [[token ids, tokens to generate], ...], all of one length. Prints one JSON line.
"""

import json
import sys
import time

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]


def main() -> None:
    folder, path, threads = sys.argv[1:]
    with open(path) as file:
        requests = json.load(file)
    torch.set_num_threads(int(threads))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([ids for ids, _ in requests])
    count = requests[0][1]

    def generate(ids: torch.Tensor, count: int) -> torch.Tensor:
        arguments = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        return model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)

    with torch.inference_mode():
        generate(ids[:, :8], 2)
        started = time.perf_counter()
        out = generate(ids, count)
        wall_s = time.perf_counter() - started
    assert out.shape[1] == ids.shape[1] + count
    result = {"wall_s": round(wall_s, 3), "output_tok_s": round(len(requests) * count / wall_s, 3)}
    print(json.dumps({**result, "torch": torch.__version__, "transformers": transformers.__version__}))


if __name__ == "__main__":
    main()
