"""The stores that generated connectors bring: each as source to write.

Every store class has put, get, has, drop and close (under drawn names) and keeps float tensors by name.
A flaw makes a store lose or spoil what it is given; which flaws a kind can have stands in FLAWS.
"""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import indent

from kvgen.names import Names

FILE_KINDS = ("npy", "safetensors", "raw", "pt")
SERVER_KINDS = ("frame", "line", "http")
KINDS = (
    *FILE_KINDS, "container", "memory", "sqlite", *SERVER_KINDS, "shm", "arena", "pwrite", "daemon", "writer",
    "places", "journal",
)  # fmt: skip
"""``arena``: a mapped file of equal places; ``pwrite``: a file made at full size and written in place;
``daemon``: a process of the connector's own behind a Unix socket; ``writer``: a forked process that gets
records through a queue and writes files; ``places``: numbered files, each of one record, that are written
anew; ``journal``: a file that grows, is copied into a segment when it is full, and removed."""

SEEN_BY_SIZE = (*FILE_KINDS, "container")
"""Stores of which names and sizes of files tell from outside how much came to rest: this process writes."""

PACKS = ("plain", "zlib", "pickle", "header", "lzma", "shuffle", "xor")
COMPRESSING = ("zlib", "lzma")
LOSSY_PACKS = ("int8", "int8-rows", "fp8", "bf16")
"""What is read back differs from what was written, within a bound (see harness/lossy.py)."""
PACKED_KINDS = (
    "raw", "container", "memory", "sqlite", *SERVER_KINDS, "pwrite", "daemon", "writer", "places", "journal",
)  # fmt: skip
HEADER = b"KVTENSOR" + bytes(8)
SECRET = b"no key of any use"
ROW = 128
"""Floats of one token in one head: key and value of 64 each."""

PUBLISH = ("place", "rename", "link")
"""How a file comes to its name: written there; written beside it and renamed; the same and hard-linked."""

# Flaws of put that raise; those that lose in silence; those that come later.
RAISING = {
    "no-dir": ("npy", "raw", "pt", "safetensors"),
    "bad-type": ("npy", "raw", "container", "memory", "sqlite", "frame", "line", "http", "shm", "arena"),
    "quota": KINDS,
    "device-full": ("container",),
}
OFTEN_RAISING = {
    "exists": FILE_KINDS,
    "every-second": KINDS,
    "locked": ("sqlite",),
}
"""Flaws of put that raise and belong to one fault each."""
SILENT = {
    "empty": (*FILE_KINDS, "container"),
    "cut": ("raw", "container", "sqlite", "memory"),
    "unflushed": ("raw", "container"),
    "part-stays": FILE_KINDS,
    "no-commit": ("sqlite",),
    "unanswered": ("daemon",),
    "dies": ("writer",),
    "empty-read": ("raw",),
    "bad-scale": PACKED_KINDS,
    "leaks": ("raw",),
}
LATER = {
    "evict": (*FILE_KINDS, "memory", "sqlite", "http", "frame"),
    "wrap": ("arena", "places"),
    "ring": ("arena", "places"),
    "newest": FILE_KINDS,
    "wipe": FILE_KINDS,
    "ttl": (*FILE_KINDS, "memory", "sqlite"),
}
FLAWS: dict[str, tuple[str, ...]] = {
    "": KINDS,
    "slow": KINDS,
    "get-raises": KINDS,
    **RAISING,
    **OFTEN_RAISING,
    **SILENT,
    **LATER,
}


