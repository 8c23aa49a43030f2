"""A served model as its clients meet it: OpenAI's API over HTTP, two replicas on two hosts, and faults."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from tests.cluster.test_ray_mesh import eventually
from tests.serve import small_model

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
URL = "http://127.0.0.1:8173/v1"
MIB = 1 << 20
DOCUMENTS = ["".join(chr(97 + (i * i + 7 * j) % 26) for i in range(300)) for j in range(6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(small_model.make(tmp_path_factory.mktemp("model") / "small"))


@pytest.fixture(scope="module")
def serving(
    cluster: Any, network: bool, model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """The mesh and an app of two replicas. Yields the mesh."""
    if not network:
        pytest.skip("Serve listens on all interfaces, and this process may not make a network of its own")
    from ray import serve

    from p2pcache.mesh import Mesh
    from p2pcache.serve.app import deployment

    mesh = Mesh.ensure({"host_bytes_max": 256 * MIB, "runtime_dir": str(tmp_path_factory.mktemp("run"))})
    try:
        mesh.wait_for(3)
        serve.start(http_options={"host": "127.0.0.1", "port": 8173}, proxy_location="HeadOnly")
        serve.run(
            deployment(
                model=model,
                name="small",
                replicas=2,
                threads=1,
                dtype="float32",
                route_budget_s=0.5,
                silent_s=4.0,
                memory_bytes_max=64 * MIB,
            ),
            name="p2pcache",
        )
        yield mesh
    finally:
        serve.shutdown()
        mesh.stop()


def chat(*parts: str, **more: Any) -> requests.Response:
    content = [{"type": "text", "text": p} for p in parts]
    body = {"model": "small", "messages": [{"role": "user", "content": content}], "max_tokens": 8}
    return requests.post(
        f"{URL}/chat/completions",
        json=body | {"temperature": 0} | more,
        timeout=60,
        stream=bool(more.get("stream")),
    )


def answer(response: requests.Response) -> tuple[str, dict[str, Any]]:
    assert response.status_code == 200, response.text
    body = response.json()
    return body["choices"][0]["message"]["content"], body["usage"]


def events(response: requests.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            yield json.loads(line[6:])


def pids() -> set[int]:
    """Processes of the replicas, by the title that Ray gives them."""
    found = set()
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if line.read_bytes().startswith(b"ray::ServeReplica:p2pcache:Replica"):
                found.add(int(line.parent.name))
    return found


def leases(mesh: Any) -> int:
    return sum(n["leases"] + n["tickets"] for n in mesh.node_statuses() if "error" not in n)


def test_models_are_listed(serving: Any):
    listed = requests.get(f"{URL}/models", timeout=30).json()
    assert [m["id"] for m in listed["data"]] == ["small"]


def test_the_same_prompt_again_is_served_from_the_cache_by_the_replica_that_has_it(serving: Any):
    first, usage = answer(chat("Read this.", *DOCUMENTS[:3], "What is it?"))
    assert usage["prompt_tokens"] > 900 and usage["prompt_tokens_details"]["cached_tokens"] == 0
    # Stored and told to the owners beside the answer: each of nine chunks has two of them.
    eventually(lambda: sum(n["directory_keys"] for n in serving.node_statuses()) >= 18)
    again, second = answer(chat("Read this.", *DOCUMENTS[:3], "What is it?"))
    assert again == first
    assert second["prompt_tokens_details"]["cached_by_source"]["local"] > 700
    assert second["p2pcache"]["replica"] == usage["p2pcache"]["replica"]


def test_documents_are_found_in_another_order(serving: Any):
    answer(chat("Read this.", DOCUMENTS[3], DOCUMENTS[4], DOCUMENTS[5], "What is it?"))
    eventually(
        lambda: (
            answer(chat(DOCUMENTS[5], DOCUMENTS[3], "And what now?"))[1]["prompt_tokens_details"][
                "cached_tokens"
            ]
            > 400
        )
    )


def test_a_stream_says_the_same_as_a_whole_answer(serving: Any):
    whole, _ = answer(chat(DOCUMENTS[0], "Stream?", max_tokens=20))
    got = list(
        events(
            chat(DOCUMENTS[0], "Stream?", max_tokens=20, stream=True, stream_options={"include_usage": True})
        )
    )
    assert got[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in got if e["choices"]) == whole
    assert got[-1]["usage"]["completion_tokens"] == 20 or got[-2]["choices"][0]["finish_reason"] == "stop"


def test_text_and_token_ids_are_completed(serving: Any):
    def complete(prompt: Any) -> str:
        body = {"model": "small", "prompt": prompt, "max_tokens": 5, "temperature": 0}
        return requests.post(f"{URL}/completions", json=body, timeout=60).json()["choices"][0]["text"]

    assert complete("abc") == complete(["abc"]) and isinstance(complete([5, 6, 7]), str)


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("completions", {"model": "gpt", "prompt": "x"}, 404, "model_not_found"),
        ("completions", {"model": "small", "prompt": ""}, 400, None),
        ("completions", {"model": "small", "prompt": "x" * 5000}, 400, "context_length_exceeded"),
        (
            "completions",
            {"model": "small", "prompt": "x", "max_tokens": 5000},
            400,
            "context_length_exceeded",
        ),
        ("completions", {"model": "small", "prompt": [99999]}, 400, None),
        ("chat/completions", {"model": "small", "messages": []}, 400, None),
        (
            "chat/completions",
            {
                "model": "small",
                "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            },
            400,
            None,
        ),
    ],
)
def test_what_cannot_be_answered_is_refused_in_openais_form(serving, path, body, status, code):
    response = requests.post(f"{URL}/{path}", json=body, timeout=30)
    assert response.status_code == status, response.text
    assert response.json()["error"]["code"] == code and response.json()["error"]["message"]


def test_a_body_that_is_no_json_is_refused(serving: Any):
    response = requests.post(f"{URL}/completions", data=b"{", timeout=30)
    assert response.status_code == 400 and "not JSON" in response.json()["error"]["message"]


def test_a_client_that_hangs_up_leaves_nothing_behind(serving: Any):
    response = chat(DOCUMENTS[1], "Go on.", max_tokens=3000, stream=True)
    stream = events(response)
    for _ in range(3):
        next(stream)
    response.close()
    eventually(lambda: running() == 0)
    eventually(lambda: leases(serving) == 0)


def running() -> int:
    """Sequences in all replicas, by what they tell."""
    from ray import serve

    handle = serve.get_deployment_handle("Replica", "p2pcache")
    told = [handle.stats.remote().result(timeout_s=30) for _ in range(6)]
    return sum(t["batcher"]["running"] + t["batcher"]["waiting"] for t in told)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_an_answer_goes_on_when_its_replica_does_not(serving: Any, how: signal.Signals):
    eventually(lambda: len(pids()) == 2, 90)
    ask = {"max_tokens": 600, "stream": True, "stream_options": {"include_usage": True}}
    whole, usage = streamed(chat(DOCUMENTS[2], "On and on.", **ask), lambda: None)
    length = usage["completion_tokens"]
    assert usage["p2pcache"]["attempts"] == 1 and length > 100
    before, struck = pids(), []

    def strike() -> None:
        struck.append(busy_one(before))
        os.kill(struck[0], how)

    try:
        text, usage = streamed(chat(DOCUMENTS[2], "On and on.", **ask), strike)
        assert text == whole
        assert usage["p2pcache"]["attempts"] == 2 and usage["completion_tokens"] == length
    finally:
        if how is signal.SIGSTOP:
            os.kill(struck[0], signal.SIGKILL)
    eventually(lambda: len(pids() - set(struck)) == 2, 90)


def test_a_replica_that_is_frozen_before_it_accepts_is_left_for_another(serving: Any):
    eventually(lambda: len(pids()) == 2, 90)
    for attempt in range(20):  # warm, so that Serve believes its own word of how busy replicas are
        answer(chat(DOCUMENTS[4], f"Attempt {attempt}.", max_tokens=1))
    frozen = next(iter(pids()))
    os.kill(frozen, signal.SIGSTOP)
    try:
        usages = [answer(chat(DOCUMENTS[i], f"And {i}?", max_tokens=2))[1]["p2pcache"] for i in range(6)]
        assert max(u["attempts"] for u in usages) <= 2
        assert sum(u["attempts"] - 1 for u in usages) <= 2, "what one has found out spares the others"
    finally:
        os.kill(frozen, signal.SIGKILL)
    eventually(lambda: len(pids() - {frozen}) == 2, 90)


class Parrot:
    """An engine of somebody's own: the four methods and nothing else. Says the prompt again."""

    def __init__(self, config: Any, client: Any):
        pass

    def begin(self, request: Any) -> Any:
        return SimpleNamespace(kv_bytes=1, cached_tokens={}, say=iter(request.tokens.tolist() * 9))

    def prefill(self, sequence: Any) -> int:
        return next(sequence.say)

    def decode(self, sequences: Any) -> list[int]:
        return [next(s.say) for s in sequences]

    def finish(self, sequence: Any) -> None:
        pass


