"""Extracts one JSON object from each of many documents; a schema holds every answer to its form.

    pip install -e '.[structured]'
    python docs/examples/extract_json.py DIR > records.jsonl

DIR is an instruction-tuned model; `checkpoints/demo` gives records too, of its own invention. The instructions stand
first in every prompt, so they are computed once. What the schema leaves no choice of, such as its keys, is not drawn.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from ferrum_jax import LLM, EngineConfig, SamplingParams, StructuredOutputsParams

INSTRUCTIONS = """Answer with one JSON object whose keys are "customer", "item" and "amount".
For "Ada Park ordered 3 lamps on Monday." answer {"customer": "Ada Park", "item": "lamps", "amount": 3}
"""
NAMES, ITEMS = ("Bo Lind", "Cy Marsh", "Di Okoro", "Eve Roth"), ("chairs", "desks", "lamps", "rugs", "shelves")
DOCUMENTS = [f"On day {i} {NAMES[i % 4]} ordered {i % 9 + 1} {ITEMS[i % 5]}." for i in range(100)]
SCHEMA = {
    "type": "object",
    "properties": {
        "customer": {"type": "string", "maxLength": 24},
        "item": {"enum": list(ITEMS)},
        "amount": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["customer", "item", "amount"],
    "additionalProperties": False,
}


def main(model: str, config: EngineConfig | None = None, documents: list[str] = DOCUMENTS) -> list[dict[str, Any]]:
    llm = LLM(model, config)
    prompts = [f"{INSTRUCTIONS}\n{document}\nAnswer: " for document in documents]
    form = StructuredOutputsParams(json=SCHEMA)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=96, temperature=0.0, structured_outputs=form))
    found = [
        {"document": document, **json.loads(output.text)} for document, output in zip(documents, outputs, strict=True)
    ]
    for record in found:
        print(json.dumps(record))
    stats = llm.stats()
    said = f"{stats['hit_tokens']} prompt tokens reused, {stats['forced_tokens']} tokens without a choice"
    print(f"{len(found)} records, {said}", file=sys.stderr)
    return found


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1])
