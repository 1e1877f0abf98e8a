"""A vLLM server over HTTP: prompts as token ids, and what its developer mode adds."""

from __future__ import annotations

import base64
import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kvtrace.verify.engine import Reply, RequestToMake

_TOP = 5
"""Best tokens at each place that are asked for."""
_ID = "token_id:"
_SIDE = 64
"""Of an image, in pixels."""
_Parts = tuple[list[int], list[tuple[float, dict[int, float]]], str]


@dataclass(frozen=True)
class Address:
    """Where a server listens. ``key``: its API key, "" none."""

    host: str
    port: int
    key: str = ""

    @property
    def taken(self) -> bool:
        """Whether somebody listens there."""
        try:
            with socket.create_connection((self.host, self.port), 1.0):
                return True
        except OSError:
            return False


class Client:
    """Asks one server."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._names: list[str] = []

    def call(
        self, method: str, path: str, patience: float = 30.0, body: Mapping[str, Any] | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Status (0: no answer) and the JSON object that came back."""
        connection = self._connect(patience)
        try:
            connection.request(method, path, json.dumps(body) if body else None, self._headers())
            answer = connection.getresponse()
            value = json.loads(answer.read() or b"{}")
            return answer.status, value if isinstance(value, dict) else {}
        except (OSError, http.client.HTTPException):
            return 0, {}
        except ValueError:
            return answer.status, {}
        finally:
            connection.close()

    @property
    def healthy(self) -> bool:
        return self.call("GET", "/health", patience=5.0)[0] == 200

    def reset(self, running: bool = False) -> tuple[int, bool | None]:
        """Status of the reset, and whether it came about (None: this version does not tell)."""
        more = "?reset_running_requests=true" if running else ""
        status, value = self.call("POST", f"/reset_prefix_cache{more}")
        return status, value.get("success") if isinstance(value.get("success"), bool) else None

    @property
    def models(self) -> Sequence[str]:
        """Names of the model, and of its LoRA adapters."""
        if not self._names:
            listed = self.call("GET", "/v1/models")[1].get("data") or ()
            self._names = [str(one["id"]) for at, one in enumerate(listed) if not at or one.get("parent")]
        return self._names or [""]

    def ask(self, requests: Sequence[RequestToMake], patience: float) -> list[Reply]:
        """Together; the replies in their order."""
        begin = threading.Barrier(len(requests))

        def one(request: RequestToMake) -> Reply:
            begin.wait()
            return self._one(request, patience)

        pool = ThreadPoolExecutor(len(requests))
        try:
            return list(pool.map(one, requests))
        finally:
            begin.abort()  # who is told to stop waits for no answer, and no thread for the others
            pool.shutdown(wait=False)

    def body(self, request: RequestToMake) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.models[request.adapter],
            "max_tokens": request.generate, "temperature": 0.0, "seed": 0, "ignore_eos": True,
            "return_tokens_as_token_ids": True,
        }  # fmt: skip
        body |= (
            {"messages": self._chat(request), "logprobs": True, "top_logprobs": _TOP}
            if request.image
            else {"prompt": list(request.tokens), "logprobs": _TOP}
        )
        more = {"cache_salt": request.salt, "kv_transfer_params": request.transfer}
        return body | {name: value for name, value in more.items() if value}

    def _chat(self, request: RequestToMake) -> list[dict[str, Any]]:
        """The words of its tokens behind its image. They may be other tokens there: the run has those."""
        tokens = {"model": self.models[request.adapter], "tokens": list(request.tokens)}
        words = self.call("POST", "/detokenize", body=tokens)[1].get("prompt", "")
        image = {"type": "image_url", "image_url": {"url": picture(request.image)}}
        return [{"role": "user", "content": [image, {"type": "text", "text": str(words)}]}]

    def _one(self, request: RequestToMake, patience: float) -> Reply:
        began = time.monotonic()
        streamed = request.leaves or request.preempted
        body = self.body(request) | ({"stream": True} if streamed else {})
        connection = self._connect(patience)
        try:
            path = "/v1/chat/completions" if request.image else "/v1/completions"
            connection.request("POST", path, json.dumps(body), self._headers(request.id))
            answer = connection.getresponse()
            if answer.status != 200:
                said = answer.read(4096).decode("utf-8", "replace")
                return Reply(error=f"HTTP {answer.status}: {_message(said)}", seconds=_since(began))
            value = {} if streamed else json.loads(answer.read())
            tokens, best, error = self._stream(answer, request) if streamed else _parts(value)
            transfer = value.get("kv_transfer_params")
            return Reply(tuple(tokens), tuple(best), error, seconds=_since(began), transfer=transfer)
        except TimeoutError:
            return Reply(error=f"no answer in {patience:.0f} s", late=True, seconds=_since(began))
        except (OSError, http.client.HTTPException, ValueError) as error:
            return Reply(error=f"{type(error).__name__}: {error}", seconds=_since(began))
        finally:
            connection.close()

    def _stream(self, answer: http.client.HTTPResponse, request: RequestToMake) -> _Parts:
        tokens: list[int] = []
        best: list[tuple[float, dict[int, float]]] = []
        for event in _events(answer.readline):
            more, also, error = _parts(event)
            if error:
                return tokens, best, error
            first = not tokens and bool(more)
            tokens += more
            best += also
            if first and request.leaves:
                break  # the connection is closed
            if first and request.preempted:
                self.reset(running=True)
        return tokens, best, ""

    def _connect(self, patience: float) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._address.host, self._address.port, timeout=patience)

    def _headers(self, ident: str = "") -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if ident:
            headers["X-Request-Id"] = ident
        if self._address.key:
            headers["Authorization"] = f"Bearer {self._address.key}"
        return headers


