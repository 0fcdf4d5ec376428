"""The files that stand beside the weights in every checkpoint folder, ours and Hugging Face's alike.

config.json describes the model and must be there; generation_config.json, the tokenizer's files and those of
sentence-transformers are optional and are carried along, byte for byte, when a checkpoint is converted.
"""

import contextlib
import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from checkpoints.file_names import name_inside
from ferrum_jax.io.files.json_files import parse_json

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
MODULES, LENGTHS, PROMPTS = "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"
IMAGE_FILES = ("preprocessor_config.json", "processor_config.json")
COMPANIONS = ("config.json", "generation_config.json", *TOKENIZER_FILES, *IMAGE_FILES, MODULES, LENGTHS, PROMPTS)


def check_space(folder: Path, num_bytes: int) -> None:
    """Raises ValueError when the folder's disk has less than `num_bytes` free."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise ValueError(
            f"{folder} has {free:,} bytes free, and {num_bytes:,} are to be written; make room or name another output"
        )


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder beside `path` that takes its name when the block ends; an error leaves nothing behind.

    What killed processes left for the same `path` is deleted. A lock on the folder tells whether its process lives; a
    process number would not, because in containers every process may have the same one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with contextlib.suppress(OSError), _held(left):
            shutil.rmtree(left)
    temporary = path.parent / f".{path.name}.{secrets.token_hex(8)}.tmp"
    temporary.mkdir()
    try:
        with _held(temporary, is_needed=False):
            yield temporary
            os.replace(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextlib.contextmanager
def _held(folder: Path, *, is_needed: bool = True) -> Iterator[None]:
    """A lock on the folder; if it is needed, raises OSError where another process has it or there are no locks."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.nullcontext() if is_needed else contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def copy_companions(source: Path, target: Path) -> None:
    """Copies to `target` every companion file that `source` has. Raises ValueError without a config.json."""
    if not (source / "config.json").is_file():
        raise ValueError(
            f"{source} has no config.json; a checkpoint needs the model's configuration beside its weights"
        )
    for name in companion_files(source):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)


def companion_files(folder: Path) -> tuple[str, ...]:
    """Names of all companion files that the folder has, relative to it."""
    places = [place / "config.json" for _, place in sentence_modules(folder) if place != PurePosixPath(".")]
    names = (*COMPANIONS, *map(str, places), *dense_weights(folder))
    return tuple(name for name in names if (folder / name).is_file())


def dense_weights(folder: Path) -> tuple[str, ...]:
    """Names of the weights of linear layers behind the pooling, relative to the folder."""
    return tuple(str(place / "model.safetensors") for kind, place in sentence_modules(folder) if kind == "Dense")


def sentence_modules(folder: Path) -> list[tuple[str, PurePosixPath]]:
    """(kind, place in the folder) of each step that modules.json names; none where there is no such file.

    Raises ValueError when it is damaged or leads out of the folder.
    """
    file = folder / MODULES
    if not file.is_file():
        return []
    try:
        steps = parse_json(file.read_text(encoding="utf-8"))
        found = [(step["type"].rpartition(".")[2], step["path"]) for step in steps]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} is not a list of modules with type and path ({error}); copy it again") from error
    return [(kind, PurePosixPath("" if place == "" else name_inside(place, file))) for kind, place in found]
