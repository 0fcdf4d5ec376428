"""Every command over every kind of model: each either works, or refuses with one clear sentence."""

import json
import shutil
from pathlib import Path

import pytest

from ferrum_jax.__main__ import main
from tests.rows import rows_beside
from tests.support import COMPILED, GOLDENS

# those of `SMALL`, whose executables are there already; an encoder's are those of tests/embeddings/test_embed.py
ENGINE = "--max-num-seqs 4 --max-num-batched-tokens 16 --max-model-len 256 --num-blocks 80 --block-size 16"
ENCODER = "--max-num-seqs 8 --max-num-batched-tokens 128 --max-model-len 64"
TOKENS = list(range(5, 45)) * 2  # long enough for tables of the whole width
NO_POOLS = "is an encoder, and has none of the pools that would be planned"
GENERATES_NOTHING = "BertModel is an encoder and generates nothing; ask it for vectors: LLM.embed, `ferrum-jax embed`"

COMMANDS = rows_beside(__file__)["commands"]
KINDS = ("generating", "recurrent", "generating, of vectors", "encoder")
# what an encoder refuses, with the exit code; the other kinds of model do all
REFUSED = {
    "generate": (2, GENERATES_NOTHING),
    "batch": (1, GENERATES_NOTHING),
    "batch --plan": (2, NO_POOLS),
    "cache save": (2, GENERATES_NOTHING),
    "cache load": (2, GENERATES_NOTHING),
    "bench": (2, GENERATES_NOTHING),
}


def is_slow(kind: str, command: str) -> bool:
    """Whether it compiles what no other test of the fast suite has compiled."""
    if kind == "encoder" or command in ("batch --plan", "convert"):
        return kind == "encoder" and command == "compile"
    return kind == "recurrent" or command in ("bench", "compile")


CELLS = [
    pytest.param(kind, command, marks=[pytest.mark.slow] if is_slow(kind, command) else [])
    for kind in KINDS
    for command in COMMANDS
]


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, Path]:
    """A folder of each kind."""
    embedding = tmp_path_factory.mktemp("models") / "embedding"
    shutil.copytree(GOLDENS / "qwen3", embedding)
    shutil.copy(GOLDENS / "encoders" / "bert" / "modules.json", embedding)
    (embedding / "1_Pooling").mkdir()
    (embedding / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    prompts = {"prompts": {"query": "what answers this: "}, "default_prompt_name": "query"}
    (embedding / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    folders = (GOLDENS / "qwen3", GOLDENS / "qwen3_next", embedding, GOLDENS / "encoders" / "bert")
    return dict(zip(KINDS, folders, strict=True))


def write(path: Path, *lines: dict) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def outcome(kind: str, command: str, model: Path, tmp: Path, capsys) -> tuple[int, str]:
    """Exit code and what was said of an error. Recurrent models have no tokenizer here."""
    text = TOKENS if kind == "recurrent" else "a block holds the keys and values of its tokens " * 2
    write(tmp / "rows.jsonl", *({"custom_id": name, "prompt_token_ids": TOKENS, "max_tokens": 3} for name in "ab"))
    write(tmp / "vectors.jsonl", *({"custom_id": name, "input": text} for name in "ab"))
    write(tmp / "texts.jsonl", {"input": text})
    sizes = ENCODER if kind == "encoder" else ENGINE
    engine = f"{sizes} --compilation-cache-dir {COMPILED}"
    if command == "cache load" and kind != "encoder":
        assert outcome(kind, "cache save", model, tmp, capsys)[0] == 0
    filled = COMMANDS[command].format(
        model=model, tmp=tmp, tokens=",".join(map(str, TOKENS)), engine=engine, sizes=sizes
    )
    capsys.readouterr()
    code = main(filled.split())
    said = capsys.readouterr().err
    return code, said


@pytest.mark.parametrize(("kind", "command"), CELLS)
def test_a_command_works_or_says_why_not(kind, command, models, tmp_path, capsys):
    code, said = outcome(kind, command, models[kind], tmp_path, capsys)
    expected, sentence = REFUSED.get(command, (0, "")) if kind == "encoder" else (0, "")
    assert code == expected, said
    assert sentence in " ".join(said.split()) and "Traceback" not in said
    if command.startswith("batch") and "--plan" not in command:
        lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert [line["custom_id"] for line in lines] == ["a", "b"]
        assert all((line["error"] is None) == (code == 0) for line in lines)


@pytest.mark.parametrize("kind", ["generating", "generating, of vectors", "encoder"])
def test_a_batch_gives_the_vectors_of_embed_with_the_checkpoints_prompt(kind, models, tmp_path, capsys):
    assert outcome(kind, "embed", models[kind], tmp_path, capsys)[0] == 0
    (line,) = (tmp_path / "out.jsonl").read_text().splitlines()
    (tmp_path / "out.jsonl").unlink()
    assert outcome(kind, "batch of vectors", models[kind], tmp_path, capsys)[0] == 0
    body = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[1])["response"]["body"]
    assert body["data"][0]["embedding"] == pytest.approx(json.loads(line)["embedding"], abs=1e-6)
    assert body["usage"]["prompt_tokens"] == json.loads(line)["num_tokens"]
    report = json.loads((tmp_path / "out.jsonl.report.json").read_text())
    assert report["rows"] == {"all": 2, "ok": 2, "failed": 0, "invalid": 0, "unrecorded": 0}
