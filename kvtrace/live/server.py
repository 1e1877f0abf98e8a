"""A small HTTP server for one text: what Prometheus asks for at ``/metrics``."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Callable

from kvtrace.errors import KvtraceError

MOST_CONNECTIONS = 64
"""At once; past it the oldest that has asked nothing yet is closed."""
SECONDS = 5.0
"""In which a client has to ask, and to take the answer."""
_MOST_HEAD = 1 << 14


class MetricsServer:
    """Answers ``GET /metrics`` with a new text each time; one is made at a time, in a thread of its own. No
    connection has a thread.

    Args:
        host: where it listens.
        port: 0 for any that is free.

    Raises:
        KvtraceError: the port is taken, or the host is not this machine's.
    """

    def __init__(self, host: str, port: int, content_type: str, text: Callable[[], str]) -> None:
        self._host, self._text, self._content_type = host, text, content_type
        self._open: dict[asyncio.Task[None], bool] = {}  # the oldest first; whether it has asked
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Event | None = None
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise KvtraceError(f"cannot listen on {host}:{port}", why, "choose another --port") from None
        self.server_address = self._socket.getsockname()
        self._local = ipaddress.ip_address(self.server_address[0]).is_loopback

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def serve_forever(self) -> None:
        """Until Ctrl-C, or :meth:`shutdown` in another thread."""
        asyncio.run(self._serve())

    def shutdown(self) -> None:
        if self._loop is not None and self._ended is not None:
            self._loop.call_soon_threadsafe(self._ended.set)

    async def _serve(self) -> None:
        self._loop, self._ended, self._lock = asyncio.get_running_loop(), asyncio.Event(), asyncio.Lock()
        self._loop.set_exception_handler(lambda loop, context: None)  # a client's fault is no line of ours
        async with await asyncio.start_server(self._connected, sock=self._socket, limit=_MOST_HEAD):
            await self._ended.wait()
            for task in self._open:
                task.cancel()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._open) >= MOST_CONNECTIONS:
            oldest = next((one for one, asked in self._open.items() if not asked), None)
            if oldest is None:
                writer.transport.abort()
                return
            self._open.pop(oldest)
            oldest.cancel()
        self._open[task] = False
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SECONDS)
            self._open[task] = True
            writer.write(await self._answer(head.decode("latin-1")))
            await asyncio.wait_for(writer.drain(), SECONDS)
        except (OSError, EOFError, asyncio.TimeoutError, asyncio.LimitOverrunError, asyncio.CancelledError):
            writer.transport.abort()  # who hangs up, or says nothing, gets nothing
        finally:
            self._open.pop(task, None)
            writer.close()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await asyncio.wait_for(writer.wait_closed(), SECONDS)

    async def _answer(self, head: str) -> bytes:
        first, *rest = head.split("\r\n")
        method, _, target = first.partition(" ")
        named = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in rest)
        }
        if method not in ("GET", "HEAD"):
            return _reply("405 Method Not Allowed")
        if not self._is_for_us(named.get("host", "")):
            return _reply("421 Misdirected Request")
        if target.partition(" ")[0].partition("?")[0] not in ("/metrics", "/"):
            return _reply("404 Not Found")
        async with self._lock:
            try:
                text = await asyncio.to_thread(self._text)
            except Exception as error:
                return _reply("500 Internal Server Error", body=f"{type(error).__name__}\n".encode())
        return _reply("200 OK", self._content_type, text.encode("utf-8", "replace"), method == "HEAD")

    def _is_for_us(self, host: str) -> bool:
        """A page of somebody's in a browser on this machine comes with a name of theirs, which they let lead
        here. Where another interface was asked for, names are the network's."""
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        name = name.strip("[]").lower()
        return not self._local or name in ("localhost", self._host.lower()) or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _reply(status: str, kind: str = "text/plain", body: bytes = b"", head_alone: bool = False) -> bytes:
    body = body or f"{status}\n".encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode("latin-1") + (b"" if head_alone else body)