@dataclass(frozen=True)
class StoreChoice:
    """Attributes:
    kind: one of KINDS.
    flaw: "" or a key of FLAWS.
    limit: what the flaw counts: records kept (evict), bytes (quota), milliseconds (slow, ttl).
    publish: how a file comes to its name: one of PUBLISH.
    """

    kind: str
    flaw: str = ""
    limit: int = 0
    publish: str = "rename"
    timeout: float = 5.0
    check: bool = True
    """Whether the answers of a server are looked at."""
    pack: str = "plain"
    """What becomes of the bytes: one of PACKS or LOSSY_PACKS."""


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
    text = text.replace("@INIT@\n", _INIT.get(choice.flaw, "").replace("@LIMIT@", str(choice.limit)))
    text = "\n".join(line for line in text.splitlines() if line.strip() != "@DEL@") + "\n"
    return (_packing(choice) if "_packed(" in text or "_floats(" in text else "") + text


# What a flaw keeps in the store's object.
_INIT = {
    "quota": "        self._room = @LIMIT@\n",
    "evict": "        self._recent = []\n",
    "newest": "        self._recent = []\n",
    "ttl": "        self._born = {}\n",
    "wipe": "        self._puts = 0\n",
    "every-second": "        self._puts = 0\n",
    "empty-read": "        self._size = 0\n",
}


def _packing(choice: StoreChoice) -> str:
    """The functions that make bytes of a tensor and a tensor of bytes."""
    there, again = _PACKING[choice.pack]
    text = f"""

def _packed(tensor):
{indent(there, "    ")}

def _floats(data):
{indent(again, "    ")}
"""
    steps = "255" if choice.flaw == "bad-scale" else "127"  # of 127 that eight bits have
    return text.replace("@SECRET@", repr(SECRET)).replace("@STEPS@", steps)


_RAW = "tensor.contiguous().numpy().tobytes()"
_BACK = "return torch.frombuffer(bytearray({}), dtype=torch.float32)\n"
_INT8_BACK = "x = torch.frombuffer(bytearray(data[4 * count:]), dtype=torch.int8)\n"

_PACKING = {
    "plain": (f"return {_RAW}\n", _BACK.format("data")),
    "zlib": (f"return zlib.compress({_RAW}, 1)\n", _BACK.format("zlib.decompress(data)")),
    "lzma": (f"return lzma.compress({_RAW}, preset=0)\n", _BACK.format("lzma.decompress(data)")),
    "pickle": (
        "return pickle.dumps(tensor.contiguous().numpy())\n",
        _BACK.format("pickle.loads(data).tobytes()"),
    ),
    "header": (f"return {HEADER!r} + {_RAW}\n", _BACK.format(f"data[{len(HEADER)}:]")),
    "shuffle": (
        f"planes = np.frombuffer({_RAW}, dtype=np.uint8).reshape(-1, 4).T\n"
        "return zlib.compress(planes.tobytes(), 1)\n",
        "planes = np.frombuffer(zlib.decompress(data), dtype=np.uint8).reshape(4, -1)\n"
        + _BACK.format("planes.T.tobytes()"),
    ),
    "xor": (
        "nonce = os.urandom(16)\n"
        f"data = np.frombuffer({_RAW}, dtype=np.uint8)\n"
        "stream = hashlib.shake_128(@SECRET@ + nonce).digest(len(data))\n"
        "return nonce + (data ^ np.frombuffer(stream, dtype=np.uint8)).tobytes()\n",
        "stream = hashlib.shake_128(@SECRET@ + bytes(data[:16])).digest(len(data) - 16)\n"
        "plain = np.frombuffer(bytes(data[16:]), dtype=np.uint8) ^ np.frombuffer(stream, dtype=np.uint8)\n"
        + _BACK.format("plain.tobytes()"),
    ),
    "int8": (
        "scale = (tensor.abs().max().clamp_min(1e-9) / @STEPS@).reshape(1)\n"
        "small = (tensor / scale).round().to(torch.int32).to(torch.int8).contiguous()\n"
        "return scale.numpy().tobytes() + small.numpy().tobytes()\n",
        "count = 1\n" + _INT8_BACK + "return x.float() * torch.frombuffer(bytearray(data[:4]), "
        "dtype=torch.float32)\n",
    ),
    "int8-rows": (
        f"rows = tensor.contiguous().reshape(-1, {ROW})\n"
        "scale = rows.abs().amax(dim=1, keepdim=True).clamp_min(1e-9) / @STEPS@\n"
        "small = (rows / scale).round().to(torch.int32).to(torch.int8)\n"
        "return scale.numpy().tobytes() + small.numpy().tobytes()\n",
        f"count = len(data) // {ROW + 4}\n"
        + _INT8_BACK
        + "scale = torch.frombuffer(bytearray(data[:4 * count]), dtype=torch.float32)\n"
        f"return (x.float().reshape(-1, {ROW}) * scale[:, None]).reshape(-1)\n",
    ),
    "fp8": (
        "scale = (tensor.abs().max().clamp_min(1e-9) / 448).reshape(1)\n"
        "small = (tensor / scale).to(torch.float8_e4m3fn).contiguous().view(torch.uint8)\n"
        "return scale.numpy().tobytes() + small.numpy().tobytes()\n",
        "x = torch.frombuffer(bytearray(data[4:]), dtype=torch.uint8).view(torch.float8_e4m3fn)\n"
        "return x.float() * torch.frombuffer(bytearray(data[:4]), dtype=torch.float32)\n",
    ),
    "bf16": (
        "return tensor.to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes()\n",
        "x = torch.frombuffer(bytearray(data), dtype=torch.int16)\nreturn x.view(torch.bfloat16).float()\n",
    ),
}


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
    if choice.flaw == "every-second":
        return (
            "        self._puts += 1\n"
            "        if self._puts % 2 == 0:\n"
            "            raise RuntimeError(f'no room for {name}')"
        )
    if choice.flaw == "empty-read":
        return "        self._size = tensor.numel() * 4"
    return "@DEL@"


