"""Times `transformers` for bench_offline.py: run by an interpreter with torch and transformers.

    PYTHON scripts/bench_reference.py FOLDER REQUESTS.json THREADS [--continuous-batching]

FOLDER: a Hugging Face model; one that has no weights gets random ones. On a GPU where there is one, in the dtype of
config.json there and in float32 on a CPU. REQUESTS.json: [[token ids, tokens to generate], ...], for generate all of
one length; for continuous batching all generate as many. Prints one JSON line.
"""

import argparse
import json
import pathlib
import time

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

Requests = list[tuple[list[int], int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("requests", type=pathlib.Path)
    parser.add_argument("threads", type=int)
    parser.add_argument("--continuous-batching", action="store_true")
    arguments = parser.parse_args()
    requests = json.loads(arguments.requests.read_text())
    torch.set_num_threads(arguments.threads)
    model = open_model(arguments.folder)
    run = continuous_batching if arguments.continuous_batching else generate
    run(model, requests if arguments.continuous_batching else [(ids[:8], 2) for ids, _ in requests])
    num_generated, wall_s = run(model, requests)
    assert num_generated == sum(count for _, count in requests), f"{num_generated} tokens came of {arguments.requests}"
    print(
        json.dumps(
            {
                "what": run.__name__,
                "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
                "dtype": str(model.dtype).removeprefix("torch."),
                "wall_s": round(wall_s, 3),
                "output_tok_s": round(num_generated / wall_s, 3),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            }
        )
    )


def open_model(folder: pathlib.Path) -> torch.nn.Module:
    """The model, ready to run."""
    is_on_gpu = torch.cuda.is_available()
    dtype = "auto" if is_on_gpu else torch.float32
    if any(folder.glob("*.safetensors")):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    else:
        config = transformers.AutoConfig.from_pretrained(folder)
        dtype = config.dtype if is_on_gpu else torch.float32
        with torch.device("cuda" if is_on_gpu else "cpu"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.to("cuda" if is_on_gpu else "cpu").eval()


def generate(model: torch.nn.Module, requests: Requests) -> tuple[int, float]:
    """Runs them as one batch that begins and ends together; tokens generated, seconds."""
    count = requests[0][1]
    ids = torch.tensor([ids for ids, _ in requests], device=model.device)
    arguments = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    started = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
    num_generated = (out.shape[1] - ids.shape[1]) * out.shape[0]
    return num_generated, time.perf_counter() - started


def continuous_batching(model: torch.nn.Module, requests: Requests) -> tuple[int, float]:
    """Runs them through the paged cache and scheduler of transformers, which stay for later runs; tokens generated,
    seconds from the first request's making to the last one's end, for stopping the thread takes seconds more."""
    counts = {count for _, count in requests}
    assert len(counts) == 1, f"all requests must generate as many tokens, not {sorted(counts)}"
    config = transformers.GenerationConfig(
        max_new_tokens=counts.pop(), do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    prompts = [ids for ids, _ in requests]
    outputs = model.generate_batch(prompts, generation_config=config, progress_bar=False, persistent_manager=True)
    failed = {output.error for output in outputs.values()} - {None}
    assert not failed and len(outputs) == len(requests), (
        f"of {len(requests)} requests {len(outputs)} came back: {failed}"
    )
    started, ended = min(x.created_time for x in outputs.values()), max(x.lifespan[1] for x in outputs.values())
    return sum(len(output.generated_tokens) for output in outputs.values()), ended - started


if __name__ == "__main__":
    main()