def test_an_engine_of_four_methods_is_served(serving: Any, model: str):
    from ray import serve

    from p2pcache.serve.app import deployment

    serve.run(
        deployment(Parrot, model=model, name="parrot", replica_cpus=0), name="parrot", route_prefix="/parrot"
    )
    try:
        body = {"model": "parrot", "prompt": "hello ", "max_tokens": 12}
        said = requests.post(URL.replace("/v1", "/parrot/v1") + "/completions", json=body, timeout=60).json()
        assert (
            said["choices"][0]["text"] == "hello hello " and said["choices"][0]["finish_reason"] == "length"
        )
    finally:
        serve.delete("parrot")


def test_input_made_to_break_a_server_is_refused(serving: Any):
    post = lambda body: requests.post(f"{URL}/completions", data=body, timeout=30)  # noqa: E731
    assert post(b"[" * 200_000).status_code == 400
    assert post(b'{"model": "small", "prompt": "\\ud800"}').status_code == 400
    assert post(b'{"model": "small", "prompt": "' + b"x" * (9 << 20) + b'"}').status_code == 413
    tokens = json.dumps({"model": "small", "prompt": [5] * 1_000_000}).encode()
    response = post(tokens)
    assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"
    assert requests.get(f"{URL}/models/small", timeout=30).json()["id"] == "small"
    assert requests.get(f"{URL}/models/other", timeout=30).json()["error"]["code"] == "model_not_found"


def test_a_stop_text_keeps_the_account_of_the_cache(serving: Any):
    whole, usage = answer(chat(*DOCUMENTS[:2], "Stop!", max_tokens=30))
    stopped, cut = answer(chat(*DOCUMENTS[:2], "Stop!", max_tokens=30, stop=[whole[5:8]]))
    assert stopped == whole[: whole.index(whole[5:8])]
    assert cut["prompt_tokens_details"]["cached_tokens"] > 400


def streamed(response: requests.Response, after_some: Callable[[], None]) -> tuple[str, dict[str, Any]]:
    """A stream's whole text and its usage; `after_some` is called once, in the middle of it."""
    pieces: list[str] = []
    for event in events(response):
        assert "error" not in event, event
        usage = event["usage"]
        pieces += [c["delta"].get("content", "") for c in event["choices"]]
        if len(pieces) == 20:
            after_some()
    return "".join(pieces), usage


def busy_one(among: set[int]) -> int:
    """The replica that computes: the one whose process uses the processor."""

    def ticks(pid: int) -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])

    before = {pid: ticks(pid) for pid in among}
    time.sleep(0.3)  # a span to measure over
    return max(among, key=lambda pid: ticks(pid) - before[pid])
