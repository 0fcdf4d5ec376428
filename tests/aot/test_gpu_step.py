"""Steps of engines for an H200 that is not here: the memory that a plan counts on, and forwards as CUDA graphs."""

import functools
import re
from typing import Any, NamedTuple

import jax
import pytest

from ferrum_jax.config import EngineConfig
from ferrum_jax.models.families.registry import spec_of
from ferrum_jax.models.sharding import local_bytes, make_mesh
from ferrum_jax.runtime.buckets import Bucket
from ferrum_jax.runtime.layout import Layout
from ferrum_jax.runtime.placing.fit import fit, temporaries_bytes, temporaries_in
from ferrum_jax.runtime.programs import programs_of
from scripts import gpu_static, kept_counts
from scripts.published import config_of
from tests.aot.gpu_launches import FILE, NO_WORK, TOOLS, launches_of_a_layer

pytestmark = pytest.mark.aot
_LAUNCHES = {"fusion", "custom-call", "copy"}
_KERNELS = ("mosaic_gpu", "__cublas$", "__cudnn$")  # custom calls that a graph records
_HOST_MEMORY = "S(5)"


class Engine(NamedTuple):
    """A plan, and its largest programs by part, compiled over the pools that it chose."""

    layout: Layout
    executables: dict[Any, Any]


CASES = (
    pytest.param(("Llama-3-8B", 2, 64), id="llama_8b_2_layers"),
    pytest.param(("Qwen3-0.6B", 2, 8), id="qwen3_06b_2_layers_8_rows", marks=pytest.mark.slow),
    pytest.param(("Qwen3-0.6B", 28, 64), id="qwen3_06b", marks=pytest.mark.slow),
    pytest.param(("Llama-3-8B", 32, 64), id="llama_8b", marks=pytest.mark.slow),
)


@pytest.fixture(scope="module", params=CASES)
def engine(request: pytest.FixtureRequest) -> Engine:
    """Fitted as a start does it, which asks the compiler about the largest programs over a pool of few blocks."""
    model, layers, rows = request.param
    config = EngineConfig(
        max_num_seqs=rows,
        max_num_batched_tokens=2048,
        max_model_len=4096,
        implementation="mosaic_gpu",
        mesh="tp=1",
    )
    spec = spec_of(config_of(model) | {"num_hidden_layers": layers})
    asked = functools.partial(temporaries_bytes, executable_cache=None)
    layout = fit(spec, config, make_mesh(config.mesh_shape, gpu_static.h200s()), temporaries_of=asked)
    programs = programs_of(layout)
    parts = (*layout.ladder.largest_parts, "score")
    return Engine(layout, {part: programs[part].compile() for part in parts})


def test_a_plan_s_memory_is_within_two_percent_of_the_compiler_s_peak(engine: Engine) -> None:
    """The peak: what the largest forward is given, what others have beside it, and the most that one takes meanwhile.

    Pools and weights are most of it, so the part that a step takes is held against the compiler's by itself.
    """
    layout, pools = engine.layout, engine.layout.pools
    given = max(
        executable.memory_analysis().argument_size_in_bytes
        for part, executable in engine.executables.items()
        if isinstance(part, Bucket)
    )
    beside = [pools.prompts, pools.masks, *([] if layout.spec.tie_word_embeddings else [layout.head.shapes])]
    others = sum(map(local_bytes, jax.tree.leaves(beside)))
    meanwhile = max(map(temporaries_in, engine.executables.values()))
    assert layout.ledger.used_bytes == pytest.approx(given + others + meanwhile, rel=0.02)
    assert layout.ledger.temporaries_bytes == pytest.approx(meanwhile, rel=0.02)
    fixed = given + others - layout.ledger.kv_bytes
    assert layout.ledger.used_bytes - layout.ledger.kv_bytes == pytest.approx(fixed + meanwhile, rel=0.02)


def test_a_forward_has_nothing_that_a_cuda_graph_cannot_record(engine: Engine) -> None:
    """Loops and branches want the host's word, transfers its memory, and a callback its thread."""
    for part, executable in engine.executables.items():
        if not isinstance(part, Bucket):
            continue
        text = executable.as_text()
        entry = text[text.index("\nENTRY ") :]
        kinds = re.findall(r"^\s+(?:ROOT )?%\S+ = .*? ([a-z][a-z-]*)\(", entry, re.MULTILINE)
        assert set(kinds) <= _LAUNCHES | NO_WORK, (str(part), set(kinds) - _LAUNCHES - NO_WORK)
        assert kinds.count("fusion") > 2 * engine.layout.spec.num_hidden_layers, "the pattern finds no step"
        targets = set(re.findall(r'custom_call_target="([^"]+)"', text))
        assert targets and all(target.startswith(_KERNELS) for target in targets), (str(part), targets)
        assert not re.search(r" (while|conditional)\(", text) and _HOST_MEMORY not in text, str(part)


def test_a_layer_of_a_decode_step_has_no_more_launches_than_are_kept() -> None:
    kept = kept_counts.read(FILE)
    if kept["tools"] != TOOLS:
        pytest.skip(f"XLA's part is of another compiler (kept, here): {kept['tools']}, {TOOLS}")
    found, before = launches_of_a_layer(), kept["launches"]["llama_8b_decode_64"]["layer"]
    kinds = [" dot_general " in name or name.startswith("custom-call") for name in found.elements()]
    assert sum(kinds) == 5, f"q, k and v, attention, o, gate and up, down: {found}"
    assert len(kinds) <= sum(before.values()), (before, found)
