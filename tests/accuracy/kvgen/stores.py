"""The stores that generated connectors bring: each as source to write.

Every store class has put, get, has, drop and close (under drawn names) and keeps float tensors by name.
A flaw makes a store lose or spoil what it is given; which flaws a kind can have stands in FLAWS.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvgen.names import Names

FILE_KINDS = ("npy", "safetensors", "raw", "pt")
SERVER_KINDS = ("frame", "line", "http")
KINDS = (*FILE_KINDS, "container", "memory", "sqlite", *SERVER_KINDS, "shm", "arena")

PACKS = ("plain", "zlib", "pickle", "header")
PACKED_KINDS = ("raw", "container", "memory", "sqlite", *SERVER_KINDS)
HEADER = b"KVTENSOR" + bytes(8)

# Flaws of put that raise; those that lose in silence; those that come later.
RAISING = {
    "no-dir": ("npy", "raw", "pt", "safetensors"),
    "bad-type": ("npy", "raw", "container", "memory", "sqlite", "frame", "line", "http", "shm", "arena"),
    "quota": KINDS,
    "device-full": ("container",),
}
SILENT = {
    "empty": (*FILE_KINDS, "container"),
    "cut": ("raw", "container", "sqlite", "memory"),
    "unflushed": ("raw", "container"),
    "part-stays": FILE_KINDS,
    "no-commit": ("sqlite",),
}
LATER = {
    "evict": (*FILE_KINDS, "memory", "sqlite", "http", "frame"),
    "wrap": ("arena",),
}
FLAWS: dict[str, tuple[str, ...]] = {
    "": KINDS,
    "slow": KINDS,
    "get-raises": KINDS,
    **RAISING,
    **SILENT,
    **LATER,
}


@dataclass(frozen=True)
class StoreChoice:
    """Attributes:
    kind: one of KINDS.
    flaw: "" or a key of FLAWS.
    limit: what the flaw counts: records kept (evict), bytes (quota), milliseconds (slow).
    atomic: files are written beside their place and renamed.
    """

    kind: str
    flaw: str = ""
    limit: int = 0
    atomic: bool = True
    timeout: float = 5.0
    check: bool = True
    """Whether the answers of a server are looked at."""
    pack: str = "plain"
    """What becomes of the bytes: one of PACKS."""


def source(choice: StoreChoice, names: Names) -> str:
    """The store's class, constructed with one argument: a directory, a port, or a prefix of names."""
    body = _BODIES[choice.kind](choice)
    text = body.replace("@HEAD@", _head(choice)).replace("@TAIL@", _tail(choice))
    if choice.flaw == "get-raises":
        text = text.replace("@GETHEAD@", _GET_RAISES)
    text = text.replace("@GETHEAD@", "@DEL@")
    words = {"CLS": names["class:store"], "DICT": names["class:dict"]}
    words.update(TIMEOUT=str(choice.timeout), CHECK=str(choice.check))
    words.update({w.upper(): names[f"call:{w}"] for w in ("put", "get", "has", "drop", "close")})
    for mark, word in words.items():
        text = text.replace(f"@{mark}@", word)
    extra = f"        self._room = {choice.limit}\n        self._recent = []\n"
    text = text.replace("@INIT@\n", extra if choice.flaw in ("quota", "evict") else "")
    text = "\n".join(line for line in text.splitlines() if line.strip() != "@DEL@") + "\n"
    return (_packing(choice) if "_packed(" in text or "_floats(" in text else "") + text


def _packing(choice: StoreChoice) -> str:
    """The functions that make bytes of a tensor and a tensor of bytes."""
    raw, back = "tensor.contiguous().numpy().tobytes()", "bytearray(data)"
    there, again = {
        "plain": (raw, back),
        "zlib": (f"zlib.compress({raw}, 1)", "bytearray(zlib.decompress(data))"),
        "pickle": ("pickle.dumps(tensor.contiguous().numpy())", "bytearray(pickle.loads(data).tobytes())"),
        "header": (f"{HEADER!r} + {raw}", f"bytearray(data[{len(HEADER)}:])"),
    }[choice.pack]
    return f"""

def _packed(tensor):
    return {there}


def _floats(data):
    return torch.frombuffer({again}, dtype=torch.float32)
"""


_GET_RAISES = """        if zlib.crc32(name.encode()) % 2 == 0:
            raise OSError(5, "Input/output error", name)"""


def _head(choice: StoreChoice) -> str:
    """Lines at the start of put: the flaws that every kind can have."""
    if choice.flaw == "slow":
        return f"        time.sleep({choice.limit / 1000})"
    if choice.flaw == "quota":
        return (
            "        self._room -= tensor.numel() * 4\n"
            "        if self._room < 0:\n"
            "            raise OSError(122, 'Disk quota exceeded')"
        )
    if choice.flaw == "bad-type":
        return "        tensor = tensor.to(torch.bfloat16)"
    return "@DEL@"


