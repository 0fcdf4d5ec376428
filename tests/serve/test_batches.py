"""Files and batches over HTTP, by OpenAI's own client: what is uploaded is answered, listed, cancelled and deleted."""

import concurrent.futures
import contextlib
import errno
import json
import os
import secrets
import time
from pathlib import Path

import openai
import pytest

from ferrum_jax.io.files.store import LocalStore
from ferrum_jax.serve.http.api_keys import read_keys
from ferrum_jax.serve.http.settings import ServerSettings
from tests.rows import rows_beside
from tests.serve.batch_input import CHAT, begin, ended, lines_of, rows
from tests.serve.running import request, running
from tests.serve.test_under_load import until


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("batches")
    names = {"names": ("small", "/srv/small"), "num_listed": 1}
    with running(ServerSettings(**names, batches=str(folder), max_file_bytes=1 << 20)) as found:
        yield found


def test_a_batch_goes_from_upload_to_its_answers(client):
    batch = begin(client, rows(5), metadata={"what": "test"})
    assert batch.object == "batch" and batch.status in ("validating", "in_progress", "finalizing", "completed")
    assert batch.metadata == {"what": "test"} and batch.expires_at == batch.created_at + 86400
    done = ended(client, batch)
    assert done.status == "completed" and done.errors is None and done.error_file_id is None
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (5, 5, 0)
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at
    found = lines_of(client, done.output_file_id)
    assert [line["custom_id"] for line in found] == [f"row-{i}" for i in range(5)]
    for line in found:
        body = line["response"]["body"]
        assert line["error"] is None and line["response"]["status_code"] == 200 and body["model"] == "small"
        assert body["usage"]["completion_tokens"] == 4
    output = client.files.retrieve(done.output_file_id)
    assert output.purpose == "batch_output" and output.bytes == len(client.files.content(output.id).content)


def test_a_row_is_answered_as_the_same_request_is(client):
    asked = {"temperature": 0, "max_tokens": 6}
    done = ended(client, begin(client, rows(1, **asked)))
    (line,) = lines_of(client, done.output_file_id)
    live = client.chat.completions.create(model="small", messages=[{"role": "user", "content": "hi"}], **asked)
    assert line["response"]["body"]["choices"][0]["message"]["content"] == live.choices[0].message.content


def test_live_requests_beside_a_batch_and_its_rows_are_answered_as_alone(server, client):
    asked = [{"prompt": f"{i} and so on", "temperature": 0, "max_tokens": 5 + i % 7} for i in range(24)]
    alone = [client.completions.create(model="small", **each).choices[0].text for each in asked]
    lines = b"".join(rows(1, first=i, url="/v1/completions", body=each) for i, each in enumerate(asked))
    batch = begin(client, lines, endpoint="/v1/completions")
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        live = pool.map(lambda each: client.completions.create(model="small", **each).choices[0].text, asked)
        assert list(live) == alone
    done = ended(client, batch)
    found = lines_of(client, done.output_file_id)
    assert [line["response"]["body"]["choices"][0]["text"] for line in found] == alone
    server.wait_until_idle()


def test_rows_that_fail_stand_in_the_errors_file(client):
    done = ended(client, begin(client, rows(2) + rows(2, temperature=-1.0, first=2)))
    assert done.status == "completed" and (done.request_counts.completed, done.request_counts.failed) == (2, 2)
    errors = lines_of(client, done.error_file_id)
    assert [line["custom_id"] for line in errors] == ["row-2", "row-3"]
    assert all(line["response"] is None and "temperature" in line["error"]["message"] for line in errors)
    assert len(lines_of(client, done.output_file_id)) == 2


