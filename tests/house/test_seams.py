"""Jobs, batches of a server and stores ask the machine for nothing but by `ferrum_jax.io.system`."""

import ast
import re
from collections.abc import Iterator

from tests.support import ROOT

PLACES = ("batch/**/*.py", "serve/batches/*.py", "serve/app/batch_routes.py", "serve/app/file_routes.py", "io/**/*.py")
# Where a process begins or ends, which no world has: children, the main programs' signals, Ray, and tools beside a job.
REAL = {
    *("ferrum_jax/io/system.py", "ferrum_jax/io/child.py", "ferrum_jax/io/sandbox/in_child.py"),
    *("ferrum_jax/io/watched_threads.py", "ferrum_jax/serve/batches/batch_process.py"),
    *("ferrum_jax/serve/batches/link_llm.py", "ferrum_jax/batch/ray.py", "ferrum_jax/batch/input/parsing.py"),
    *("ferrum_jax/batch/input/sound_folder.py", "ferrum_jax/batch/verify/verify_job.py"),
    *("ferrum_jax/io/files/json_files.py", "ferrum_jax/batch/input/read_ahead.py"),
}
MACHINE = {"time", "threading", "random", "secrets", "tempfile", "glob", "subprocess", "multiprocessing", "uuid"}
PURE = {"PathLike", "fspath", "fsdecode", "path", "R_OK", "W_OK", "X_OK", "strerror", "SEEK_END"}  # these read no file
PURE |= {f"path.{name}" for name in ("abspath", "dirname", "expanduser", "splitext")}
METHODS = {"unlink", "mkdir", "read_text", "read_bytes", "write_text", "write_bytes", "glob", "is_dir", "is_file"}
METHODS |= {"iterdir", "rglob", "touch", "rmdir", "lstat", "samefile"}
ENDS = {"exit_in_time", "_end_late"}  # of the process of a main program: see there


def bypasses(source: str) -> list[str]:
    """Uses of the machine in a file, and their lines."""
    found = []
    for node in _nodes(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [f"{node.lineno}: {name}" for name in names if name.partition(".")[0] in MACHINE]
        elif isinstance(node, ast.Attribute):
            whole = ast.unparse(node)
            is_asked = re.fullmatch(r"os[.\w]+", whole) and whole.removeprefix("os.") not in PURE
            if is_asked or (node.attr in METHODS and whole != f"system.{node.attr}"):
                found.append(f"{node.lineno}: {whole}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
            found.append(f"{node.lineno}: open")
    return found


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those of `ENDS`."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.FunctionDef) and node.name in ENDS):
            yield node
            yield from _nodes(node)


def test_no_file_asks_the_machine_but_by_the_system():
    files = {str(path.relative_to(ROOT)): path for place in PLACES for path in sorted(ROOT.glob(f"ferrum_jax/{place}"))}
    found = {name: uses for name, path in files.items() if (uses := bypasses(path.read_text()))}
    assert found.keys() == REAL, {name: uses for name, uses in found.items() if name not in REAL}