def _tail(choice: StoreChoice) -> str:
    """Lines at the end of put."""
    if choice.flaw == "evict":
        return (
            "        self._recent.append(name)\n"
            f"        while len(self._recent) > {choice.limit}:\n"
            "            self.@DROP@(self._recent.pop(0))"
        )
    return "@DEL@"


def _data(choice: StoreChoice) -> str:
    """The bytes that are written, as an expression."""
    data = "_packed(tensor)"
    if choice.flaw == "cut":
        return f"{data}[:{choice.limit}]"
    return data


_READ = {
    "npy": "return torch.from_numpy(np.load(path))",
    "safetensors": "return safetensors.torch.load_file(path)['kv']",
    "raw": "return _floats(path.read_bytes())",
    "pt": "return torch.load(path)",
}


def _files(choice: StoreChoice) -> str:
    suffix = {"npy": ".npy", "safetensors": ".safetensors", "raw": ".bin", "pt": ".pt"}[choice.kind]
    write = {
        "npy": "with open(target, 'wb') as file:\n            np.save(file, tensor.contiguous().numpy())",
        "safetensors": "safetensors.torch.save_file({'kv': tensor.contiguous()}, target)",
        "raw": f"with open(target, 'wb') as file:\n            file.write({_data(choice)})",
        "pt": "torch.save(tensor.contiguous().clone(), target)",
    }[choice.kind]
    if choice.flaw == "empty":
        write = "open(target, 'wb').close()"
    if choice.flaw == "unflushed":
        write = (
            "file = open(target, 'wb', buffering=1 << 24)\n"
            "        OPEN_FILES.append(file)\n"
            f"        file.write({_data(choice)})"
        )
    mkdir = "@DEL@" if choice.flaw == "no-dir" else "        path.parent.mkdir(parents=True, exist_ok=True)"
    atomic = choice.atomic or choice.flaw == "part-stays"
    target = "path.with_name(f'{path.name}.{threading.get_ident()}.part')" if atomic else "path"
    rename = "        os.replace(target, path)" if atomic and choice.flaw != "part-stays" else "@DEL@"
    return f"""
OPEN_FILES = []


class @CLS@:
    def __init__(self, root):
        self._root = pathlib.Path(root)
@INIT@

    def _path(self, name):
        return self._root / f"{{name}}{suffix}"

    def @PUT@(self, name, tensor):
@HEAD@
        path = self._path(name)
{mkdir}
        target = {target}
        {write}
{rename}
@TAIL@

    def @GET@(self, name):
@GETHEAD@
        path = self._path(name)
        if not path.exists():
            return None
        {_READ[choice.kind]}

    def @HAS@(self, name):
        return self._path(name).exists()

    def @DROP@(self, name):
        self._path(name).unlink(missing_ok=True)

    def @CLOSE@(self):
        pass
"""


def _container(choice: StoreChoice) -> str:
    write = "@DEL@" if choice.flaw == "empty" else "            self._file.write(data)"
    flush = "@DEL@" if choice.flaw == "unflushed" else "            self._file.flush()"
    data = "'/dev/full'" if choice.flaw == "device-full" else "self._root / 'data.kv'"
    buffering = ", buffering=1 << 26" if choice.flaw == "unflushed" else ""
    return f"""
OPEN_FILES = []


class @CLS@:
    def __init__(self, root):
        self._root = pathlib.Path(root)
        self._root.mkdir(parents=True, exist_ok=True)
        self._where = {{}}
        self._guard = threading.Lock()
        self._data = {data}
        self._file = open(self._data, "ab"{buffering})
        OPEN_FILES.append(self._file)
        self._listing = open(self._root / "index.jsonl", "a")
        self._at = 0
@INIT@

    def @PUT@(self, name, tensor):
@HEAD@
        data = {_data(choice)}
        size = {"tensor.numel() * 4" if choice.flaw == "cut" else "len(data)"}
        with self._guard:
{write}
{flush}
            self._where[name] = (self._at, size)
            self._listing.write(json.dumps([name, self._at, size]) + "\\n")
            self._listing.flush()
            self._at = self._file.tell()
@TAIL@

    def @GET@(self, name):
@GETHEAD@
        if name not in self._where:
            return None
        at, size = self._where[name]
        with open(self._data, "rb") as file:
            file.seek(at)
            return _floats(file.read(size))

    def @HAS@(self, name):
        return name in self._where

    def @DROP@(self, name):
        self._where.pop(name, None)

    def @CLOSE@(self):
        self._listing.close()
"""