def test_texts_are_embedded_and_completed(client):
    vectors = rows(2, url="/v1/embeddings", body={"model": "small", "input": ["a", "b"]})
    done = ended(client, begin(client, vectors, endpoint="/v1/embeddings"))
    found = lines_of(client, done.output_file_id)[0]["response"]["body"]
    live = client.embeddings.create(model="small", input=["a", "b"], encoding_format="float")
    assert len(found["data"]) == 2 and found["usage"]["prompt_tokens"] == live.usage.prompt_tokens
    assert found["data"][0]["embedding"] == pytest.approx(live.data[0].embedding, abs=1e-5)
    texts = rows(1, url="/v1/completions", body={"prompt": ["a", "b"], "max_tokens": 2, "n": 2})
    done = ended(client, begin(client, texts, endpoint="/v1/completions"))
    assert len(lines_of(client, done.output_file_id)[0]["response"]["body"]["choices"]) == 4


BAD = {
    "invalid_json": b"{}}\n",
    "missing_custom_id": b'{"method": "POST"}\n',
    "duplicate_custom_id": rows(1) * 2,
    "mismatched_url": rows(1, url="/v1/completions", body={"prompt": "a"}),
    "model_not_found": rows(1, body={"model": "other", "messages": [{"role": "user", "content": "a"}]}),
    "too_many_choices": rows(1, n=129),
    "empty_file": b"\n \n",
}


def line(**more: object) -> bytes:
    asked = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"messages": [{"role": "user", "content": "a"}]}}
    return json.dumps({name: value for name, value in (asked | more).items() if value is not None}).encode() + b"\n"


@pytest.mark.parametrize(
    ("more", "code", "says"),
    [
        *rows_beside(__file__)["a line for another method or url fails the batch before a row runs"],
        ({"url": "/v1/completions"}, "mismatched_url", f"url is '/v1/completions', and the batch is of {CHAT}"),
    ],
)
def test_a_line_for_another_method_or_url_fails_the_batch_before_a_row_runs(client, more, code, says):
    done = ended(client, begin(client, rows(1) + line(**more)))
    assert done.status == "failed" and done.in_progress_at is None and done.output_file_id is None
    (error,) = done.errors.data
    assert (error.code, error.line) == (code, 2) and says in error.message


@pytest.mark.parametrize("more", [{"body": {}}, {"body": {"messages": 1}}, {"body": "a"}, {"other": 1}])
def test_a_row_with_another_fault_fails_alone(client, more):
    done = ended(client, begin(client, rows(1) + line(**more)))
    assert done.status == "completed" and (done.request_counts.completed, done.request_counts.failed) == (1, 1)
    assert lines_of(client, done.error_file_id)[0]["error"]["code"] == "invalid_request"


@pytest.mark.parametrize("code", BAD)
def test_an_input_that_cannot_be_run_fails_and_says_in_which_line(client, code):
    done = ended(client, begin(client, b"\n" + BAD[code]))
    assert done.status == "failed" and done.failed_at and done.output_file_id is None
    (error,) = done.errors.data
    assert error.code == code and error.message
    assert error.line == {"duplicate_custom_id": 3, "empty_file": None}.get(code, 2)


def test_a_model_that_is_not_here_is_refused_with_the_listed_names(client):
    other = {"model": "other", "messages": [{"role": "user", "content": "a"}]}
    (error,) = ended(client, begin(client, rows(1, body=other))).errors.data
    with pytest.raises(openai.NotFoundError) as live:
        client.chat.completions.create(**other)
    assert live.value.body["message"] == "model is 'other', and this server has 'small'"
    assert error.message == "model is 'other', and this server's batches have 'small'"
    assert ended(client, begin(client, rows(1, model="/srv/small"))).status == "completed"


def test_a_cancelled_batch_keeps_what_was_answered(client):
    batch = begin(client, rows(4, max_tokens=2) + rows(60, max_tokens=100, ignore_eos=True, first=4))
    until = time.monotonic() + 60
    while not client.batches.retrieve(batch.id).request_counts.completed and time.monotonic() < until:
        time.sleep(0.05)
    asked = client.batches.cancel(batch.id)
    assert asked.status == "cancelling" and asked.cancelling_at
    done = ended(client, batch)
    assert done.status == "cancelled" and done.cancelled_at >= done.cancelling_at == asked.cancelling_at
    kept = [line["custom_id"] for line in lines_of(client, done.output_file_id)]
    assert {"row-0", "row-1", "row-2", "row-3"} <= {*kept} and len(kept) == done.request_counts.completed < 64
    assert len({*kept}) == len(kept)
    with pytest.raises(openai.ConflictError, match="is cancelled, so there is nothing to cancel"):
        client.batches.cancel(batch.id)


