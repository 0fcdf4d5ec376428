"""Extracts one JSON object from each of many documents, and says which answers were none.

    python docs/examples/extract_json.py DIR > records.jsonl

DIR is an instruction-tuned model. The instructions stand first in every prompt, so they are computed once. Nothing
forces the answer to be JSON yet: what cannot be read is kept beside its document, to be asked for again.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from ferrum_jax import LLM, EngineConfig, SamplingParams

INSTRUCTIONS = """Answer with one JSON object and nothing else. Its keys are "customer" (a string), "item" (a string)
and "amount" (a whole number). For "Ada Park ordered 3 lamps on Monday." answer
{"customer": "Ada Park", "item": "lamps", "amount": 3}
"""
NAMES, ITEMS = ("Bo Lind", "Cy Marsh", "Di Okoro", "Eve Roth"), ("chairs", "desks", "lamps", "rugs", "shelves")
DOCUMENTS = [f"On day {i} {NAMES[i % 4]} ordered {i % 9 + 1} {ITEMS[i % 5]}." for i in range(100)]
KEYS = {"customer": str, "item": str, "amount": int}


def main(model: str, config: EngineConfig | None = None, documents: list[str] = DOCUMENTS) -> list[dict[str, Any]]:
    llm = LLM(model, config)
    prompts = [f"{INSTRUCTIONS}\n{document}\nAnswer: {{" for document in documents]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=64, temperature=0.0, stop=["}"]))
    found = [read(document, "{" + output.text + "}") for document, output in zip(documents, outputs, strict=True)]
    for record in found:
        print(json.dumps(record))
    problems = sum("problem" in record for record in found)
    reused = llm.stats()["hit_tokens"]
    print(f"{len(found) - problems} records, {problems} problems, {reused} prompt tokens reused", file=sys.stderr)
    return found


def read(document: str, answer: str) -> dict[str, Any]:
    """The record of an answer, or the answer with what is wrong with it."""
    try:
        record = json.loads(answer)
    except ValueError as error:
        return {"document": document, "answer": answer, "problem": str(error)}
    wrong = [key for key, kind in KEYS.items() if type(record.get(key)) is not kind] + sorted(set(record) - set(KEYS))
    if wrong:
        return {"document": document, "answer": answer, "problem": f"wrong or missing: {', '.join(wrong)}"}
    return {"document": document, **record}


if __name__ == "__main__":
    main(sys.argv[1])