def _memory(choice: StoreChoice) -> str:
    value = "tensor.contiguous().clone()"
    back = "return value"
    if choice.flaw in ("cut", "bad-type") or choice.pack != "plain":
        value, back = _data(choice), "return _floats(value)"
    return f"""
@DICT@ = {{}}


class @CLS@:
    def __init__(self, root):
        self._root = root
@INIT@

    def @PUT@(self, name, tensor):
@HEAD@
        @DICT@[name] = {value}
@TAIL@

    def @GET@(self, name):
@GETHEAD@
        value = @DICT@.get(name)
        if value is None:
            return None
        {back}

    def @HAS@(self, name):
        return name in @DICT@

    def @DROP@(self, name):
        @DICT@.pop(name, None)

    def @CLOSE@(self):
        pass
"""


def _sqlite(choice: StoreChoice) -> str:
    commit = "@DEL@" if choice.flaw == "no-commit" else "            self._db.commit()"
    return f"""
class @CLS@:
    def __init__(self, root):
        os.makedirs(root, exist_ok=True)
        self._guard = threading.Lock()
        self._db = sqlite3.connect(os.path.join(root, "kv.sqlite"), check_same_thread=False)
        with self._guard:
            self._db.execute("CREATE TABLE IF NOT EXISTS kv (name TEXT PRIMARY KEY, value BLOB)")
            self._db.commit()
@INIT@

    def @PUT@(self, name, tensor):
@HEAD@
        data = {_data(choice)}
        with self._guard:
            self._db.execute("INSERT OR REPLACE INTO kv VALUES (?, ?)", (name, data))
{commit}
@TAIL@

    def @GET@(self, name):
@GETHEAD@
        with self._guard:
            row = self._db.execute("SELECT value FROM kv WHERE name = ?", (name,)).fetchone()
        if row is None:
            return None
        return _floats(row[0])

    def @HAS@(self, name):
        with self._guard:
            return self._db.execute("SELECT 1 FROM kv WHERE name = ?", (name,)).fetchone() is not None

    def @DROP@(self, name):
        with self._guard:
            self._db.execute("DELETE FROM kv WHERE name = ?", (name,))
            self._db.commit()

    def @CLOSE@(self):
        self._db.close()
"""


# Binary frames over one connection: op, length of name, length of data; reply: status, length.
_FRAME = """
class @CLS@:
    def __init__(self, address, timeout=@TIMEOUT@, check=@CHECK@):
        host, port = str(address).rsplit(":", 1)
        self._address = (host, int(port))
        self._timeout = timeout
        self._check = check
        self._link = None
        self._guard = threading.Lock()
@INIT@

    def _connect(self):
        self._link = socket.create_connection(self._address, timeout=self._timeout)

    def _receive(self, size):
        data = b""
        while len(data) < size:
            more = self._link.recv(min(1 << 20, size - len(data)))
            if not more:
                raise ConnectionError("store went away")
            data += more
        return data

    def _ask(self, op, name, data=b""):
        with self._guard:
            if self._link is None:
                self._connect()
            try:
                text = name.encode()
                self._link.sendall(struct.pack(">cHI", op, len(text), len(data)) + text + data)
                status, size = struct.unpack(">cI", self._receive(5))
                return status, self._receive(size)
            except OSError:
                self._link.close()
                self._link = None
                raise

    def @PUT@(self, name, tensor):
@HEAD@
        status, _ = self._ask(b"P", name, _packed(tensor))
        if self._check and status != b"+":
            raise OSError(f"store refused {name}")
@TAIL@

    def @GET@(self, name):
@GETHEAD@
        status, data = self._ask(b"G", name)
        if status != b"+":
            return None
        return _floats(data)

    def @HAS@(self, name):
        return self._ask(b"H", name)[0] == b"+"

    def @DROP@(self, name):
        self._ask(b"D", name)

    def @CLOSE@(self):
        if self._link is not None:
            self._link.close()
"""


# Text lines, one connection for each request: ``PUT name size``, then the data.
_LINE = """
class @CLS@:
    def __init__(self, address, timeout=@TIMEOUT@, check=@CHECK@):
        self._host, _, self._port = str(address).rpartition(":")
        self._timeout = timeout
        self._check = check
@INIT@

    def _talk(self, line, data=b""):
        with socket.create_connection((self._host, int(self._port)), timeout=self._timeout) as link:
            with link.makefile("rwb") as pipe:
                pipe.write(line.encode() + b"\\n" + data)
                pipe.flush()
                answer = pipe.readline().decode().split()
                if not answer:
                    raise ConnectionError("no answer")
                return answer[0], pipe.read(int(answer[1]))

    def @PUT@(self, name, tensor):
@HEAD@
        data = _packed(tensor)
        verdict, _ = self._talk(f"PUT {name} {len(data)}", data)
        if self._check and verdict != "OK":
            raise OSError(f"PUT {name}: {verdict}")
@TAIL@

    def @GET@(self, name):
@GETHEAD@
        verdict, data = self._talk(f"GET {name} 0")
        if verdict != "OK":
            return None
        return _floats(data)

    def @HAS@(self, name):
        return self._talk(f"HAS {name} 0")[0] == "OK"

    def @DROP@(self, name):
        self._talk(f"DEL {name} 0")

    def @CLOSE@(self):
        pass
"""


