"""Reads (and, for connectors that only pull, fills) the store of a generated connector from outside it.

Follows the plan's own naming and layout; shares no code with the connector.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import lzma
import pickle
import socket
import sqlite3
import struct
import subprocess
import sys
import tempfile
import urllib.parse
import zlib
from collections.abc import Mapping
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import Any

import numpy as np
from kvgen.plan import Plan
from kvgen.stores import FILE_KINDS, HEADER, LOSSY_PACKS, ROW, SECRET, SERVER_KINDS

SERVER = Path(__file__).with_name("server.py")
SUFFIX = {"npy": ".npy", "safetensors": ".safetensors", "raw": ".bin", "pt": ".pt", "writer": ".bin"}


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


_MODES = {"server-slow": "late", "server-refuses": "refuse", "server-refuses-some": "some"}


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
        elif self.kind == "daemon":
            self.place = f"{tempfile.gettempdir()}/kvgen-{tag}.sock"  # names of sockets are short
        elif self.kind in SERVER_KINDS:
            self.place = f"127.0.0.1:{self._serve()}"
        else:
            self.place = str(self.folder)  # the connector makes it itself, or does not

    def _serve(self) -> int:
        if self.plan.fault == "server-down":
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                return int(probe.getsockname()[1])
        mode = _MODES.get(self.plan.fault, "keep")
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
        if self.kind == "daemon" and Path(self.place).exists():
            with contextlib.suppress(OSError, struct.error):
                self._ask("QUIT", "")
            Path(self.place).unlink(missing_ok=True)
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
        if self.kind in (*FILE_KINDS, "writer"):
            return self._read_file(self.folder / f"{name}{SUFFIX[self.kind]}")
        if self.kind == "memory":
            value = self._memory[name]
            return self._floats(value) if isinstance(value, bytes) else _flat(value)
        if self.kind in ("container", "pwrite"):
            return self._read_container(name, {"container": "data.kv", "pwrite": "arena.kv"}[self.kind])
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
        if self.kind == "places":
            place = json.loads((self.folder / "index.json").read_text())["places"][name]
            return self._floats((self.folder / f"{place:04d}.kv").read_bytes())
        if self.kind == "journal":
            number, at, size = json.loads((self.folder / "index.json").read_text())[name]
            (path,) = self.folder.glob(f"*-{number:04d}.kv")
            return self._floats(path.read_bytes()[at : at + size])
        if self.kind == "shm":
            return self._read_segment(name)
        data = self._ask("GET", name)
        return None if data is None else self._floats(data)

    def _floats(self, data: bytes) -> np.ndarray:
        return floats(data, self.plan.store.pack)

    def _read_file(self, path: Path) -> np.ndarray | None:
        if not path.exists():
            return None
        if self.kind == "npy":
            return np.load(path).astype(np.float32).ravel()
        if self.kind in ("raw", "writer"):
            return self._floats(path.read_bytes())
        if self.kind == "pt":
            import torch

            return _flat(torch.load(path))
        import safetensors.numpy

        return np.asarray(safetensors.numpy.load_file(path)["kv"], dtype=np.float32).ravel()

    def _read_container(self, name: str, data: str) -> np.ndarray | None:
        rows = [json.loads(line) for line in (self.folder / "index.jsonl").read_text().splitlines()]
        found = [(at, size) for key, at, size in rows if key == name]
        if not found or not (self.folder / data).exists():
            return None
        at, size = found[-1]
        with (self.folder / data).open("rb") as file:
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
        data = packed(values, self.plan.store.pack)
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
        if self.kind == "daemon":
            with socket.socket(socket.AF_UNIX) as link:
                link.connect(self.place)
                return _ask_frames(link, op, name, data)
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
            return _ask_frames(link, op, name, data)


def _ask_frames(link: socket.socket, op: str, name: str, data: bytes) -> bytes | None:
    text, pipe = name.encode(), link.makefile("rwb")
    pipe.write(struct.pack(">cHI", op[:1].encode(), len(text), len(data)) + text + data)
    pipe.flush()
    verdict, size = struct.unpack(">cI", pipe.read(5))
    body = pipe.read(size)
    return body if verdict == b"+" else None


def floats(data: bytes, pack: str) -> np.ndarray:
    """What a connector packed, flat. Of what was cut as much as is there."""
    if pack in LOSSY_PACKS:
        return _widened(data, pack)
    data = _unpacked(data, pack)
    return np.frombuffer(data[: len(data) // 4 * 4], dtype=np.float32)


def packed(values: np.ndarray, pack: str) -> bytes:
    """As a connector packs it."""
    if pack == "zlib":
        return zlib.compress(values.tobytes(), 1)
    if pack == "pickle":
        return pickle.dumps(values)
    if pack == "lzma":
        return lzma.compress(values.tobytes(), preset=0)
    if pack == "shuffle":
        return zlib.compress(values.view(np.uint8).reshape(-1, 4).T.tobytes(), 1)
    if pack == "xor":
        return bytes(16) + _crypted(values.tobytes(), bytes(16))
    if pack in LOSSY_PACKS:
        return _narrowed(values, pack)
    return (HEADER if pack == "header" else b"") + values.tobytes()


def _unpacked(data: bytes, pack: str) -> bytes:
    if pack == "zlib":
        return zlib.decompress(data)
    if pack == "pickle":
        return bytes(pickle.loads(data).tobytes())
    if pack == "lzma":
        return lzma.decompress(data)
    if pack == "shuffle":
        return bytes(np.frombuffer(zlib.decompress(data), dtype=np.uint8).reshape(4, -1).T.tobytes())
    if pack == "xor":
        return _crypted(data[16:], data[:16])
    return data[len(HEADER) :] if pack == "header" else data


def _crypted(data: bytes, nonce: bytes) -> bytes:
    """Encrypted, or decrypted: the same."""
    stream = np.frombuffer(hashlib.shake_128(SECRET + nonce).digest(len(data)), dtype=np.uint8)
    return bytes((np.frombuffer(data, dtype=np.uint8) ^ stream).tobytes())


def _narrowed(values: np.ndarray, pack: str) -> bytes:
    """Numbers of eight or sixteen bits, with their scales before them."""
    import torch

    tensor = torch.from_numpy(values.reshape(-1, ROW))
    if pack == "bf16":
        return bytes(tensor.to(torch.bfloat16).view(torch.int16).numpy().tobytes())
    most = tensor.abs().amax(dim=1, keepdim=True) if pack == "int8-rows" else tensor.abs().max().reshape(1)
    scale = most.clamp_min(1e-9) / (448 if pack == "fp8" else 127)
    small = tensor / scale
    small = small.to(torch.float8_e4m3fn).view(torch.uint8) if pack == "fp8" else small.round().to(torch.int8)
    return bytes(scale.numpy().tobytes() + small.numpy().tobytes())


def _widened(data: bytes, pack: str) -> np.ndarray:
    import torch

    if pack == "bf16":
        return _flat(torch.frombuffer(bytearray(data), dtype=torch.bfloat16))
    count = len(data) // (ROW + 4) if pack == "int8-rows" else 1
    scale = np.frombuffer(data[: 4 * count], dtype=np.float32)
    if pack == "fp8":
        return _flat(torch.frombuffer(bytearray(data[4:]), dtype=torch.float8_e4m3fn)) * scale
    small = np.frombuffer(data[4 * count :], dtype=np.int8).astype(np.float32)
    return np.asarray((small.reshape(count, -1) * scale[:, None]).ravel(), dtype=np.float32)


def _flat(value: Any) -> np.ndarray:
    return np.asarray(value.detach().float().numpy(), dtype=np.float32).ravel()
