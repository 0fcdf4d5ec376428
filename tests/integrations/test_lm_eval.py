"""lm-eval over a server and over transformers: the same log-likelihoods and accuracies of the same weights."""

import json

import pytest

from checkpoints import open_checkpoint, to_huggingface
from ferrum_jax.models.families import registry
from tests.rows import rows_beside
from tests.serve.running import serving_demo
from tests.support import ROOT

pytestmark = pytest.mark.eval

DEMO = ROOT / "checkpoints" / "demo"
PAIRS = [
    ("def add(a, b):\n    return", " a + b"),
    ("import numpy as", " np\n"),
    ("", "def main():"),
    ("for i in range(10):\n   ", "     print(i)"),
]
TEXTS = ["def add(a, b):\n    return a + b\n", "class Point:\n    def __init__(self, x):\n        self.x = x\n" * 30]
CHOICES = [  # an offline task: how a line of Python ends
    {"query": "for i in", "choices": [" range(10):", " return def"], "gold": 0},
    {"query": "def f(x):\n    return", "choices": [" import", " x"], "gold": 1},
    {"query": "if x is not", "choices": [" None:", " for:"], "gold": 0},
    {"query": "import os\nimport", "choices": [" 12", " sys"], "gold": 1},
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(ours, transformers') over one folder."""
    pytest.importorskip("lm_eval")
    pytest.importorskip("torch")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    folder = tmp_path_factory.mktemp("demo") / "hf"
    to_huggingface(DEMO, folder, rules=registry.weights_of(open_checkpoint(DEMO).config).rules)
    with serving_demo(tmp_path_factory.mktemp("server")) as url:
        ours = LocalCompletionsAPI(
            base_url=f"{url}/completions", model="demo", tokenizer=str(folder), max_length=257, batch_size=1
        )
        yield ours, HFLM(str(folder), device="cpu", dtype="float32", max_length=255, batch_size=1)


def instances(kind: str, arguments: list) -> list:
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=one, idx=i) for i, one in enumerate(arguments)]


def test_log_likelihoods_are_those_of_transformers(models):
    asked = instances("loglikelihood", PAIRS)
    ours, theirs = (model.loglikelihood(asked, disable_tqdm=True) for model in models)
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine[0] == pytest.approx(reference[0], abs=1e-3) and mine[1] == reference[1]


def test_whole_texts_longer_than_the_model_are_scored_in_the_same_windows(models):
    asked = instances("loglikelihood_rolling", [(text,) for text in TEXTS])
    ours, theirs = (model.loglikelihood_rolling(asked, disable_tqdm=True) for model in models)
    assert ours == pytest.approx(theirs, abs=1e-3)


def test_greedy_texts_up_to_a_stop_are_those_of_transformers(models):
    """One ends at a stop, one at its length, one has a context that is cut to make room."""
    asked = [
        ("def add(a, b):\n    return", {"until": ["\n\n", "\ndef"], "max_gen_toks": 24, "do_sample": False}),
        ("import numpy as", {"until": [], "max_gen_toks": 12}),
        ("for i in range(10):\n    print(i)\n" * 40, {"until": ["\n"], "max_gen_toks": 16}),
        ("class Point:", {"until": "self", "max_gen_toks": 32, "temperature": 0.0}),
    ]
    ours, theirs = (model.generate_until(instances("generate_until", asked), disable_tqdm=True) for model in models)
    assert ours == theirs and any(ours)


def test_an_offline_task_has_the_same_accuracies(models, tmp_path):
    import lm_eval

    (tmp_path / "choices.json").write_text("\n".join(map(json.dumps, CHOICES)))
    task = rows_beside(__file__)["task"]
    task["dataset_kwargs"] = {"data_files": {"test": str(tmp_path / "choices.json")}}
    found = []
    for model in models:
        results = lm_eval.simple_evaluate(model, tasks=[task], bootstrap_iters=0)
        found.append({k: v for k, v in results["results"]["python_line_ends"].items() if k.startswith("acc")})
    assert found[0] == found[1]
