"""Connections that are made or refused through Python's sockets, and how many bytes go out.

``socket.socket`` is wrapped where bytes go out or a connection is made: http.client, redis and most other
clients written in Python pass there; ``multiprocessing.connection`` writes past it, and is wrapped itself.
A call that is not watched pays one look at a thread's variable. What is sent, and what comes back, is never
looked at.
"""

from __future__ import annotations

import errno
import os
import socket
import weakref
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from kvtrace.agent.outside.files import here
from kvtrace.agent.state import AGENT
from kvtrace.agent.wrap import frames
from kvtrace.agent.wrap.imports import when_imported
from kvtrace.agent.wrap.once import wrap_once

_SENDS, _CONNECTS = ("send", "sendall"), ("connect", "connect_ex")
_accepted: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""Connections that others made to a server of this process: their ends have a new number each."""
_clients: weakref.WeakValueDictionary[Any, socket.socket] = weakref.WeakValueDictionary()
"""Own address -> a connection of this process to a server, which something was sent through."""
_ON_THE_WAY = frozenset({errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EALREADY, errno.EISCONN})


def install() -> None:
    """Idempotent."""
    for names, around in ((_SENDS, _sending), (_CONNECTS, _connecting)):
        for name in names:
            wrap_once(socket.socket, name, around)
    know_servers()
    when_imported("multiprocessing.connection", _wrap_connection)


def know_servers() -> None:
    """From the agent's start on, for a module of a connector may start its server as it is imported, and that
    waits for its first client before any connector is made. Idempotent."""
    wrap_once(socket.socket, "accept", _accepting)


def _wrap_connection(module: ModuleType) -> None:
    wrap_once(getattr(module, "Connection", None), "_send_bytes", partial(_sending, peer_of=_peer_of))


def _told(tell: Callable[..., None], *args: Any) -> None:
    try:
        tell(*args)
    except Exception:
        AGENT.failed("sockets")


def _sending(original: Any, peer_of: Callable[[Any], str] | None = None) -> Any:
    """``peer_of``: names the other side; of a socket :func:`name_of`."""
    peer_of = peer_of or name_of

    def send(self: Any, data: Any, *args: Any) -> Any:
        watched = here()
        if watched is None:
            return original(self, data, *args)
        try:
            sent = original(self, data, *args)
        except OSError as error:
            if not isinstance(error, (BlockingIOError, InterruptedError)):
                _told(watched.failed, peer_of(self))
            frames.step_out(error)
            raise
        _told(_sent, watched, self, peer_of(self), data, sent)
        return sent

    return send


def _sent(watched: Any, sender: Any, peer: str, data: Any, sent: int | None) -> None:
    if isinstance(sender, socket.socket) and sender not in _accepted and (name := _client_s(sender)):
        _clients[name] = sender
    watched.sent(peer, memoryview(data).nbytes if sent is None else sent)


def _client_s(sock: socket.socket) -> Any:
    """The address by which a server knows a client: that of a Unix path has none but the server's."""
    try:
        return sock.getsockname() or sock.getpeername()
    except OSError:  # it is connected to none
        return ""


def _peer_of(connection: Any) -> str:
    """Of a ``Connection``, which holds the number of a descriptor; "" of a pipe, and of a pair of sockets
    without names."""
    if socket.getdefaulttimeout() is not None:
        return ""  # a socket object would make the descriptor, which is the connector's too, non-blocking
    try:
        with socket.socket(fileno=os.dup(connection.fileno())) as sock:
            return name_of(sock)
    except OSError:
        return ""


def _connecting(original: Any) -> Any:
    def connect(self: Any, address: Any) -> Any:
        watched = here()
        if watched is None:
            return original(self, address)
        try:
            result = original(self, address)
        except OSError as error:
            if not isinstance(error, (BlockingIOError, InterruptedError)):
                _told(watched.failed, name_of_address(address))
            frames.step_out(error)
            raise
        if result and result not in _ON_THE_WAY:  # connect_ex
            _told(watched.failed, name_of_address(address))
        return result

    return connect


def _accepting(original: Any) -> Any:
    def accept(self: Any) -> Any:
        try:
            result = original(self)
        except OSError as error:
            frames.step_out(error)
            raise
        _told(_accepted.add, result[0])
        return result

    return accept


def name_of(sock: Any) -> str:
    """The peer: ``tcp host:port``, or ``unix path``; of a connection to a server of this process that one,
    and "" of what it answers to a client of this process: that is nowhere stored."""
    try:
        if sock in _accepted:
            return "" if _answers_here(sock) else name_of_address(sock.getsockname())
        return name_of_address(sock.getpeername())
    except OSError:
        return ""


def _answers_here(sock: Any) -> bool:
    try:
        return (sock.getpeername() or sock.getsockname()) in _clients
    except OSError:  # it is gone
        return False


def name_of_address(peer: Any) -> str:
    if isinstance(peer, tuple) and len(peer) >= 2:
        return f"tcp {peer[0]}:{peer[1]}"
    return f"unix {peer}" if peer and isinstance(peer, str) else ""
