"""Makes the files that users keep, with the version that is imported, and packs each into FOLDER/NAME.tar.xz.

    PYTHONPATH=CHECKOUT python tests/published_files/make.py FOLDER SCRATCH

CHECKOUT: a checkout of the version. SCRATCH: an empty folder, whose path reports and executables of bundles hold.
Needs a CPU alone. What is made is kept as it was written, but for three things: a worker's machine is made nameless,
so that every later machine is another one; a bundle loses its largest parts; and `whole.sha256` is added to the job.
"""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIZES = "--max-num-batched-tokens 64 --max-model-len 256 --num-blocks 80 --block-size 16 --invariant"
KEPT = "--compilation-cache-dir executables"
MAX_PART_BYTES = 17_000  # of a bundle's parts
PREFIX = [6 + 7 * i % 140 for i in range(40)]


def begun(command: str) -> subprocess.Popen[str]:
    """A command of ferrum-jax, in a group of processes of its own."""
    words = [sys.executable, "-m", "ferrum_jax", *command.split()]
    return subprocess.Popen(words, stderr=subprocess.PIPE, text=True, start_new_session=True)


def kill(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def run(command: str, code: int = 0) -> None:
    process = begun(command)
    said = process.communicate()[1]
    assert process.returncode == code, said


def write_rows(name: str, rows: list[dict[str, Any]]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def batch(folder: str, model: str, sizes: str) -> str:
    files = f"--input {folder}/in.jsonl --output {folder}/out.jsonl --lease-expiry 1"
    return f"batch --model {model} --served-model-name tiny {files} {sizes} {KEPT}"


def make_job() -> None:
    """1,500 rows, killed once 257 are recorded: a row at a time, so that the next records hold few."""
    rows = [{"custom_id": f"row-{i}", "prompt_token_ids": [7, 8, 6 + i % 290, 6 + i // 290]} for i in range(1500)]
    write_rows("job/in.jsonl", [row | {"max_tokens": 2, "temperature": 0.8 * (i % 2)} for i, row in enumerate(rows)])
    process = begun(batch("job", "qwen3", f"--max-num-seqs 1 {SIZES}"))
    segments = Path("job/out.jsonl.journal/segments")
    while sum(path.read_bytes().count(b"\n") for path in segments.glob("[!.]*")) < 257:
        assert process.poll() is None
        time.sleep(0.01)
    kill(process)
    shutil.copytree("job", "continued")
    run(batch("continued", "qwen3", f"--max-num-seqs 4 {SIZES}"))
    Path("job/whole.sha256").write_text(hashlib.sha256(Path("continued/out.jsonl").read_bytes()).hexdigest())


def make_ended_jobs() -> None:
    """A job of each kind of row that a small decoder answers, and one of vectors of an encoder; for `verify`."""
    message = [{"role": "user", "content": "The sea"}]
    asked = [{"prompt": "Once upon", "n": 2}, {"messages": message}, {"input": "The sea"}, {"prompt": "a", "n": 0}]
    asked += [{"prompt": "a", "structured_outputs": {"regex": "(ab|c){2,3}"}}, {"prompt": ["a", "b"], "echo": True}]
    write_rows("ended/in.jsonl", [{"custom_id": str(i), **row, "seed": i} for i, row in enumerate(asked)])
    run(batch("ended", "qwen3", f"--max-num-seqs 4 {SIZES}"), code=1)  # the row with n = 0 is an error line
    write_rows("vectors/in.jsonl", [{"custom_id": str(i), "input": [5 + i, 6, 7]} for i in range(3)])
    run(batch("vectors", "bert", "--max-num-seqs 8 --max-num-batched-tokens 128 --max-model-len 64"))


def make_batches() -> None:
    """The folder of a server that was killed: a batch has ended, one is in progress and one is not begun."""
    import openai

    words = f"serve --model qwen3 --served-model-name tiny --port 0 --batches batches --max-num-seqs 4 {SIZES} {KEPT}"
    process = begun(words)
    url = next(line.split(" at ")[1].split("/v1 ")[0] for line in process.stderr or () if " at http" in line)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")

    def begin(count: int, max_tokens: int) -> str:
        body = {"model": "tiny", "prompt": "The sea", "max_tokens": max_tokens, "ignore_eos": True}
        rows = [{"custom_id": f"row-{i}", "body": body | {"seed": i}} for i in range(count)]
        write_rows("rows.jsonl", [{**row, "method": "POST", "url": "/v1/completions"} for row in rows])
        file = client.files.create(file=("rows.jsonl", Path("rows.jsonl").read_bytes()), purpose="batch")
        asked = {"endpoint": "/v1/completions", "completion_window": "24h", "metadata": {"rows": str(count)}}
        return client.batches.create(input_file_id=file.id, **asked).id

    def wait(batch: str, is_there: Callable[[Any], bool]) -> None:
        while not is_there(client.batches.retrieve(batch)):
            time.sleep(0.02)

    wait(begin(3, 4), lambda found: found.status == "completed")
    wait(running := begin(24, 100), lambda found: found.status == "in_progress")
    begin(5, 4)
    wait(running, lambda found: found.request_counts.completed >= 8)
    kill(process)


def make_of_engines() -> None:
    """Prefixes of two models, and a log of requests."""
    from ferrum_jax import LLM, SamplingParams
    from tests.support import INVARIANT

    models = {"qwen3": {"request_log": "checked/requests.jsonl"}, "kimi_linear": {"return_routed_experts": True}}
    for name, more in models.items():
        llm = LLM(name, dataclasses.replace(INVARIANT, **more))
        (found,) = llm.generate([PREFIX], SamplingParams(max_tokens=4, temperature=0.0), progress=False)
        llm.save_prefix_cache(f"prefixes/{name}")
        Path(f"prefixes/{name}.json").write_text(json.dumps({"prompt": PREFIX, "tokens": found.outputs[0].token_ids}))


def verdict_in(folder: Path) -> tuple[Any, str, Any]:
    """A store of verdicts of a check, whose key no machine has; the name of an entry, and what is found of it."""
    from ferrum_jax.runtime.compile.verdicts import Verdict, VerdictKey, VerdictStore, entry_of

    key = VerdictKey(chip="none", jax="none", compiler="none", kernels="none")
    tiles = {"tile_q": 16, "tile_kv": 128}
    found = Verdict(implementation="mosaic_tpu", device_kind="TPU v6 lite", speed=1.5, tiles=tiles)
    return VerdictStore(str(folder / "executables"), key), entry_of("paged_attention", "bfloat16", "shape"), found


def pack(name: str, target: Path) -> None:
    for path in Path(name).rglob("*.beat"):
        path.write_text(re.sub(r'"place": "[^"]*"', '"place": "another machine"', path.read_text()))
    shutil.make_archive(str(target / name), "xztar", ".", name, owner="root", group="root")


def main(target: Path, scratch: Path) -> None:
    from tests.golden_table import GOLDENS

    target.mkdir(exist_ok=True)
    os.chdir(scratch)
    for golden in ("qwen3", "kimi_linear", "quantised/w4a16", "encoders/bert"):
        shutil.copytree(GOLDENS / golden, Path(golden).name)
    for name in ("job", "ended", "vectors", "prefixes", "checked"):
        os.mkdir(name)
    make_job()
    make_ended_jobs()
    make_batches()
    make_of_engines()
    verdicts, entry, found = verdict_in(Path("checked"))
    verdicts.keep({entry: found})
    run(f"compile --model qwen3 --target cpu --out bundle --max-num-seqs 4 {SIZES}")
    for part in Path("bundle/parts").iterdir():
        if part.stat().st_size > MAX_PART_BYTES:
            part.unlink()
    run("convert --hf w4a16 --out orbax")
    for name in ("job", "ended", "vectors", "batches", "prefixes", "checked", "bundle", "orbax"):
        pack(name, target)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), Path(sys.argv[2]))