def _since(began: float) -> float:
    return time.monotonic() - began


def _message(text: str) -> str:
    try:
        value = json.loads(text)
        return str(value["error"]["message"])[:300]
    except (ValueError, KeyError, TypeError):
        return text[:300]


def _events(line: Callable[[], bytes]) -> Iterator[dict[str, Any]]:
    """Of a stream of server-sent events."""
    while text := line():
        data = text.strip().removeprefix(b"data: ")
        if not data or data == b"[DONE]":
            continue
        value = json.loads(data)
        if isinstance(value, dict):
            yield value


def _parts(value: Mapping[str, Any]) -> _Parts:
    """Tokens, their logprobs and an error, of an answer or a piece of one."""
    if "error" in value:
        return [], [], _message(json.dumps(value))
    choice = (value.get("choices") or [{}])[0]
    told = choice.get("logprobs") or {}
    names = told.get("tokens") or ()
    own = told.get("token_logprobs") or [0.0] * len(names)
    top = told.get("top_logprobs") or [{}] * len(names)
    places = list(zip(names, own, top, strict=False))
    for one in told.get("content") or ():  # of a chat
        others = {other["token"]: other["logprob"] for other in one["top_logprobs"]}
        places.append((one["token"], one["logprob"], others))
    tokens = [_token(name) for name, _, _ in places]
    best = [
        (float(mine or 0.0), {_token(name): float(of) for name, of in (others or {}).items()})
        for _, mine, others in places
    ]
    error = "the server ended it with an error" if choice.get("finish_reason") == "error" else ""
    return tokens, best, error


def picture(number: int) -> str:
    """A URL of an image, another one for each number: noise, as a portable pixmap."""
    noise = random.Random(number).randbytes(_SIDE * _SIDE * 3)
    data = base64.b64encode(b"P6 %d %d 255\n%s" % (_SIDE, _SIDE, noise))
    return f"data:image/x-portable-pixmap;base64,{data.decode()}"


def _token(name: str) -> int:
    """``token_id:17`` -> 17; of a server that writes words instead the same number for the same word."""
    if name.startswith(_ID) and name[len(_ID) :].isdigit():
        return int(name[len(_ID) :])
    return -1 - int.from_bytes(name.encode()[:6], "big")