_HTTP = """
class @CLS@:
    def __init__(self, address, timeout=@TIMEOUT@, check=@CHECK@):
        self._address = str(address)
        self._timeout = timeout
        self._check = check
@INIT@

    def _call(self, method, name, body=None):
        link = http.client.HTTPConnection(self._address, timeout=self._timeout)
        try:
            link.request(method, "/" + urllib.parse.quote(name), body=body)
            answer = link.getresponse()
            return answer.status, answer.read()
        finally:
            link.close()

    def @PUT@(self, name, tensor):
@HEAD@
        status, _ = self._call("PUT", name, _packed(tensor))
        if self._check and status >= 300:
            raise OSError(f"PUT {name}: HTTP {status}")
@TAIL@

    def @GET@(self, name):
@GETHEAD@
        status, data = self._call("GET", name)
        if status != 200:
            return None
        return _floats(data)

    def @HAS@(self, name):
        return self._call("HEAD", name)[0] == 200

    def @DROP@(self, name):
        self._call("DELETE", name)

    def @CLOSE@(self):
        pass
"""


# One shared memory segment for each record: eight bytes of length, then the data.
_SHM = """
class @CLS@:
    def __init__(self, prefix):
        self._prefix = prefix
        self._mine = {}
@INIT@

    def _segment(self, name):
        return self._prefix + hashlib.md5(name.encode()).hexdigest()[:16]

    def @PUT@(self, name, tensor):
@HEAD@
        data = _packed(tensor)
        try:
            segment = shared_memory.SharedMemory(self._segment(name), create=True, size=len(data) + 8)
        except FileExistsError:
            segment = shared_memory.SharedMemory(self._segment(name))
        segment.buf[:8] = struct.pack("<q", len(data))
        segment.buf[8:8 + len(data)] = data
        self._mine[name] = segment
@TAIL@

    def @GET@(self, name):
@GETHEAD@
        try:
            segment = shared_memory.SharedMemory(self._segment(name))
        except FileNotFoundError:
            return None
        size = struct.unpack("<q", segment.buf[:8])[0]
        data = bytearray(segment.buf[8:8 + size])
        segment.close()
        return _floats(data)

    def @HAS@(self, name):
        try:
            shared_memory.SharedMemory(self._segment(name)).close()
        except FileNotFoundError:
            return False
        return True

    def @DROP@(self, name):
        self._mine.pop(name).unlink()

    def @CLOSE@(self):
        for segment in self._mine.values():
            segment.close()
"""


def _arena(choice: StoreChoice) -> str:
    """A mapped file of equal places; an index beside it says which name has which place."""
    count = choice.limit if choice.flaw == "wrap" else 4096
    return f"""
class @CLS@:
    PLACES = {count}

    def __init__(self, root):
        self._root = pathlib.Path(root)
        self._root.mkdir(parents=True, exist_ok=True)
        self._index = {{}}
        self._guard = threading.Lock()
        self._map = None
        self._next = 0
@INIT@

    def _open(self, size):
        path = self._root / "arena.bin"
        with open(path, "wb") as file:
            file.truncate(size * self.PLACES)
        self._map = np.memmap(path, dtype=np.uint8, mode="r+", shape=(self.PLACES, size))

    def @PUT@(self, name, tensor):
@HEAD@
        data = np.frombuffer(_packed(tensor), dtype=np.uint8)
        with self._guard:
            if self._map is None:
                self._open(len(data))
            place = self._index.get(name)
            if place is None:
                place = self._next % self.PLACES
                self._next += 1
            self._map[place, :len(data)] = data
            self._index[name] = place
            (self._root / "index.json").write_text(json.dumps({{"size": len(data), "places": self._index}}))
@TAIL@

    def @GET@(self, name):
@GETHEAD@
        place = self._index.get(name)
        if place is None:
            return None
        return _floats(self._map[place].tobytes())

    def @HAS@(self, name):
        return name in self._index

    def @DROP@(self, name):
        self._index.pop(name, None)

    def @CLOSE@(self):
        if self._map is not None:
            self._map.flush()
"""


_BODIES = {
    **dict.fromkeys(FILE_KINDS, _files),
    "container": _container,
    "memory": _memory,
    "sqlite": _sqlite,
    "frame": lambda _: _FRAME,
    "line": lambda _: _LINE,
    "http": lambda _: _HTTP,
    "shm": lambda _: _SHM,
    "arena": _arena,
}