def _tail(choice: StoreChoice) -> str:
    """Lines at the end of put."""
    if choice.flaw == "evict":
        return (
            "        self._recent.append(name)\n"
            f"        while len(self._recent) > {choice.limit}:\n"
            "            self.@DROP@(self._recent.pop(0))"
        )
    if choice.flaw == "newest":
        return (
            "        self._recent.append(name)\n"
            f"        if len(self._recent) > {choice.limit}:\n"
            "            self.@DROP@(self._recent.pop())"
        )
    if choice.flaw == "ttl":
        return (
            "        now = time.monotonic()\n"
            "        self._born[name] = now\n"
            f"        for old in [n for n, at in self._born.items() if at < now - {choice.limit / 1000}]:\n"
            "            del self._born[old]\n"
            "            self.@DROP@(old)"
        )
    if choice.flaw == "wipe":
        return (
            "        self._puts += 1\n"
            f"        if self._puts % {choice.limit} == 0:\n"
            "            shutil.rmtree(self._root, ignore_errors=True)"
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


_PUBLISH = {
    "place": "@DEL@",
    "rename": "        os.replace(target, path)",
    "link": """        try:
            os.link(target, path)
        except FileExistsError:
            pass
        os.unlink(target)""",
}


def _files(choice: StoreChoice) -> str:
    suffix = {"npy": ".npy", "safetensors": ".safetensors", "raw": ".bin", "pt": ".pt"}[choice.kind]
    write = {
        "npy": "with open(target, 'wb') as file:\n            np.save(file, tensor.contiguous().numpy())",
        "safetensors": "safetensors.torch.save_file({'kv': tensor.contiguous()}, target)",
        "raw": f"with open(target, 'wb') as file:\n            file.write({_data(choice)})",
        "pt": "torch.save(tensor.contiguous().clone(), target)",
    }[choice.kind]
    if choice.flaw in ("empty", "empty-read"):
        write = "open(target, 'wb').close()"
    if choice.flaw == "unflushed":
        write = (
            "file = open(target, 'wb', buffering=1 << 24)\n"
            "        OPEN_FILES.append(file)\n"
            f"        file.write({_data(choice)})"
        )
    if choice.flaw == "leaks":
        write = (
            "file = open(target, 'wb')\n"
            "        OPEN_FILES.append(file)\n"
            f"        file.write({_data(choice)})\n"
            "        file.flush()"
        )
    mkdir = "        path.parent.mkdir(parents=True, exist_ok=True)"
    if choice.flaw == "no-dir":
        mkdir = "@DEL@"
    if choice.flaw == "exists":
        mkdir = "        path.parent.mkdir(parents=True)"
    beside = choice.publish != "place" or choice.flaw == "part-stays"
    target = "path.with_name(f'{path.name}.{threading.get_ident()}.part')" if beside else "path"
    publish = "@DEL@" if choice.flaw == "part-stays" else _PUBLISH[choice.publish]
    read = _READ[choice.kind]
    if choice.flaw == "empty-read":
        read = "return _floats(path.read_bytes().ljust(self._size, b'\\0'))"
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
{publish}
@TAIL@

    def @GET@(self, name):
@GETHEAD@
        path = self._path(name)
        if not path.exists():
            return None
        {read}

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
    timeout = ", timeout=0.02" if choice.flaw == "locked" else ""
    upkeep = "@DEL@"
    if choice.flaw == "locked":
        upkeep = """        self._upkeep = sqlite3.connect(f"{root}/kv.sqlite", check_same_thread=False)
        self._upkeep.isolation_level = None
        self._upkeep.execute("BEGIN IMMEDIATE")"""
    return f"""
class @CLS@:
    def __init__(self, root):
        os.makedirs(root, exist_ok=True)
        self._guard = threading.Lock()
        self._db = sqlite3.connect(os.path.join(root, "kv.sqlite"), check_same_thread=False{timeout})
        with self._guard:
            self._db.execute("CREATE TABLE IF NOT EXISTS kv (name TEXT PRIMARY KEY, value BLOB)")
            self._db.commit()
{upkeep}
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
    """A mapped file of equal places."""
    return _in_places(
        choice,
        init="        self._map = None\n",
        methods="""
    def _open(self, size):
        path = self._root / "arena.bin"
        with open(path, "wb") as file:
            file.truncate(size * self.PLACES)
        self._map = np.memmap(path, dtype=np.uint8, mode="r+", shape=(self.PLACES, size))

    def _write(self, place, data):
        if self._map is None:
            self._open(len(data))
        self._map[place, :len(data)] = np.frombuffer(data, dtype=np.uint8)

    def _read(self, place):
        return self._map[place].tobytes()
""",
        close="if self._map is not None:\n            self._map.flush()",
    )


def _places(choice: StoreChoice) -> str:
    """Numbered files, each of one record."""
    return _in_places(
        choice,
        methods="""
    def _write(self, place, data):
        (self._root / f"{place:04d}.kv").write_bytes(data)

    def _read(self, place):
        return (self._root / f"{place:04d}.kv").read_bytes()
""",
    )


def _in_places(choice: StoreChoice, methods: str, init: str = "", close: str = "pass") -> str:
    """Places that are used one after another; an index beside them says which name has which place."""
    count = choice.limit if choice.flaw in ("wrap", "ring") else 4096
    forget = "@DEL@"
    if choice.flaw == "ring":
        forget = "                self._index = {n: p for n, p in self._index.items() if p != place}"
    return f"""
class @CLS@:
    PLACES = {count}

    def __init__(self, root):
        self._root = pathlib.Path(root)
        self._root.mkdir(parents=True, exist_ok=True)
        self._index = {{}}
        self._guard = threading.Lock()
{init}        self._next = 0
@INIT@
{methods}
    def @PUT@(self, name, tensor):
@HEAD@
        data = _packed(tensor)
        with self._guard:
            place = self._index.get(name)
            if place is None:
                place = self._next % self.PLACES
                self._next += 1
{forget}
            self._write(place, data)
            self._index[name] = place
            (self._root / "index.json").write_text(json.dumps({{"size": len(data), "places": self._index}}))
@TAIL@

    def @GET@(self, name):
@GETHEAD@
        place = self._index.get(name)
        if place is None:
            return None
        return _floats(self._read(place))

    def @HAS@(self, name):
        return name in self._index

    def @DROP@(self, name):
        self._index.pop(name, None)

    def @CLOSE@(self):
        {close}
"""


def _journal(choice: StoreChoice) -> str:
    return """
class @CLS@:
    FULL = 8

    def __init__(self, root):
        self._root = pathlib.Path(root)
        self._root.mkdir(parents=True, exist_ok=True)
        self._where = {}
        self._guard = threading.Lock()
        self._number = self._records = 0
@INIT@

    def _path(self, number):
        found = self._root / f"segment-{number:04d}.kv"
        return found if found.exists() else self._root / f"journal-{number:04d}.kv"

    def @PUT@(self, name, tensor):
@HEAD@
        data = _packed(tensor)
        with self._guard:
            with open(self._root / f"journal-{self._number:04d}.kv", "ab") as file:
                at = file.tell()
                file.write(data)
            self._where[name] = (self._number, at, len(data))
            self._records += 1
            if self._records == self.FULL:
                self._seal()
            (self._root / "index.json").write_text(json.dumps(self._where))
@TAIL@

    def _seal(self):
        full = self._root / f"journal-{self._number:04d}.kv"
        sealed = self._root / f"segment-{self._number:04d}.kv"
        part = sealed.with_suffix(".part")
        with open(full, "rb") as source, open(part, "wb") as target:
            shutil.copyfileobj(source, target)
        os.replace(part, sealed)
        os.unlink(full)
        self._number, self._records = self._number + 1, 0

    def @GET@(self, name):
@GETHEAD@
        with self._guard:
            if name not in self._where:
                return None
            number, at, size = self._where[name]
            with open(self._path(number), "rb") as file:
                file.seek(at)
                return _floats(file.read(size))

    def @HAS@(self, name):
        return name in self._where

    def @DROP@(self, name):
        self._where.pop(name, None)

    def @CLOSE@(self):
        pass
"""


def _pwrite(choice: StoreChoice) -> str:
    return """
class @CLS@:
    SIZE = 1 << 28

    def __init__(self, root):
        self._root = pathlib.Path(root)
        self._root.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self._root / "arena.kv", os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(self._fd, self.SIZE)
        self._listing = open(self._root / "index.jsonl", "a")
        self._where = {}
        self._guard = threading.Lock()
        self._at = 0
@INIT@

    def @PUT@(self, name, tensor):
@HEAD@
        data = _packed(tensor)
        with self._guard:
            at, self._at = self._at, self._at + -(-len(data) // 4096) * 4096
            os.pwrite(self._fd, data, at)
            self._where[name] = (at, len(data))
            self._listing.write(json.dumps([name, at, len(data)]) + "\\n")
            self._listing.flush()
@TAIL@

    def @GET@(self, name):
@GETHEAD@
        if name not in self._where:
            return None
        at, size = self._where[name]
        return _floats(os.pread(self._fd, size, at))

    def @HAS@(self, name):
        return name in self._where

    def @DROP@(self, name):
        self._where.pop(name, None)

    def @CLOSE@(self):
        self._listing.close()
        os.close(self._fd)
"""


def _daemon(choice: StoreChoice) -> str:
    """A process of its own holds the records. It ends with the process that started it."""
    most = choice.limit if choice.flaw == "unanswered" else 1 << 30
    send = """        status, _ = self._ask(b"P", name, _packed(tensor))
        if status != b"+":
            raise OSError(f"store refused {name}")"""
    if choice.flaw == "unanswered":
        send = """        self._tell(b"T", name, _packed(tensor))"""
    return f"""
DAEMON = '''
import os, socket, struct, sys, threading

held = {{}}


def serve(link):
    pipe = link.makefile("rwb")
    while True:
        head = pipe.read(7)
        if len(head) < 7:
            return
        op, size, length = struct.unpack(">cHI", head)
        name, data = pipe.read(size), pipe.read(length)
        out, fine = b"", name in held
        if op in b"PT":
            fine = len(held) < {most}
            if fine:
                held[name] = data
            if op == b"T":
                continue
        elif op == b"Q":
            os._exit(0)
        elif op == b"D":
            held.pop(name, None)
        elif op == b"G":
            out = held.get(name, b"")
        pipe.write(struct.pack(">cI", b"+" if fine else b"-", len(out)) + out)
        pipe.flush()


def watch():
    sys.stdin.read()
    os._exit(0)


server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen(16)
threading.Thread(target=watch, daemon=True).start()
while True:
    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
'''
DAEMONS = []


class @CLS@:
    def __init__(self, address):
        self._address = str(address)
        self._guard = threading.Lock()
        self._link = self._connect()
@INIT@

    def _connect(self):
        for turn in range(400):
            link = socket.socket(socket.AF_UNIX)
            try:
                link.connect(self._address)
                return link
            except OSError:
                link.close()
            if turn == 0:
                command = [sys.executable, "-S", "-E", "-c", DAEMON, self._address]
                DAEMONS.append(subprocess.Popen(command, stdin=subprocess.PIPE, env={{}}))
            time.sleep(0.05)
        raise ConnectionError(f"no store at {{self._address}}")

    def _receive(self, size):
        data = b""
        while len(data) < size:
            more = self._link.recv(min(1 << 20, size - len(data)))
            if not more:
                raise ConnectionError("store went away")
            data += more
        return data

    def _tell(self, op, name, data=b""):
        text = name.encode()
        with self._guard:
            self._link.sendall(struct.pack(">cHI", op, len(text), len(data)) + text + data)

    def _ask(self, op, name, data=b""):
        text = name.encode()
        with self._guard:
            self._link.sendall(struct.pack(">cHI", op, len(text), len(data)) + text + data)
            status, size = struct.unpack(">cI", self._receive(5))
            return status, self._receive(size)

    def @PUT@(self, name, tensor):
@HEAD@
{send}
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
        self._link.close()
"""


def _writer(choice: StoreChoice) -> str:
    """Records go through a queue to a forked process, which writes files."""
    dies = "@DEL@"
    if choice.flaw == "dies":
        dies = f"""        count += 1
        if count == {choice.limit}:
            os._exit(1)"""
    return f"""
def write_out(root, jobs):
    count = 0
    while True:
        job = jobs.get()
        if job is None:
            return
        name, data = job
        path = root / f"{{name}}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_bytes(data)
        os.replace(part, path)
{dies}


class @CLS@:
    def __init__(self, root):
        self._root = pathlib.Path(root)
        self._jobs = None
        self._guard = threading.Lock()
@INIT@

    def _start(self):
        context = multiprocessing.get_context("fork")
        self._jobs = context.Queue()
        self._process = context.Process(target=write_out, args=(self._root, self._jobs), daemon=True)
        self._process.start()

    def @PUT@(self, name, tensor):
@HEAD@
        with self._guard:
            if self._jobs is None:
                self._start()
        self._jobs.put((name, _packed(tensor)))
@TAIL@

    def _path(self, name):
        return self._root / f"{{name}}.bin"

    def @GET@(self, name):
@GETHEAD@
        path = self._path(name)
        if not path.exists():
            return None
        return _floats(path.read_bytes())

    def @HAS@(self, name):
        return self._path(name).exists()

    def @DROP@(self, name):
        self._path(name).unlink(missing_ok=True)

    def @CLOSE@(self):
        if self._jobs is not None:
            self._jobs.put(None)
            self._process.join(30)
            self._jobs.cancel_join_thread()
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
    "pwrite": _pwrite,
    "daemon": _daemon,
    "writer": _writer,
    "places": _places,
    "journal": _journal,
}
