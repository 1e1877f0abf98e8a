"""Reads (and, for connectors that only pull, fills) the store of a generated connector from outside it.

Follows the plan's own naming and layout; shares no code with the connector.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import pickle
import socket
import sqlite3
import struct
import subprocess
import sys
import urllib.parse
import zlib
from collections.abc import Mapping
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import Any

import numpy as np
from kvgen.plan import Plan
from kvgen.stores import FILE_KINDS, HEADER, SERVER_KINDS

SERVER = Path(__file__).with_name("server.py")
SUFFIX = {"npy": ".npy", "safetensors": ".safetensors", "raw": ".bin", "pt": ".pt"}


def record_name(plan: Plan, key: str, layers: list[str], number: int) -> str:
    """The name of one layer's record (of all layers', where they are stored together)."""
    if plan.record == "stack":
        return key
    return {
        "folder": f"{key}/{layers[number]}",
        "number-first": f"{number:02d}-{key}",
        "number-last": f"{key}.{number}",
        "layer-last": f"{key}@{layers[number]}",
    }[plan.naming]


class StoreView:
    """One run's store.

    Attributes:
        place: what the connector's settings get: a directory, host:port, or a prefix of segments.
    """

    def __init__(self, plan: Plan, folder: Path, tag: str) -> None:
        self.plan, self.folder = plan, folder / "kv"
        self.kind = plan.store.kind
        self._process: subprocess.Popen[str] | None = None
        self._memory: Mapping[str, Any] = {}
        folder.mkdir(parents=True, exist_ok=True)
        if self.kind == "shm":
            self.place = f"kvgen{tag}"
        elif self.kind in SERVER_KINDS:
            self.place = f"127.0.0.1:{self._serve()}"
        else:
            self.place = str(self.folder)  # the connector makes it itself, or does not

    def _serve(self) -> int:
        if self.plan.fault == "server-down":
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                return int(probe.getsockname()[1])
        mode = {"server-slow": "late", "server-refuses": "refuse"}.get(self.plan.fault, "keep")
        command = [sys.executable, "-S", "-E", str(SERVER), self.kind, mode]
        # nothing of the traced process's environment: the server is no part of the run
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={}
        )
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def use_memory(self, contents: Mapping[str, Any]) -> None:
        """The dictionary of a store in the connector's own memory."""
        self._memory = contents

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()
            self._process = None

    # --- reading ----------------------------------------------------------------------------------

    def read(self, name: str) -> np.ndarray | None:
        """The floats of a record, flat; None where there is none. What is cut comes as far as it goes."""
        try:
            return self._read(name)
        except Exception:  # what cannot be read, for whatever reason of its format, is not there
            return None

    def _read(self, name: str) -> np.ndarray | None:
        if self.kind in FILE_KINDS:
            return self._read_file(self.folder / f"{name}{SUFFIX[self.kind]}")
        if self.kind == "memory":
            value = self._memory[name]
            return self._floats(value) if isinstance(value, bytes) else _flat(value)
        if self.kind == "container":
            return self._read_container(name)
        if self.kind == "sqlite":
            with sqlite3.connect(self.folder / "kv.sqlite") as db:
                row = db.execute("SELECT value FROM kv WHERE name = ?", (name,)).fetchone()
            return None if row is None else self._floats(row[0])
        if self.kind == "arena":
            index = json.loads((self.folder / "index.json").read_text())
            place, size = index["places"][name], index["size"]
            with (self.folder / "arena.bin").open("rb") as file:
                file.seek(place * size)
                return self._floats(file.read(size))
        if self.kind == "shm":
            return self._read_segment(name)
        data = self._ask("GET", name)
        return None if data is None else self._floats(data)

    def _floats(self, data: bytes) -> np.ndarray:
        data = _unpacked(data, self.plan.store.pack)
        return np.frombuffer(data[: len(data) // 4 * 4], dtype=np.float32)

    def _read_file(self, path: Path) -> np.ndarray | None:
        if not path.exists():
            return None
        if self.kind == "npy":
            return np.load(path).astype(np.float32).ravel()
        if self.kind == "raw":
            return self._floats(path.read_bytes())
        if self.kind == "pt":
            import torch

            return _flat(torch.load(path))
        import safetensors.numpy

        return np.asarray(safetensors.numpy.load_file(path)["kv"], dtype=np.float32).ravel()

    def _read_container(self, name: str) -> np.ndarray | None:
        rows = [json.loads(line) for line in (self.folder / "index.jsonl").read_text().splitlines()]
        found = [(at, size) for key, at, size in rows if key == name]
        if not found or not (self.folder / "data.kv").exists():
            return None
        at, size = found[-1]
        with (self.folder / "data.kv").open("rb") as file:
            file.seek(at)
            return self._floats(file.read(size))

    def _segment(self, name: str) -> str:
        return self.place + hashlib.md5(name.encode()).hexdigest()[:16]

    def _read_segment(self, name: str) -> np.ndarray | None:
        segment = shared_memory.SharedMemory(self._segment(name))
        size = struct.unpack("<q", bytes(segment.buf[:8]))[0]
        data = bytes(segment.buf[8 : 8 + size])
        segment.close()
        return self._floats(data)

    def forget_segments(self) -> None:
        """Shared memory outlives its process unless somebody removes it."""
        for path in Path("/dev/shm").glob(f"{self.place}*"):
            path.unlink(missing_ok=True)
            resource_tracker.unregister(f"/{path.name}", "shared_memory")

    # --- writing, for connectors that only pull ------------------------------------------------------

    def write(self, name: str, values: np.ndarray) -> None:
        self.folder.mkdir(exist_ok=True)
        values = np.ascontiguousarray(values, dtype=np.float32)
        data = _packed(values, self.plan.store.pack)
        if self.kind in SERVER_KINDS:
            self._ask("PUT", f"!{name}", data)
        elif self.kind == "sqlite":
            with sqlite3.connect(self.folder / "kv.sqlite") as db:
                db.execute("CREATE TABLE IF NOT EXISTS kv (name TEXT PRIMARY KEY, value BLOB)")
                db.execute("INSERT OR REPLACE INTO kv VALUES (?, ?)", (name, data))
        elif self.kind == "raw":
            path = self.folder / f"{name}{SUFFIX[self.kind]}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        else:
            self._write_file(self.folder / f"{name}{SUFFIX[self.kind]}", values)

    def _write_file(self, path: Path, values: np.ndarray) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.kind == "npy":
            np.save(path, values)
        elif self.kind == "pt":
            import torch

            torch.save(torch.from_numpy(values), path)
        else:
            import safetensors.numpy

            safetensors.numpy.save_file({"kv": values}, path)

    def _ask(self, op: str, name: str, data: bytes = b"") -> bytes | None:
        if self._process is None:
            return None
        host, port = self.place.split(":")
        if self.kind == "http":
            link = http.client.HTTPConnection(host, int(port), timeout=10)
            link.request(op, "/" + urllib.parse.quote(name), body=data or None)
            answer = link.getresponse()
            body = answer.read()
            link.close()
            return body if answer.status < 300 else None
        with socket.create_connection((host, int(port)), timeout=10) as link:
            pipe = link.makefile("rwb")
            if self.kind == "line":
                pipe.write(f"{op} {name} {len(data)}\n".encode() + data)
                pipe.flush()
                verdict, size = pipe.readline().split()
                body = pipe.read(int(size))
                return body if verdict == b"OK" else None
            text = name.encode()
            pipe.write(struct.pack(">cHI", op[:1].encode(), len(text), len(data)) + text + data)
            pipe.flush()
            verdict, size = struct.unpack(">cI", pipe.read(5))
            body = pipe.read(size)
            return body if verdict == b"+" else None


def _packed(values: np.ndarray, pack: str) -> bytes:
    if pack == "zlib":
        return zlib.compress(values.tobytes(), 1)
    if pack == "pickle":
        return pickle.dumps(values)
    return (HEADER if pack == "header" else b"") + values.tobytes()


def _unpacked(data: bytes, pack: str) -> bytes:
    if pack == "zlib":
        return zlib.decompress(data)
    if pack == "pickle":
        return bytes(pickle.loads(data).tobytes())
    return data[len(HEADER) :] if pack == "header" else data


def _flat(value: Any) -> np.ndarray:
    return np.asarray(value.detach().float().numpy(), dtype=np.float32).ravel()
