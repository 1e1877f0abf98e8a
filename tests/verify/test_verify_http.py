"""Asking a server over HTTP: what is sent, and what is made of the answer. The server here is a stand-in for
the wire alone; what vLLM answers is tried on vLLM (test_verify_engine.py)."""

from __future__ import annotations

import base64
import json
import os
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvtrace.verify.answers import Stopped, VerifyError
from kvtrace.verify.engine import RequestToMake
from kvtrace.verify.http import Address, Client
from kvtrace.verify.served import Server


class Wire(BaseHTTPRequestHandler):
    bodies: ClassVar[list[dict[str, Any]]] = []
    resets: ClassVar[list[str]] = []
    waits: ClassVar[threading.Event] = threading.Event()
    release: ClassVar[threading.Event] = threading.Event()

    def log_message(self, *words: Any) -> None:
        pass

    def do_GET(self) -> None:
        # a second name of the model is no adapter
        self._say({"data": [{"id": "tiny"}, {"id": "also"}, {"id": "lora", "parent": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if self.path.startswith("/reset"):
            self.resets.append(self.path)
            self._say({"success": len(self.resets) > 1})
            return
        if self.path == "/detokenize":
            self._say({"prompt": " ".join(map(str, body["tokens"]))})
            return
        if body.get("prompt") == [143]:  # never answered: whoever asks is told to stop first
            self.waits.set()
            os.kill(os.getpid(), signal.SIGTERM)
            self.release.wait(30)
            self.waits.clear()
            return
        self.bodies.append({**body, "id": self.headers["X-Request-Id"]})
        if body.get("prompt") == [0]:
            self._say({"error": {"message": "no such prompt"}}, 400)
            return
        told = {
            "tokens": ["token_id:7", "token_id:8"],
            "token_logprobs": [-0.5, None],
            "top_logprobs": [{"token_id:7": -0.5, "token_id:9": -0.6}, None],
        }
        if self.path == "/v1/chat/completions":
            best = [{"token": "token_id:7", "logprob": -0.5}, {"token": "token_id:9", "logprob": -0.6}]
            told = {"content": [{**best[0], "top_logprobs": best}]}
        choice = {"choices": [{"logprobs": told, "finish_reason": "length"}]}
        if not body.get("stream"):
            self._say(choice)
            return
        self.send_response(200)
        self.end_headers()
        for data in (json.dumps(choice), json.dumps(choice), "[DONE]"):
            self.wfile.write(f"data: {data}\n\n".encode())

    def _say(self, value: Any, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def client() -> Iterator[Client]:
    Wire.bodies.clear()
    Wire.resets.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Wire)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield Client(Address("127.0.0.1", server.server_address[1]))
    server.shutdown()
    server.server_close()
    thread.join()


def test_tokens_and_what_was_nearly_chosen_come_back(client: Client) -> None:
    (reply,) = client.ask([RequestToMake("kvverify-1", [5, 6], 2, salt="x")], 5)
    assert reply.tokens == (7, 8) and not reply.error
    assert reply.logprobs[0] == (-0.5, {7: -0.5, 9: -0.6})
    (body,) = Wire.bodies
    assert (body["model"], body["prompt"], body["cache_salt"], body["id"]) == (
        "tiny",
        [5, 6],
        "x",
        "kvverify-1",
    )
    assert body["temperature"] == 0 and body["ignore_eos"]


def test_a_lora_adapter_is_asked_by_its_name(client: Client) -> None:
    assert list(client.models) == ["tiny", "lora"]
    client.ask([RequestToMake("kvverify-1", [5, 6], 2, adapter=1)], 5)
    assert [body["model"] for body in Wire.bodies] == ["lora"]


def test_an_image_stands_in_front_of_the_words_of_its_tokens(client: Client) -> None:
    for number in (1, 2):
        (reply,) = client.ask([RequestToMake("kvverify-1", [5, 6], 2, salt="x", image=number)], 5)
        assert reply.tokens == (7,) and reply.logprobs == ((-0.5, {7: -0.5, 9: -0.6}),)
    one, other = (body["messages"][0]["content"] for body in Wire.bodies)
    assert one[1] == other[1] == {"type": "text", "text": "5 6"}
    assert Wire.bodies[0]["cache_salt"] == "x" and "prompt" not in Wire.bodies[0]
    urls = [content[0]["image_url"]["url"] for content in (one, other)]
    pixels = [base64.b64decode(url.partition(",")[2]) for url in urls]
    assert pixels[0] != pixels[1] and [len(one) for one in pixels] == [13 + 64 * 64 * 3] * 2


def test_an_error_is_the_servers_own_words(client: Client) -> None:
    (reply,) = client.ask([RequestToMake("a", [0], 2)], 5)
    assert reply.error == "HTTP 400: no such prompt" and not reply.late


def test_requests_are_asked_together(client: Client) -> None:
    replies = client.ask([RequestToMake(f"r-{n}", [n + 1], 2) for n in range(4)], 5)
    assert [reply.tokens for reply in replies] == [(7, 8)] * 4
    assert {body["id"] for body in Wire.bodies} == {f"r-{n}" for n in range(4)}


def test_who_leaves_and_who_is_preempted(client: Client) -> None:
    (left,) = client.ask([RequestToMake("a", [1], 4, leaves=True)], 5)
    assert left.tokens == (7, 8)  # of the first piece alone
    (stayed,) = client.ask([RequestToMake("b", [1], 4, preempted=True)], 5)
    assert stayed.tokens == (7, 8, 7, 8) and Wire.resets == [
        "/reset_prefix_cache?reset_running_requests=true"
    ]


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    nobody = Client(Address("127.0.0.1", 9))
    assert not nobody.healthy and nobody.reset() == (0, None)
    (reply,) = nobody.ask([RequestToMake("a", [1], 1)], 5)
    assert reply.error and not reply.tokens


def test_no_other_server_is_touched(client: Client, tmp_path: Path) -> None:
    port = str(client._address.port)
    server = Server(["true"], ["vllm", "serve", "--port", port], tmp_path / "log", 5)
    with pytest.raises(VerifyError, match="listens on"):
        server.start()
    assert not Wire.bodies and not Wire.resets


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    words = ["python3", "-c", "raise SystemExit('ValueError: no such model')"]
    server = Server(words, ["vllm", "serve", "--port", "1"], tmp_path / "log", 30)
    with pytest.raises(VerifyError, match="exit code 1 while starting: ValueError: no such model"):
        server.start()
    with pytest.raises(VerifyError, match="cannot start"):
        Server(["/no/such"], ["x", "--port", "1"], tmp_path / "log", 5).start()


def test_who_is_told_to_stop_waits_for_no_answer(client: Client) -> None:
    def stop(*_: object) -> None:
        raise Stopped  # as the command does

    before = signal.signal(signal.SIGTERM, stop)
    try:
        with pytest.raises(Stopped):
            client.ask([RequestToMake("a", [143], 1)], patience=600.0)
        assert Wire.waits.is_set(), "the answer was waited for"
    finally:
        signal.signal(signal.SIGTERM, before)
        Wire.release.set()