def test_a_batch_is_deleted_once_it_has_ended_and_its_files_stay(client):
    batch = begin(client, rows(64, max_tokens=100, ignore_eos=True))
    with pytest.raises(openai.ConflictError, match="cancel it, or delete it when it has ended"):
        client.delete(f"/batches/{batch.id}", cast_to=object)
    client.batches.cancel(batch.id)
    ended(client, batch)
    found = client.delete(f"/batches/{batch.id}", cast_to=object)
    assert found == {"id": batch.id, "object": "batch", "deleted": True}
    assert batch.id not in [each.id for each in client.batches.list()]
    assert client.files.retrieve(batch.input_file_id)
    for ask in (
        client.batches.retrieve,
        client.batches.cancel,
        lambda it: client.delete(f"/batches/{it}", cast_to=object),
    ):
        with pytest.raises(openai.NotFoundError, match="there is no batch"):
            ask(batch.id)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize("spoil", [empty, loop, Path.mkdir, os.mkfifo])
def test_a_batch_whose_record_is_damaged_is_passed_over_in_lists(server, client, spoil):
    first, second, third = (ended(client, begin(client, rows(1))) for _ in range(3))
    root, other = Path(server.app.state.batches.root), secrets.token_hex(16)
    (root / f"batches/{second.id}.end.json").unlink()
    for name in (f"batches/{second.id}.end", f"batches/batch_{other}", f"files/file-{other}"):
        spoil(root / f"{name}.json")
    listed = [each.id for each in client.batches.list(limit=2)]
    assert first.id in listed and third.id in listed and second.id not in listed
    for ask in (client.batches.retrieve, client.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            ask(second.id)
    client.files.delete(second.input_file_id)
    assert ended(client, begin(client, rows(1))).status == "completed"


def test_lists_come_page_by_page(client):
    batches = [begin(client, rows(1)) for _ in range(3)]
    for batch in batches:
        ended(client, batch)
    listed = [each.id for each in client.batches.list(limit=2)]  # the client asks for page after page
    assert {batch.id for batch in batches} <= {*listed} and len(listed) == len({*listed}) > 2
    files = [each.id for each in client.files.list(limit=2, purpose="batch")]
    assert {batch.input_file_id for batch in batches} <= {*files}
    outputs = [each.id for each in client.files.list(purpose="batch_output", order="asc")]
    assert not {*outputs} & {*files} and len(outputs) >= 3
    with pytest.raises(openai.BadRequestError, match="none of the list's ids"):
        client.batches.list(after="batch_none")
    with pytest.raises(openai.BadRequestError, match="limit is '0'"):
        client.files.list(limit=0)


def test_a_deleted_file_is_gone(client):
    file = client.files.create(file=("rows.jsonl", rows(1)), purpose="batch")
    assert client.files.content(file.id).content == rows(1) and file.filename == "rows.jsonl"
    assert client.files.delete(file.id).deleted
    for ask in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match="there is no file"):
            ask(file.id)


def test_a_file_that_a_batch_reads_is_kept(client):
    batch = begin(client, rows(64, max_tokens=100, ignore_eos=True))
    with pytest.raises(openai.ConflictError, match=f"{batch.id} reads {batch.input_file_id}"):
        client.files.delete(batch.input_file_id)
    client.batches.cancel(batch.id)
    ended(client, batch)
    client.files.delete(batch.input_file_id)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"endpoint": "/v1/responses"}, "endpoint is '/v1/responses'; batches are of"),
        ({"completion_window": "24"}, "completion_window is '24'; it must be a number of minutes, hours or days"),
        ({"completion_window": "31d"}, "at most 30d"),
        ({"metadata": {"a": "b" * 513}}, "metadata is"),
        ({"extra_body": {"output_expires_after": {}}}, "output_expires_after is not supported: files are kept until"),
    ],
)
def test_a_batch_that_cannot_be_is_refused_in_words(client, more, says):
    with pytest.raises(openai.BadRequestError) as refused:
        begin(client, rows(1), **more)
    assert says in str(refused.value)


