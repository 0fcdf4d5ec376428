"""The paths that a command was given, compared with each other before anything starts."""

import argparse
from collections.abc import Iterator

from ferrum_jax.config import EngineConfig
from ferrum_jax.io.paths import NamedPath, kept_beside, require_apart

# Arguments by what is done with them; `reads` of a command's parser says of others of these that it only reads them.
_MODELS = ("model", "tokenizer", "hf", "orbax")
_READ = ("input", "prompt_file", "reuse", "fork", "append_file")
_READ_FOLDERS = ("bundle", "load_prefix_cache")
_WRITTEN = ("output", "report", "request_log", "plot", "profile")
_WRITTEN_FOLDERS = ("save_prefixes_at_notice", "out", "to_hf", "dir", "compilation_cache_dir", "kv_tier")


def require_files_apart(args: argparse.Namespace) -> None:
    """Raises ValueError, naming both arguments, where one would overwrite what another one names."""
    require_apart(list(_paths(args)))


def _paths(args: argparse.Namespace) -> Iterator[NamedPath]:
    if "model" in args and "compilation_cache_dir" not in args:
        args = argparse.Namespace(**vars(args), compilation_cache_dir=EngineConfig.compilation_cache_dir)
    for name in (*_MODELS, *_READ, *_READ_FOLDERS, *_WRITTEN, *_WRITTEN_FOLDERS):
        given = getattr(args, name, None)
        for path in given if isinstance(given, list) else [] if given is None else [given]:
            yield NamedPath(
                what="DIR" if name == "dir" else f"--{name.replace('_', '-')}",
                path=str(path),
                is_written=name in (*_WRITTEN, *_WRITTEN_FOLDERS) and name not in getattr(args, "reads", ()),
                is_owned=name in (*_READ_FOLDERS, *_WRITTEN_FOLDERS),
                is_model=name in _MODELS,
            )
    if args.command == "batch":
        yield from kept_beside(args.output, "--output")
