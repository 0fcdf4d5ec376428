"""Times vLLM on the prompts of `scripts/gpu/check --with-vllm`: run by an interpreter with vllm.

    PYTHON scripts/bench_vllm.py FOLDER REQUESTS.json

FOLDER: a Hugging Face config.json, whose weights are made at random. REQUESTS.json: {workload: [first, counted]}, both
of [[token ids, tokens to generate], ...]. All run in one engine, and of each the second counts and has a JSON line.
"""

import argparse
import importlib
import json
import pathlib
import time
from typing import Any

Requests = list[tuple[list[int], int]]
MISSING = (
    "vllm is not installed in {0}; python3 -m venv .venv-vllm && .venv-vllm/bin/pip install vllm, and then "
    "--vllm-python .venv-vllm/bin/python"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("requests", type=pathlib.Path)
    arguments = parser.parse_args()
    vllm: Any = importlib.import_module("vllm")
    started = time.perf_counter()
    llm = vllm.LLM(
        model=str(arguments.folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        max_model_len=2048,
        max_num_seqs=64,
    )
    startup_s = time.perf_counter() - started
    for workload, (first, counted) in json.loads(arguments.requests.read_text()).items():
        run(vllm, llm, first)
        line = {"shape": arguments.folder.name, "workload": workload, "vllm": vllm.__version__, "startup_s": startup_s}
        print(json.dumps(line | run(vllm, llm, counted)), flush=True)


def run(vllm: Any, llm: Any, requests: Requests) -> dict[str, float]:
    """Runs the requests to their end, greedily; seconds and tokens a second."""
    params = [
        vllm.SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False)
        for _, count in requests
    ]
    started = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids, _ in requests], params, use_tqdm=False)
    wall_s = time.perf_counter() - started
    generated = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert generated == sum(count for _, count in requests), "a request ended early"
    read = sum(len(ids) for ids, _ in requests)
    return {"wall_s": wall_s, "output_tok_s": generated / wall_s, "total_tok_s": (generated + read) / wall_s}


if __name__ == "__main__":
    main()