@pytest.mark.parametrize("metadata", [{"a": "\ud83d"}, {"\udc00a": "b"}])
def test_half_a_surrogate_pair_is_no_metadata(server, metadata):
    body = {"input_file_id": "file-x", "endpoint": CHAT, "completion_window": "24h", "metadata": metadata}
    status, _, answer = server.ask("/v1/batches", body)
    assert status == 400 and answer["error"]["message"].endswith("without half of a surrogate pair")


def test_other_windows_than_a_day_are_taken(client):
    for window, seconds in {"30m": 1800, "1h": 3600, "7d": 604800}.items():
        batch = begin(client, rows(1), completion_window=window)
        assert batch.expires_at - batch.created_at == seconds and batch.completion_window == window
        ended(client, batch)


@pytest.mark.parametrize("file_id", ["file-none", "../batches/x", "file-" + "0" * 32, "file-" + "0" * 31 + "/"])
def test_an_unknown_file_is_not_found_whatever_it_is_called(client, file_id):
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")


FORM = b'--x\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'


def upload(server, *parts: tuple[bytes, bytes, bytes]) -> tuple[int, dict]:
    content = b"".join(FORM % part for part in parts) + b"--x--\r\n"
    answer = server.raw(request("/v1/files", content, Content_Type="multipart/form-data; boundary=x"))
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


FILE, PURPOSE = (b"file", b'; filename="a"', b"{}"), (b"purpose", b"", b"batch")


@pytest.mark.parametrize(
    ("parts", "status", "says"),
    [
        ([FILE], 400, "purpose is None; it must be batch"),
        ([PURPOSE], 400, "file is missing"),
        ([FILE, (b"purpose", b"", b"assistants")], 400, "purpose is 'assistants'"),
        ([FILE, FILE, PURPOSE], 400, "file is given twice"),
        ([FILE, PURPOSE, (b"other", b"", b"1")], 400, "other is not known"),
        ([FILE, PURPOSE, (b"expires_after[seconds]", b"", b"3600")], 400, "expires_after[seconds] is not supported"),
        ([(b"file", b"", b"x" * ((1 << 20) + 1)), PURPOSE], 413, "more than 1,048,576 bytes"),
        ([(b"file", b"", b"x" * (3 << 20)), PURPOSE], 413, "more than 1,048,576 bytes"),
    ],
)
def test_an_upload_that_is_none_is_refused(server, parts, status, says):
    found, answer = upload(server, *parts)
    assert found == status and says in answer["error"]["message"]


def test_slow_uploads_end_and_are_counted_by_key(tmp_path):
    (tmp_path / "keys").write_text("sk-alice-1 alice\nsk-bob-12 bob\n")
    keys = read_keys(tmp_path / "keys")
    settings = ServerSettings(names=("small",), keys=keys, batches=str(tmp_path / "batches"), body_s=1.0)
    form = {"Content_Type": "multipart/form-data; boundary=x", "Authorization": "Bearer sk-alice-1"}
    begun = request("/v1/files", b"", **form | {"Content_Length": "1000000"}) + (FORM % FILE)[:70]
    content = b"".join(FORM % part for part in (FILE, PURPOSE)) + b"--x--\r\n"
    with running(settings) as server, contextlib.ExitStack() as stack:
        slow = [stack.enter_context(server.connect()) for _ in range(8)]
        for connection in slow:
            connection.sendall(begun)
        until(lambda: server.app.state.uploads[keys[0].owner] == 8)
        assert b" 429 " in server.raw(request("/v1/files", content, **form))
        other = form | {"Authorization": "Bearer sk-bob-12"}
        assert b" 200 " in server.raw(request("/v1/files", content, **other))
        answers = dict.fromkeys(range(8), b"")
        for number, connection in enumerate(slow):
            connection.settimeout(0.2)
            while not answers[number]:  # a byte now and then keeps none of them
                connection.sendall(b"x")
                with contextlib.suppress(TimeoutError):
                    answers[number] = connection.recv(4096)
        assert all(b" 408 " in answer for answer in answers.values())
        until(lambda: not server.app.state.uploads[keys[0].owner])
        assert b" 200 " in server.raw(request("/v1/files", content, **form))


