"""The places that a connector's configuration names: directories, and hosts with a port. Each is looked at in
a thread with a time bound: a file system may hang, a host may not answer."""

from __future__ import annotations

import os
import re
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

PATIENCE_SECONDS = 3.0
_MOST = 12
_HOST = re.compile(
    r"(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?(?:\.[A-Za-z0-9-]+)*):(\d{1,5})\Z"
)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{1,20}://")
_LISTENS = {"0.0.0.0", "::", "*", ""}
_NO_HOST = {"file", "unix", "ipc", "inproc", "s3", "gs", "hdfs", "posix", "local"}
"""Schemes whose first part is no host to connect to."""
_PORTS = {"http": 80, "https": 443, "redis": 6379, "rediss": 6379, "valkey": 6379}


@dataclass(frozen=True)
class ConfigPlace:
    """A place, as far as its name goes: ``key`` is that of the configuration, with dots between."""

    key: str
    path: str = ""
    host: str = ""
    port: int = 0

    @property
    def shown(self) -> str:
        return self.path or (f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}")


@dataclass(frozen=True)
class PlaceSeen:
    """What is there.

    Attributes:
        state: of a path: ``directory``, ``file``, ``absent`` (it can be made), ``blocked`` (a file stands in
            its way), ``refused`` (no right to write). Of a host: ``open``, ``closed``. ``hung``: no answer.
        detail: another directory that is in the way or not writable; the reason why there was no connection.
        free: bytes free where it lies.
    """

    place: ConfigPlace
    state: str
    detail: str = ""
    free: int | None = None


def places(extra: Mapping[str, Any]) -> list[ConfigPlace]:
    """All absolute paths, URLs and ``host:port`` among the values, by their keys."""
    return list(dict.fromkeys(_places(extra, "")))[:_MOST]


def _places(value: Any, key: str) -> Iterator[ConfigPlace]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name != "connectors":  # those of a MultiConnector have places of their own
                yield from _places(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _places(inner, key)
    elif isinstance(value, str):
        yield from _place(value.strip(), key)


def _place(text: str, key: str) -> Iterator[ConfigPlace]:
    if text.startswith("file:///"):
        text = text[len("file://") :]
    if text.startswith("/") and "\0" not in text and len(text) < 4096:
        yield ConfigPlace(key, path=text)
    elif _URL.match(text):
        try:
            url = urlsplit(text)
            host, port = url.hostname or "", url.port or _PORTS.get(url.scheme, 0)
        except ValueError:
            return
        if host not in _LISTENS and port and url.scheme.lower() not in _NO_HOST:
            yield ConfigPlace(key, host=host, port=port)
    elif match := _HOST.match(text):
        host = match[1].strip("[]")
        if host not in _LISTENS and 0 < int(match[2]) < 65536 and not host.isdigit():
            yield ConfigPlace(key, host=host, port=int(match[2]))


def look(found: list[ConfigPlace], patience: float = PATIENCE_SECONDS) -> list[PlaceSeen]:
    """What is at each, all at once."""
    jobs = [(place, _start(_connect if place.host else _directory, place)) for place in found]
    return [job(patience) or PlaceSeen(place, "hung") for place, job in jobs]


def _start(
    work: Callable[[ConfigPlace], PlaceSeen], place: ConfigPlace
) -> Callable[[float], PlaceSeen | None]:
    answer: list[PlaceSeen] = []
    thread = threading.Thread(target=lambda: answer.append(work(place)), daemon=True)
    thread.start()

    def wait(seconds: float) -> PlaceSeen | None:
        thread.join(seconds)
        return answer[0] if answer else None

    return wait


def _connect(place: ConfigPlace) -> PlaceSeen:
    try:
        socket.create_connection((place.host, place.port), PATIENCE_SECONDS * 0.8).close()
    except OSError as error:
        return PlaceSeen(place, "closed", (error.strerror or str(error) or type(error).__name__).lower())
    return PlaceSeen(place, "open")


def _directory(place: ConfigPlace) -> PlaceSeen:
    path = place.path
    if os.path.isfile(path):
        return PlaceSeen(place, "file")
    there = path
    while not os.path.lexists(there) and os.path.dirname(there) != there:
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        return PlaceSeen(place, "blocked", there)
    if not os.access(there, os.W_OK | os.X_OK):
        return PlaceSeen(place, "refused", "" if there == path else there)
    try:
        free: int | None = shutil.disk_usage(there).free
    except OSError:
        free = None
    return PlaceSeen(place, "directory" if there == path else "absent", free=free)
