"""What goes out through Python's sockets, and what comes back.

``socket.socket`` is wrapped where bytes go out, come in, or a connection is made: http.client, redis and most
other clients written in Python pass there, ``makefile()`` included. A call that is not watched pays one look
at a thread's variable. Nothing that is sent is kept but what was found in it (``pieces.py``).

An answer is an error where the call that waits for it raises, and where its first bytes say so: an HTTP
status of 400 or above, ``-`` or ``ERR`` (the protocols of Redis and Memcached), a word such as ``REFUSED`` or
``FAILED`` at its begin. Answers in an unknown protocol say nothing.
"""

from __future__ import annotations

import functools
import re
import socket
from collections.abc import Callable
from typing import Any

from kvtrace.agent import frames
from kvtrace.agent.state import AGENT
from kvtrace.agent.watch.origin import HERE

_HEAD = 64
_SENDS, _RECEIVES, _CONNECTS = ("send", "sendall"), ("recv", "recv_into"), ("connect", "connect_ex")
_HTTP = re.compile(rb"HTTP/\d(?:\.\d)? (\d{3})")
_REFUSED = re.compile(
    rb"\s*(?:-|ERR|SERVER_ERROR|CLIENT_ERROR|FAIL|REFUSED|REJECTED|DENIED|NOT_STORED|FULL|QUOTA|NO SPACE)",
    re.I,
)


def refuses(answer: bytes) -> bool:
    """Whether the first bytes of an answer say that what was asked was not done."""
    http = _HTTP.match(answer)
    return int(http.group(1)) >= 400 if http else _REFUSED.match(answer) is not None


_installed = False


def install() -> None:
    """Idempotent."""
    global _installed
    if _installed:
        return
    _installed = True
    for names, around in ((_SENDS, _sending), (_RECEIVES, _receiving), (_CONNECTS, _connecting)):
        for name in names:
            original = getattr(socket.socket, name)
            setattr(socket.socket, name, functools.update_wrapper(around(original), original))


def _left() -> Any:
    work = HERE.work
    return None if work is None else getattr(work, "left", None)


def _told(tell: Callable[..., None], *args: Any) -> None:
    try:
        tell(*args)
    except Exception:
        AGENT.failed("sockets")


def _failed(left: Any, sock: Any, error: OSError) -> None:
    if not isinstance(error, (BlockingIOError, InterruptedError)):
        _told(left.failed, sock)


def _sending(original: Any) -> Any:
    def send(self: Any, data: Any, *args: Any) -> Any:
        left = _left()
        if left is None:
            return original(self, data, *args)
        try:
            sent = original(self, data, *args)
        except OSError as error:
            _failed(left, self, error)
            frames.step_out(error)
            raise
        _told(left.sent, self, data, sent)
        return sent

    return send


def _receiving(original: Any) -> Any:
    def receive(self: Any, first: Any, *args: Any, **kwargs: Any) -> Any:
        left = _left()
        if left is None:
            return original(self, first, *args, **kwargs)
        try:
            came = original(self, first, *args, **kwargs)
        except OSError as error:
            _failed(left, self, error)
            frames.step_out(error)
            raise
        _told(_answered, left, self, first, came)
        return came

    return receive


def _answered(left: Any, sock: Any, given: Any, came: Any) -> None:
    if isinstance(came, int):  # recv_into
        came = bytes(memoryview(given).cast("B")[: min(came, _HEAD)])
    left.answered(sock, came[:_HEAD])


def _connecting(original: Any) -> Any:
    def connect(self: Any, address: Any) -> Any:
        left = _left()
        if left is None:
            return original(self, address)
        try:
            result = original(self, address)
        except OSError as error:
            if not isinstance(error, (BlockingIOError, InterruptedError)):
                _told(left.unreachable, address)
            frames.step_out(error)
            raise
        return result

    return connect


def name_of(sock: Any) -> str:
    """The peer: ``tcp host:port``, or ``unix path``."""
    try:
        peer = sock.getpeername()
    except OSError:
        return ""
    return name_of_address(peer)


def name_of_address(peer: Any) -> str:
    if isinstance(peer, tuple) and len(peer) >= 2:
        return f"tcp {peer[0]}:{peer[1]}"
    return f"unix {peer}" if peer and isinstance(peer, str) else ""