def test_a_full_disk_is_told_in_words(server, monkeypatch):
    def full(*args: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/srv/files/x")

    with monkeypatch.context() as patched:
        patched.setattr(LocalStore, "writing", full)
        status, answer = upload(server, FILE, PURPOSE)
    assert status == 507 and answer["error"]["type"] == "server_error" and answer["error"]["code"] == "disk_full"
    assert answer["error"]["message"] == "the server's disk is full; ask again when its owner has made room"
    assert upload(server, FILE, PURPOSE)[0] == 200


def test_a_file_is_named_by_no_path(server):
    status, answer = upload(server, (b"file", b'; filename="../../etc/x\x07"', b"{}"), PURPOSE)
    assert status == 200 and answer["filename"] == "../../etc/x?" and answer["id"].startswith("file-")


def test_a_form_that_breaks_off_is_refused(server):
    content = FORM % FILE
    answer = server.raw(request("/v1/files", content, Content_Type="multipart/form-data; boundary=x"))
    assert b" 400 " in answer.split(b"\r\n")[0] and b"ends in the middle" in answer
    status, _, answer = server.ask("/v1/files", {"purpose": "batch"})
    assert status == 415 and "multipart/form-data" in answer["error"]["message"]


def test_a_flexible_request_says_so(client):
    asked = {"model": "small", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    assert client.chat.completions.create(**asked, service_tier="flex").service_tier == "flex"
    assert client.chat.completions.create(**asked, service_tier="auto").service_tier is None
    stream = client.chat.completions.create(**asked, service_tier="flex", stream=True)
    assert {chunk.service_tier for chunk in stream} == {"flex"}
    assert client.responses.create(model="small", input="x", service_tier="flex").service_tier == "flex"


def test_without_a_folder_the_paths_name_the_option():
    with running(ServerSettings(names=("small",))) as server:
        for path, body in {"/v1/files": None, "/v1/batches": {}, "/v1/batches/x": None}.items():
            status, _, answer = server.ask(path, body)
            assert status == 404 and "--batches" in answer["error"]["message"]


def test_a_key_sees_its_own_files_and_batches_alone(tmp_path):
    (tmp_path / "keys").write_text("sk-alice-1 alice\nsk-bob-12 bob\n")
    keys = read_keys(tmp_path / "keys")
    settings = ServerSettings(names=("small",), keys=keys, batches=str(tmp_path / "batches"), max_stored_bytes=3000)
    with running(settings) as server:
        alice, bob = (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
            for key in ("sk-alice-1", "sk-bob-12")
        )
        batch = begin(alice, rows(1))
        done = ended(alice, batch)
        assert not bob.files.list().data and not bob.batches.list().data
        for ask, asked in (
            (bob.files.retrieve, done.output_file_id),
            (bob.files.content, batch.input_file_id),
            (bob.files.delete, batch.input_file_id),
            (bob.batches.retrieve, batch.id),
            (bob.batches.cancel, batch.id),
        ):
            with pytest.raises(openai.NotFoundError):
                ask(asked)
        assert len(alice.files.list().data) == 2
        with pytest.raises(openai.APIStatusError, match="of at most 3,000 are kept") as refused:
            bob.files.create(file=("rows.jsonl", rows(20)), purpose="batch")
        assert refused.value.status_code == 413
        stored = b"".join(path.read_bytes() for path in (tmp_path / "batches").rglob("*") if path.is_file())
        assert b"sk-alice-1" not in stored and keys[0].digest.hex().encode() not in stored
        alice.close(), bob.close()
