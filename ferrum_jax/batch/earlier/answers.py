"""Answers of earlier jobs, for rows that ask the same of the same model.

An answer is all that is taken: names, ids, the job's start and fingerprint are the row's own, so its line has the bytes
of one that was computed here. The index keeps 16 bytes for each line of the outputs, and finds it by its request.
"""

import contextlib
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ferrum_jax.batch.batch_llm import BatchLLM, RowRequest
from ferrum_jax.batch.earlier.trusted import EarlierOutput, opened
from ferrum_jax.batch.input.formats import Row
from ferrum_jax.batch.input.rows import Rows
from ferrum_jax.batch.journal.job_identity import REQUIRE_VALID, JobIdentity, JobRefused
from ferrum_jax.batch.journal.keeper import JobOptions
from ferrum_jax.batch.journal.line_record import LINE, RECORD, REQUEST
from ferrum_jax.batch.journal.responses import request_digest, reused_line
from ferrum_jax.batch.verify.promise import MODE, elsewhere, other_model
from ferrum_jax.inputs.identity import ModelIdentity
from ferrum_jax.inputs.prompt import PromptIds
from ferrum_jax.openai.asked import GENERATES, TRANSCRIBES

_OFFSET_BITS = 48
_FOUND = re.compile(rb'"request": "([0-9a-f]{16})[0-9a-f]{16}"(?:, "tokens": "([0-9a-f]{16})")?')


class EarlierAnswers:
    """The answers of the outputs that `earlier_answers` opens."""

    def __init__(self, outputs: Sequence[EarlierOutput]) -> None:
        """Raises ValueError for an output that was edited, or whose lines have no digest of their requests."""
        self._outputs = outputs
        requests, tokens, places = array("Q"), array("Q"), array("Q")
        for number, output in enumerate(outputs):
            num_before, num_ok = len(places), 0
            for offset, line in output.lines():
                num_ok += line.endswith(b'"error": null}\n')
                if found := _FOUND.search(line, line.rfind(b'"%s": {' % RECORD.encode())):
                    requests.append(int(found[1], 16))
                    tokens.append(int(found[2] or b"0", 16))
                    places.append(number << _OFFSET_BITS | offset)
            if num_ok and len(places) == num_before:
                raise ValueError(
                    f"{output.path} is of an older version, whose lines have no digest of what they answer, so none of "
                    "them can be taken; leave it out of --reuse"
                )
        keys = np.array([requests, tokens, places], np.uint64)  # [3, lines]
        keys = keys[:, np.lexsort(keys[::-1])]
        is_first = np.diff(keys[:2], axis=1, prepend=~keys[:2, :1]).any(axis=0)  # of those that answer alike
        self._requests, self._places = keys[0, is_first], keys[2, is_first]

    def begin(self, job: JobIdentity, identity: ModelIdentity | None, options: JobOptions) -> None:
        """Records in the job what rows may take from now on. identity: of the model here.

        Raises JobRefused for an output of another model, and for one that was answered elsewhere.
        """
        if identity is None:
            raise JobRefused("this engine does not say what answers before it has answered; leave --reuse out")
        others = list[dict[str, str]]()
        for path, record, _ in self._outputs:
            reasons = list(elsewhere(record, identity))
            if changes := other_model(record, identity):
                raise JobRefused(f"another model answered {path}: {'; '.join(changes)}; leave it out of --reuse")
            if job.requires_valid and not record.settings.get(REQUIRE_VALID):
                raise JobRefused(f"{path} was not run with --require-valid, as this job is; leave it out of --reuse")
            if reasons and (options.strict_bits or not options.reuse_text):
                raise JobRefused(
                    f"answers of {path} may have other bits, because {'; '.join(reasons)}; add --reuse-text to take "
                    "them all the same, or leave it out of --reuse"
                )
            mode = {name: str((record.model or {}).get(name)) for name in MODE}
            others += [{**each, **mode} for each in record.environments] if reasons else []
        job.reuse([{"path": path, "digest": record.output} for path, record, _ in self._outputs], others)

    def line(self, llm: BatchLLM, row: Row, job: JobIdentity) -> bytes | None:
        """The row's line with its newline; None where no output answers its request, or several do so differently."""
        make, found = llm.row_tasks(job.started), set[bytes]()

        def read(place: int) -> tuple[Sequence[int], Iterable[str]]:
            (asked,) = make(RowRequest(place, row.kind, row.prompts[place], row.params_of(place))).requests
            return asked.token_ids, [image.digest.hex() for image in asked.options.images]

        try:
            is_read = row.kind in (GENERATES, TRANSCRIBES)
            request = request_digest(row, map(read, range(len(row.prompts) if is_read else 0)))
        except ValueError:  # of the prompt; the engine refuses it too, and says why
            return None
        for place in self._places_of(request).tolist():
            line = self._outputs[place >> _OFFSET_BITS].line(place & (1 << _OFFSET_BITS) - 1)
            said = line.response[RECORD]
            if line.id != row.id and b'"tool_calls": [' in line.as_written:
                return None  # ids of calls follow from that of the row
            if said[REQUEST] == request:
                digests = {name: value for name, value in said.items() if name not in ("seed", LINE)}
                found.add(reused_line(row, line.response["body"], digests, job.label))
        return found.pop() if len(found) == 1 else None

    def left(self, rows: Rows, token_ids: PromptIds, max_model_len: int) -> np.ndarray:
        """The rows to run that take no answer, as far as a plan knows, which reads neither media nor weights."""

        def is_left(index: int) -> bool:
            row = rows.read(index)
            if not isinstance(row, Row):
                return True
            kept = row.asked.most_prompt_tokens(max_model_len)
            prompts = row.prompts if row.kind == GENERATES else ()
            with contextlib.suppress(ValueError):  # of a prompt that is refused
                read = ((token_ids(prompt, kept=kept), ()) for prompt in prompts)
                return not len(self._places_of(request_digest(row, read)))
            return True

        return rows.order[[is_left(index) for index in rows.order.tolist()]]

    def _places_of(self, request: str) -> np.ndarray:
        head = np.uint64(int(request[:16], 16))
        return self._places[np.searchsorted(self._requests, head) : np.searchsorted(self._requests, head, "right")]


@contextlib.contextmanager
def earlier_answers(paths: Sequence[str]) -> Iterator[EarlierAnswers | None]:
    """None where no output is named. Raises ValueError or OSError for one that cannot be trusted."""
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(opened(path)) for path in paths]
        yield EarlierAnswers(outputs) if outputs else None
