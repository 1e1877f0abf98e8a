"""Synthetic runs: spools packed by hand through the format, as an agent would write them.

``Sim`` is one engine: a scheduler spool and one spool a rank (or one for all with
``in_process``). ``Sim.serve`` drives prompts through chunked prefill and decode under a small
connector policy; ``Sim.step`` writes single steps.

With ``kv_blocks`` a Sim has a KV cache of so many blocks: it writes the block tables (BLOCKS), says of its
steps that they were watched, and ``touch``, ``read`` and ``write`` say which slots were (SLOTS).
"""

from __future__ import annotations

import json
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvtrace.agent.steps.block_tables import runs
from kvtrace.trace import format as fmt
from kvtrace.trace import hooks, ops, rows
from kvtrace.trace.facts import NOT_OF_TOKENS
from kvtrace.trace.format import Dispatch, Fact, Flag, Kind, Role, Skip, pack_head

US = 1000
WATCHED = int(Flag.STORE | Flag.LOAD)
ATTENTION = ops.ATTENTION_WITH_OUTPUT


class SpoolFile:
    def __init__(self, run_dir: Path, name: str, header: dict[str, Any]) -> None:
        self.path = run_dir / fmt.SPOOL_DIR / f"{name}{fmt.SPOOL_SUFFIX}"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.data = bytearray(fmt.pack_header(header))
        self.names: dict[str, int] = {"": 0}

    def add(self, head: int, *words: int) -> None:
        self.data += struct.pack("<8q", head, *words, *([0] * (7 - len(words))))

    def _text(self, announcement: rows.Name | rows.FactRecord, body: bytes) -> None:
        self.add(*announcement)
        words = fmt.payload_words(body)
        self.data += struct.pack(f"<{len(words)}q", *words)

    def name(self, text: str) -> int:
        if text not in self.names:
            self.names[text] = len(self.names)
            body = text.encode()
            announcement = rows.Name(pack_head(Kind.NAME), self.names[text], len(body), zlib.crc32(body))
            self._text(announcement, body)
        return self.names[text]

    def fact(self, fact: Fact, value: dict[str, Any], t: int = 0) -> None:
        body = json.dumps(value).encode()
        self._text(rows.FactRecord(pack_head(Kind.FACT, 0, fact), t, len(body), zlib.crc32(body)), body)

    def trailer(self, stop: int, lost: int = 0) -> None:
        self.add(*rows.Trailer(pack_head(Kind.TRAILER, 0, stop), 0, lost))

    def write(self) -> None:
        self.path.write_bytes(sealed(bytes(self.data)))


def sealed(data: bytes) -> bytes:
    """A header and its records, as blocks with their checksums."""
    _, _, length, seed = fmt.unpack_header_block(data)
    at = fmt.RECORD_SIZE + length + (-length % fmt.RECORD_SIZE)
    size = fmt.MOST_BLOCK * fmt.RECORD_SIZE
    blocks = [data[start : start + size] for start in range(at, len(data), size)]
    return data[:at] + b"".join(block + fmt.seal(block, n, seed) for n, block in enumerate(blocks))


@dataclass
class Entry:
    """A store entry that a policy puts into the metadata."""

    request: str
    slots: int
    tokens: int = -1
    start: int = -1
    flags: int = int(Flag.STORE)


@dataclass
class Chunk:
    request: str
    start: int
    tokens: int
    first: bool = False
    resumed: bool = False


@dataclass
class Fate:
    """What goes wrong on the workers in a step. Pairs are (rank, layer index)."""

    dead_pairs: frozenset[tuple[int, int]] = frozenset()  # no body, no hook
    unhooked: frozenset[tuple[int, int]] = frozenset()  # body, no hook
    raising: frozenset[tuple[int, int]] = frozenset()
    unbound_ranks: frozenset[int] = frozenset()
    missing_ranks: frozenset[int] = frozenset()  # the step was never executed there
    broken_ranks: frozenset[int] = frozenset()  # vLLM raised there before it bound the metadata
    mode: int = 0
    direct: bool = False
    twice: bool = False  # every layer runs twice, as with micro-batches
    padded: int = 0  # tokens that the model ran, padding included
    after_clear: frozenset[int] = frozenset()  # layers that run after the metadata was cleared (draft model)
    finish_hook: str = "get_finished"  # how the worker asks which transfers are done


HEALTHY = Fate()


@dataclass
class Prompt:
    id: str
    length: int
    digest: int = 0
    prefix: int = 0
    output: int = 1
    prefixes: tuple[int, ...] = ()  # of the first, two, ... blocks; at most four
    salt: int = 0


@dataclass
class Policy:
    """A connector. ``store(prompt, chunk index, start, end, last)`` yields entries for a chunk."""

    store: Callable[[Prompt, int, int, int, bool], Iterable[Entry]]
    match: Callable[[Prompt, int], int | None] = lambda prompt, local: 0


def nothing(prompt: Prompt, index: int, start: int, end: int, last: bool) -> list[Entry]:
    return []


class Blocks:
    """The blocks of a KV cache: given out from the front of a queue; what is freed goes to its end, the last
    block first. Block 0 is the null block. All KV cache groups share them."""

    def __init__(self, count: int, sizes: Sequence[int]) -> None:
        self.free = deque(range(1, count))
        self.sizes = sizes  # tokens of a block, by group
        self.tables: dict[tuple[str, int], list[int]] = {}

    def table(self, request: str, group: int = 0) -> list[int]:
        return self.tables.setdefault((request, group), [])

    def short(self, request: str, group: int, tokens: int) -> int:
        """Blocks that a request lacks for so many tokens."""
        return max(0, -(-tokens // self.sizes[group]) - len(self.table(request, group)))

    def take(self, blocks: int) -> list[int]:
        return [self.free.popleft() for _ in range(blocks)]

    def release(self, request: str) -> None:
        """A block that another request holds too stays."""
        for group in range(len(self.sizes)):
            mine = self.tables.pop((request, group), [])
            held = {block for table in self.tables.values() for block in table}
            self.free.extend(block for block in reversed(mine) if block not in held)

    def slots(self, request: str, start: int, end: int, group: int = 0) -> list[int]:
        """Of the positions [start, end), in their order."""
        size, table = self.sizes[group], self.table(request, group)
        return [table[at // size] * size + at % size for at in range(start, end)]


def slot_text(slots: Iterable[int]) -> str:
    """``1280+128,2048+64``."""
    found: list[list[int]] = []
    for slot in sorted(set(slots)):
        if found and slot == sum(found[-1]):
            found[-1][1] += 1
        else:
            found.append([slot, 1])
    return ",".join(f"{first}+{count}" for first, count in found)


class Sim:
    def __init__(
        self,
        run_dir: Path,
        *,
        tag: int = 7,
        tp: int = 1,
        layers: int = 2,
        pid: int = 100,
        block: int = 32,
        batched: int = 512,
        connector: str | None = "ChunkStore",
        role: str = "kv_both",
        ints: dict[str, int] | None = None,
        extra: dict[str, Any] | None = None,
        noop: Sequence[str] = (),
        created: bool = True,
        live: bool | Sequence[bool] = True,
        prefix_caching: bool = False,
        direct_call: bool = False,
        in_process: bool = False,
        args: dict[str, Any] | None = None,
        base: SpoolFile | None = None,
        connector_facts: dict[str, Any] | None = None,
        module: str = "my_store.connector",
        engine_facts: dict[str, Any] | None = None,
        graphs: dict[str, Any] | None = None,
        kv_blocks: int = 0,
        groups: Sequence[tuple[int, Sequence[int]]] = (),
        slot_bytes: float = 0.0,
    ) -> None:
        """``groups``: (block size, its layers' indices) of each KV cache group; none: one for all layers."""
        self.dir, self.tag, self.tp, self.layers = run_dir, tag, tp, layers
        self.block, self.batched = block, batched
        self.layer_names = [f"model.layers.{i}.self_attn.attn" for i in range(layers)]
        self.n = 0
        self.t = 1_000_000 + tag * 10**9
        self.connector = connector
        self.noop = tuple(noop)
        self.slow: dict[str, int] = {}  # hook -> ns that each of its calls takes
        self.live = [live] * tp if isinstance(live, bool) else list(live)
        self.asks = True  # a first chunk without a lookup gets one that finds nothing
        self._asked: set[str] = set()
        groups = groups or [(block, range(layers))]
        self.group_of = {layer: i for i, (_, members) in enumerate(groups) for layer in members}
        self.blocks = Blocks(kv_blocks, [size for size, _ in groups]) if kv_blocks else None
        self.watching = WATCHED if kv_blocks else 0  # of the steps to come
        self.hook_t: dict[tuple[int, int, str, str], int] = {}  # rank, step, hook, layer -> its end
        self._calls = 0
        self.scheduler = base or SpoolFile(
            run_dir, f"scheduler-{pid}-{tag}",
            {"kvtrace": "0.1.0", "pid": pid, "ppid": 1, "role": "scheduler", "perf_ns": 0, "wall_ns": 0},
        )  # fmt: skip
        self.workers: list[SpoolFile] = []
        transfer = None
        if connector is not None:
            transfer = {
                "connector": connector, "role": role, "module_path": module, "engine_id": "e",
                "extra": extra or {},
            }  # fmt: skip
        ok = created and connector is not None
        if args:
            self.scheduler.fact(Fact.ENGINE_ARGS, {"given": args})
        if connector_facts is not None or ok:
            self._connector_fact(self.scheduler, "scheduler", tag * 10, ints, connector_facts)
        self.scheduler.fact(
            Fact.ENGINE,
            {"tag": tag, "vllm": "0.32.0", "platform": "cpu", "dp_rank": 0, "tp": tp, "pp": 1, "dp": 1,
             "block_size": block, "max_num_batched_tokens": batched, "max_num_seqs": 16,
             "prefix_caching": prefix_caching, "chunked_prefill": True, "enforce_eager": True,
             "cudagraph_mode": "NONE", "kv_transfer": transfer, "connector_created": ok,
             "connector": tag * 10 if ok else None,
             "kv_groups": [
                 {"kind": "FullAttentionSpec", "block_size": size,
                  "layers": [self.layer_names[i] for i in members]}
                 for size, members in groups
             ],
             **(engine_facts or {})},
            self.t,
        )  # fmt: skip
        others = {
            layer: NOT_OF_TOKENS[group["kind"]]
            for group in (engine_facts or {}).get("kv_groups", ())
            if group["kind"] in NOT_OF_TOKENS
            for layer in group["layers"]
        }
        for rank in range(tp):
            spool = self.scheduler
            if not in_process:
                spool = SpoolFile(
                    run_dir, f"worker-{rank}-{pid + 1 + rank}-{tag}",
                    {"kvtrace": "0.1.0", "pid": pid + 1 + rank, "ppid": pid, "role": "worker"},
                )  # fmt: skip
            self.workers.append(spool)
            alive = self.live[rank] and connector is not None
            if alive:
                self._connector_fact(spool, "worker", tag * 10 + 1, ints, connector_facts)
            spool.fact(
                Fact.WORKER,
                {"tag": 0, "ordinal": tag, "rank": rank, "other_layers": others,
                 "kv_layers": [layer for layer in self.layer_names if layer not in others],
                 "connector_live": alive,
                 "connector": tag * 10 + 1 if alive else None,
                 "direct_call": dict.fromkeys(self.layer_names, direct_call),
                 "slot_bytes": dict.fromkeys(self.layer_names, slot_bytes) if slot_bytes else {}},
                self.t,
            )  # fmt: skip
            if graphs is not None:
                spool.fact(Fact.GRAPHS, {"tag": tag, **graphs}, self.t)

    def _connector_fact(
        self,
        spool: SpoolFile,
        role: str,
        ordinal: int,
        ints: dict[str, int] | None,
        more: dict[str, Any] | None,
    ) -> None:
        spool.fact(
            Fact.CONNECTOR,
            {"ordinal": ordinal, "role": role, "parent": None, "configured": self.connector,
             "class": self.connector, "module": "my_store.connector", "file": "my_store/connector.py",
             "ok": True, "error_type": None, "error": None,
             "proxy": "subclass", "noop": list(self.noop), "overrides": [],
             "ints": ints or {}, **(more or {})},
        )  # fmt: skip

    def clock(self, ns: int = US) -> int:
        self.t += ns
        return self.t

    @property
    def step_id(self) -> int:
        return self.tag << fmt.STEP_SHIFT | self.n

    # -- scheduler records

    def arrive(self, prompt: Prompt) -> None:
        s = self.scheduler
        req = s.name(prompt.id)
        head = pack_head(Kind.REQUEST, Role.SCHEDULER)
        digests = {"digest": prompt.digest, "prefix": prompt.prefix}
        s.add(
            *rows.Arrival(
                head, self.clock(), req, prompt.salt, prompt=prompt.length, **digests, max_tokens=16
            )
        )
        if prompt.prefixes:
            four = (*prompt.prefixes, 0, 0, 0, 0)[:4]
            head = pack_head(Kind.PREFIX, Role.SCHEDULER)
            s.add(*rows.Prefixes(head, req, self.block, self.block, *four))

    def lookup(
        self, request: str, local: int, answer: int | None, accepted: int | None, flags: int = 0,
        connector: int = 0,
    ) -> None:  # fmt: skip
        """In the step that is about to be scheduled."""
        s, step = self.scheduler, self.tag << fmt.STEP_SHIFT | (self.n + 1)
        value = fmt.NONE_ANSWER if answer is None else answer
        req = s.name(request)
        self._asked.add(request)
        head = pack_head(Kind.LOOKUP, Role.SCHEDULER, detail=connector, flags=flags)
        s.add(*rows.Lookup(head, self.clock(), self.clock(), step, req, local=local, external=value))
        if accepted is not None:
            head = pack_head(Kind.ALLOC, Role.SCHEDULER, detail=connector)
            s.add(*rows.Allocation(head, self.clock(), self.clock(), step, req, external=accepted))

    def prefix(self, request: str, tokens: int, digest: int) -> None:
        """The digest of a request's first tokens; of what a session's later parts add."""
        s, head = self.scheduler, pack_head(Kind.PREFIX, Role.SCHEDULER)
        s.add(*rows.Prefixes(head, s.name(request), tokens, tokens, digest, 0, 0, 0))

    def part(self, request: str, start: int, prompt: int) -> None:
        """The next part of a session, in the step that is about to be scheduled: its prompt is ``prompt``
        tokens now, and ``start`` of them have KV."""
        s, step = self.scheduler, self.tag << fmt.STEP_SHIFT | (self.n + 1)
        head = pack_head(Kind.GROWN, Role.SCHEDULER)
        s.add(*rows.Growth(head, self.clock(), s.name(request), step, start=start, prompt=prompt))

    def preempt(self, request: str, computed: int = 0) -> None:
        s = self.scheduler
        head = pack_head(Kind.PREEMPT, Role.SCHEDULER)
        s.add(*rows.Preemption(head, self.clock(), s.name(request), self.step_id, computed))

    def finish(self, request: str, computed: int, output: int = 1, status: str = "FINISHED_STOPPED") -> None:
        s = self.scheduler
        head = pack_head(Kind.FINISH, Role.SCHEDULER)
        s.add(
            *rows.Finish(
                head, self.clock(), s.name(request), self.step_id, computed=computed, output=output,
                status_name=s.name(status), preemptions=0,
            )
        )  # fmt: skip

    def step(
        self,
        chunks: Sequence[Chunk] = (),
        entries: Sequence[Entry] = (),
        *,
        tokens: int | None = None,
        prompts: dict[str, int] | None = None,
        fate: Fate = HEALTHY,
        unreadable: bool = False,
        dummy: bool = False,
    ) -> int:
        """One schedule() and its execution on every rank; returns the step's id."""
        for c in chunks:
            if self.asks and self.connector is not None and c.first and c.request not in self._asked:
                self.lookup(c.request, c.start, 0, 0)
            if self.blocks is not None:
                self.grow(c.request, c.start + c.tokens, resumed=c.resumed)
        self.n += 1
        step, s = self.step_id, self.scheduler
        total = sum(chunk.tokens for chunk in chunks) if tokens is None else tokens
        head = pack_head(Kind.STEP, Role.SCHEDULER)
        s.add(*rows.Step(head, self.clock(), self.clock(), step, total, len(chunks), new_requests=0, gone=0))
        for c in chunks:
            flags = (Flag.FIRST if c.first else 0) | (Flag.RESUMED if c.resumed else 0)
            length = (prompts or {}).get(c.request, c.start + c.tokens)
            head = pack_head(Kind.CHUNK, Role.SCHEDULER, flags=int(flags))
            size = (c.start, c.tokens, length, self.block)
            s.add(*rows.Chunk(head, self.clock(), s.name(c.request), step, *size))
        for e in entries:
            head = pack_head(Kind.META, Role.SCHEDULER, flags=e.flags)
            ident = s.name(e.request)
            s.add(*rows.MetadataEntry(head, self.clock(), ident, step, e.slots, e.tokens, e.start))
        if unreadable:
            head = pack_head(Kind.META, Role.SCHEDULER, flags=int(Flag.UNREADABLE))
            s.add(*rows.MetadataEntry(head, self.clock(), 0, step, -1, -1, -1))
        if self.connector is not None:
            head = pack_head(Kind.HOOK, Role.SCHEDULER, hooks.BUILD_METADATA.code, 0)
            slots = sum(max(0, e.slots) for e in entries)
            s.add(*rows.HookCall(head, self.clock(), self.clock(), step, 0, slots, len(entries), 0))
        for rank in range(self.tp):
            if rank not in fate.missing_ranks:
                self._execute(rank, step, total, len(chunks), entries, fate, dummy)
        return step

    # -- worker records

    def hook(self, rank: int, name: str, step: int, layer: str = "", slots: int = 0, entries: int = 0,
             flags: int = 0, connector: int = 1) -> None:  # fmt: skip
        w = self.workers[rank]
        ident = w.name(layer)
        head = pack_head(Kind.HOOK, Role.WORKER, hooks.BY_NAME[name].code, connector, flags)
        t0, t1 = self.clock(), self.clock(self.slow.get(name, US))
        self.hook_t[rank, step, name, layer] = t1
        w.add(*rows.HookCall(head, t0, t1, step, ident, slots, entries, extra=0))

    def body(self, rank: int, step: int, layer: str, skip: Skip = Skip.NO_CONNECTOR_METADATA,
             flags: int = 0) -> None:  # fmt: skip
        """An attention body by itself; step 0: outside of any step."""
        w = self.workers[rank]
        ident = w.name(layer)
        head = pack_head(Kind.OP, Role.WORKER, ATTENTION.code, flags=flags)
        w.add(*rows.OpCall(head, self.clock(), self.clock(), step, ident, 0, mode=0, skip=skip))

    def effect(
        self, rank: int, step: int, layer: int | None, slots: int, *, size: int = 0, files: int = 0,
        target: int = 0, hook: str = "save_kv_layer", flags: int = int(Flag.STORE),
    ) -> None:  # fmt: skip
        """What one watched call read of a layer (None: no layer was touched)."""
        w = self.workers[rank]
        ident = w.name(self.layer_names[layer]) if layer is not None else 0
        head = pack_head(Kind.EFFECT, Role.WORKER, hooks.BY_NAME[hook].code, self.tag * 10 + 1 & 0xFF, flags)
        w.add(*rows.Effect(head, self.clock(), ident, step, slots, bytes=size, files=files, target=target))

    def open_save(self, request: str) -> None:
        s = self.scheduler
        head = pack_head(Kind.OPEN, Role.SCHEDULER, 0, 0, int(Flag.STORE))
        s.add(*rows.TransferBegun(head, self.clock(), s.name(request), self.step_id))

    def done(
        self, request: str, rank: int | None = None, failed: int = 0, flags: int = int(Flag.STORE)
    ) -> None:
        """A save (or, LOAD, a load) is reported finished: by a rank, or (None) to the scheduler."""
        spool = self.scheduler if rank is None else self.workers[rank]
        role = Role.SCHEDULER if rank is None else Role.WORKER
        head = pack_head(Kind.DONE, role, 0, 0, flags)
        spool.add(*rows.TransferDone(head, self.clock(), spool.name(request), self.step_id, failed))

    def load_errors(self, rank: int, step: int, blocks: int) -> None:
        """The connector says how many blocks it could not load."""
        head = pack_head(Kind.HOOK, Role.WORKER, hooks.LOAD_ERRORS.code, 1)
        self.workers[rank].add(*rows.HookCall(head, self.clock(), self.clock(), step, 0, -1, -1, blocks))

    def _execute(
        self,
        rank: int,
        step: int,
        tokens: int,
        requests: int,
        entries: Sequence[Entry],
        fate: Fate,
        dummy: bool,
    ) -> None:
        w, t0 = self.workers[rank], self.clock()
        live = self.live[rank] and self.connector is not None
        if rank in fate.broken_ranks:
            head = pack_head(Kind.EXEC, Role.WORKER, flags=int(Flag.RAISED | self.watching))
            w.add(*rows.Execution(head, t0, self.clock(), step, tokens, requests, -1, 0))
            return
        bound = live and rank not in fate.unbound_ranks
        slots = sum(max(0, e.slots) for e in entries)
        if bound:
            self.hook(rank, "bind_connector_metadata", step, "", slots, len(entries))
            self.hook(rank, "start_load_kv", step)
        raised = False
        if tokens:
            for _ in range(2 if fate.twice else 1):
                for i, layer in enumerate(self.layer_names):
                    if (rank, i) in fate.dead_pairs or raised or i in fate.after_clear:
                        continue
                    hooked = live and bound and (rank, i) not in fate.unhooked
                    skip = Skip.HOOKED if hooked else (
                        Skip.NO_CONNECTOR if not live else
                        Skip.NO_CONNECTOR_METADATA if not bound else Skip.UNKNOWN
                    )  # fmt: skip
                    if hooked:
                        self.hook(rank, "wait_for_layer_load", step, layer)
                    ident = w.name(layer)
                    dispatch = Dispatch.DIRECT if fate.direct else Dispatch.DISPATCHER
                    head = pack_head(Kind.OP, Role.WORKER, ATTENTION.code, dispatch)
                    times = (self.clock(), self.clock())
                    w.add(*rows.OpCall(head, *times, step, ident, 0, fate.mode, skip))
                    if hooked:
                        raised = (rank, i) in fate.raising
                        self.hook(rank, "save_kv_layer", step, layer, slots, len(entries),
                                  int(Flag.RAISED) if raised else 0)  # fmt: skip
        if bound:
            self.hook(rank, "wait_for_save", step, "", slots, len(entries))
            self.hook(rank, fate.finish_hook, step)
            self.hook(rank, "clear_connector_metadata", step)
        for i in sorted(fate.after_clear):
            self.body(rank, step, self.layer_names[i])
        flags = (
            (Flag.DUMMY if dummy else 0)
            | (0 if tokens else Flag.NO_FORWARD)
            | (Flag.RAISED if raised else 0)
            | self.watching
        )
        head = pack_head(Kind.EXEC, Role.WORKER, flags=int(flags))
        w.add(*rows.Execution(head, t0, self.clock(), step, tokens, requests, fate.mode, fate.padded))

    # -- slots

    def give(self, request: str, blocks: Sequence[int], group: int = 0, flags: int = 0) -> None:
        """Blocks at the end of a request's table (FIRST: of a new one), in the step that is about to be
        scheduled."""
        assert self.blocks is not None
        if flags & Flag.FIRST:
            self.blocks.tables[request, group] = []
        table = self.blocks.table(request, group)
        s, step = self.scheduler, self.tag << fmt.STEP_SHIFT | (self.n + 1)
        head = pack_head(Kind.BLOCKS, Role.SCHEDULER, flags=flags)
        for place, block, count in runs(blocks):
            where = (group, len(table) + place, block, count)
            s.add(*rows.BlocksGiven(head, self.clock(), s.name(request), step, *where))
        table += blocks

    def grow(self, request: str, tokens: int, resumed: bool = False) -> None:
        """What a request lacks for so many tokens, in the step that is about to be scheduled."""
        assert self.blocks is not None
        for group in range(len(self.blocks.sizes)):
            lacks = self.blocks.short(request, group, tokens)
            if lacks:
                begins = Flag.FIRST | (Flag.RESUMED if resumed else 0)
                flags = 0 if self.blocks.table(request, group) else int(begins)
                self.give(request, self.blocks.take(lacks), group, flags)

    def free(self, request: str) -> None:
        """Its blocks may be given to others."""
        assert self.blocks is not None
        self.blocks.release(request)

    def slots(self, request: str, start: int, end: int, group: int = 0) -> list[int]:
        """Where the positions [start, end) of a request are."""
        assert self.blocks is not None
        return self.blocks.slots(request, start, end, group)

    def touch(
        self, slots: Mapping[int, Iterable[int]], *, rank: int = 0, hook: str = "save_kv_layer",
        step: int = 0, flags: int = int(Flag.STORE), t: int = 0, connector: int = 0, partly: bool = False,
    ) -> None:  # fmt: skip
        """What one call touched, by layer: one of a hook in a step (0: the latest), at that hook's time, or
        ("") a piece of background work, now. A hook that is called by layer makes a call of each.
        ``partly``: some of each slot."""
        w, step = self.workers[rank], step or self.step_id
        code = hooks.BY_NAME[hook].code if hook else 0
        self._calls += 1
        for layer, touched in slots.items():
            name = self.layer_names[layer]
            ended = self.hook_t.get((rank, step, hook, name)) or self.hook_t.get((rank, step, hook, ""))
            when = t or (ended if hook else 0) or self.clock()
            text, amount = slot_text(touched), len(set(touched))
            ident = w.name(f"/{text}" if partly or not text else text)
            amounts = (0, amount) if partly else (amount, 0)
            head = pack_head(Kind.SLOTS, Role.WORKER, code, connector or self.tag * 10 + 1 & 0xFF, flags)
            w.add(*rows.SlotsTouched(head, when, w.name(name), step, ident, *amounts, self._calls))

    def touch_all(self, slots: Iterable[int], **more: Any) -> None:
        """The same slots in each layer."""
        self.touch(dict.fromkeys(range(self.layers), slots), **more)

    def touch_unknown(self, **more: Any) -> None:
        """A slot in each layer, of which is not known which it was."""
        self.workers[0].names["0+1"] = 0
        self.touch_all([0], **more)

    def read(
        self, request: str, start: int, end: int, *, layers: Sequence[int] | None = None, **more: Any
    ) -> None:
        """The slots of a request's positions are read, in all layers or these; ``more``: as of touch."""
        here = range(self.layers) if layers is None else layers
        self.touch({i: self.slots(request, start, end, self.group_of[i]) for i in here}, **more)

    def stored(
        self, request: str, start: int, read: int, layer: int, rank: int = 0, step: int = 0, **more: Any
    ) -> None:
        """A watched save call of a layer reads so many positions from ``start`` on; ``more``: of effect."""
        step, hook = step or self.step_id, more.get("hook", "save_kv_layer")
        self.effect(rank, step, layer, read, **more)
        if read > 0:
            first = max(0, start)
            self.read(request, first, first + read, layers=[layer], rank=rank, step=step, hook=hook)

    def write_kv(self, request: str, start: int, end: int, **more: Any) -> None:
        """... are written, by start_load_kv unless ``hook`` says otherwise."""
        self.read(request, start, end, **{"hook": "start_load_kv", "flags": int(Flag.LOAD), **more})

    def prints(
        self,
        request: str,
        values: Sequence[int],
        first: int = 0,
        rank: int = 0,
        group: int = 0,
        kind: Kind = Kind.PRINTS,
    ) -> None:
        """Fingerprints of a request's blocks from place ``first`` on, at the end of the latest step."""
        w = self.workers[rank]
        head = pack_head(kind, Role.WORKER, detail=group)
        for at in range(0, len(values), 4):
            four = (*values[at : at + 4], 0, 0, 0)[:4]
            w.add(*rows.BlockPrints(head, w.name(request), self.step_id, first + at, *four))

    def of_layers(
        self, request: str, numbers: Sequence[Sequence[int]], first: int = 0, rank: int = 0, group: int = 0
    ) -> None:
        """Fingerprints of single layers, of a request's blocks from place ``first`` on, at the end of the
        latest step. ``numbers``: of each block, one a layer of the group (up to 9)."""
        w = self.workers[rank]
        head = pack_head(Kind.LAYERS, Role.WORKER, detail=group)
        names = [name for at, name in enumerate(self.layer_names) if self.group_of[at] == group]
        layer_set = w.name(json.dumps([w.name(name) for name in names]))
        for place, own in enumerate(numbers, first):
            nine = [*own, *[0] * rows.NUMBERS][: rows.NUMBERS]
            words = [
                sum(n << rows.NUMBER_BITS * at for at, n in enumerate(nine[i : i + 3])) for i in (0, 3, 6)
            ]
            w.add(*rows.LayerPrints(head, w.name(request), self.step_id, place, layer_set, *words))

    def device(
        self, rank: int, step: int, *, device: int, before: int, host: int, caught_up: bool = True,
        hook: str = "save_kv_layer", op: str = "", crossed: bool = False,
    ) -> None:  # fmt: skip
        """A call timed on the device."""
        what = ops.BY_NAME[op].code if op else hooks.BY_NAME[hook].code
        flags = (Flag.CAUGHT_UP if caught_up else 0) | (Flag.STREAMS if crossed else 0)
        head = pack_head(Kind.DEVICE, Role.WORKER, what, fmt.DETAIL_IS_OP if op else 1, int(flags))
        row = rows.DeviceCall(head, self.clock(), step, 0, device_ns=device, before_ns=before, host_ns=host)
        self.workers[rank].add(*row)

    def timed(self, rank: int, step: int, calls: int, untimed: int = 0, own: int = 0, busy: int = 0) -> None:
        """A step whose calls were timed on the device."""
        head = pack_head(Kind.TIMED, Role.WORKER)
        row = rows.TimedStep(head, self.clock(), step, calls, untimed, lost=0, own_ns=own, busy_ns=busy)
        self.workers[rank].add(*row)

    # -- a whole request after the other

    def one_step(
        self, request: str, prompt: int, entries: Sequence[Entry] = (), *, taken: int = 0, digest: int = 0,
        prefixes: tuple[int, ...] = (), ends: bool = True, **step: Any,
    ) -> int:  # fmt: skip
        """A request comes, ``taken`` tokens of its prompt are the connector's, the rest is computed in one
        step, which is returned; and it ends."""
        self.arrive(Prompt(request, prompt, digest=digest, prefixes=prefixes))
        if taken:
            self.lookup(request, 0, taken, taken)
        chunk = Chunk(request, taken, prompt - taken, first=True)
        number = self.step([chunk], entries, prompts={request: prompt}, **step)
        if ends:
            self.finish(request, prompt)
        return number

    def load_begins(self, request: str, prompt: int, taken: int, tokens: int = 0) -> int:
        """A request comes, ``taken`` tokens of which are loaded in the background: the step in which that
        begins, which computes ``tokens`` of others. It is not admitted yet."""
        self.arrive(Prompt(request, prompt, digest=1))
        self.lookup(request, 0, taken, taken, int(Flag.ASYNC))
        if self.blocks is not None:
            self.grow(request, taken)
        return self.step([], [Entry(request, taken, taken, 0, int(Flag.LOAD))], tokens=tokens)

    def serve(
        self, prompts: Sequence[Prompt], policy: Policy, *, local: Callable[[Prompt], int] = lambda p: 0,
        fate: Callable[[int], Fate] = lambda n: HEALTHY,
        measure: Callable[[int, int, int, int], int | None] | None = None,
    ) -> None:  # fmt: skip
        """Each prompt alone: lookup, chunks of at most ``batched`` tokens, decode, finish.

        ``measure(n, rank, layer, slots)``: what the watched save call of step n read of the ``slots`` that
        it should have read, None where it was not watched.
        """
        for prompt in prompts:
            self.arrive(prompt)
            start = local(prompt)
            if self.connector is not None:
                answer = policy.match(prompt, start)
                accepted = max(0, answer or 0)
                self.lookup(prompt.id, start, answer, accepted)
                start += accepted
            index, lengths = 0, {prompt.id: prompt.length}
            while start < prompt.length:
                size = min(self.batched, prompt.length - start)
                end = start + size
                entries: list[Entry] = []
                if self.connector is not None:
                    entries = list(policy.store(prompt, index, start, end, end == prompt.length))
                slots = sum(max(0, entry.slots) for entry in entries)
                pairs = [(rank, layer) for rank in range(self.tp) for layer in range(self.layers)]
                seen = {pair: measure(self.n + 1, *pair, slots) for pair in pairs if measure and slots}
                before = self.watching
                self.watching = WATCHED if set(seen.values()) - {None} else before
                self.step([Chunk(prompt.id, start, size, first=index == 0)], entries, prompts=lengths,
                          fate=fate(self.n + 1))  # fmt: skip
                self.watching = before
                for (rank, layer), read in seen.items():
                    if read is not None:
                        self.stored(prompt.id, entries[0].start, read, layer, rank)
                start, index = end, index + 1
            for _ in range(prompt.output - 1):
                self.step([], [], tokens=1, fate=fate(self.n + 1))
            self.finish(prompt.id, prompt.length + prompt.output - 1, prompt.output)

    def write(self) -> None:
        for spool in {id(s): s for s in (self.scheduler, *self.workers)}.values():
            spool.write()


class Several(Sim):
    """A connector that holds others, on one rank: ``names`` of their classes; ``nested``: the names of those
    inside the last of them; ``roles``: of those that are not kv_both."""

    def __init__(
        self, run_dir: Path, names: Sequence[str], nested: Sequence[str] = (),
        roles: Mapping[str, str] = MappingProxyType({}), **more: Any,
    ) -> None:  # fmt: skip
        configured = [{"kv_connector": name, "kv_role": roles.get(name, "kv_both")} for name in names]
        super().__init__(run_dir, connector="MultiConnector", extra={"connectors": configured}, **more)
        leaves = [*names[:-1], *nested] if nested else names
        self.inner = {name: (self.tag * 10 + 2 + i, self.tag * 10 + 12 + i) for i, name in enumerate(leaves)}
        """Name -> its index on the scheduler's side and on the worker's."""
        sides = ((self.scheduler, "scheduler", 0), (self.workers[0], "worker", 1))
        for spool, role, side in sides:
            top = middle = self.tag * 10 + side
            if nested:
                middle = self.tag * 10 + 20 + side
                self._connector_fact(spool, role, middle, None, {"parent": top, **_named(names[-1])})
            for name in leaves:
                parent = middle if name in nested else top
                facts = {"parent": parent, **_named(name)}
                self._connector_fact(spool, role, self.inner[name][side], None, facts)

    def store(self, chunks: Sequence[Chunk], entries: Mapping[str, Sequence[Entry]], **more: Any) -> int:
        """A step with what each connector's part of the metadata names."""
        for chunk in chunks:
            for scheduler, _ in self.inner.values() if chunk.first else ():
                s, step = self.scheduler, self.tag << fmt.STEP_SHIFT | (self.n + 1)
                head = pack_head(Kind.LOOKUP, Role.SCHEDULER, detail=scheduler)
                times = self.clock(), self.clock()
                s.add(*rows.Lookup(head, *times, step, s.name(chunk.request), local=0, external=0))
        step = self.step(chunks, [one for named in entries.values() for one in named], **more)
        for name, (scheduler, worker) in self.inner.items():
            self._part(step, entries.get(name, ()), scheduler, worker)
        return step

    def _part(self, step: int, named: Sequence[Entry], scheduler: int, worker: int) -> None:
        s = self.scheduler
        for one in named:
            head = pack_head(Kind.META, Role.SCHEDULER, detail=scheduler, flags=one.flags)
            row = rows.MetadataEntry(
                head, self.clock(), s.name(one.request), step, one.slots, one.tokens, one.start
            )
            s.add(*row)
        work = sum(one.slots for one in named), len(named)
        head = pack_head(Kind.HOOK, Role.SCHEDULER, hooks.BUILD_METADATA.code, scheduler)
        s.add(*rows.HookCall(head, self.clock(), self.clock(), step, 0, *work, 0))
        for hook in ("bind_connector_metadata", "start_load_kv"):
            self.hook(0, hook, step, "", *work, connector=worker)
        for layer in self.layer_names:
            self.hook(0, "save_kv_layer", step, layer, *work, connector=worker)
        for hook in ("wait_for_save", "get_finished"):
            self.hook(0, hook, step, "", *work, connector=worker)


def _named(name: str) -> dict[str, Any]:
    return {"configured": name, "class": name}


def run_json(
    run_dir: Path, processes: Sequence[dict[str, Any]] = (), command: Sequence[str] = ("vllm",)
) -> None:
    (run_dir / "run.json").write_text(
        json.dumps(
            {"schema": "kvtrace.run/1", "name": "test", "command": list(command), "exit_code": 0,
             "started_wall_ns": 1, "ended_wall_ns": 2, "signal": None, "host": "h", "kvtrace": "0.1.0",
             "python": "3.11", "processes": list(processes), "notes": []}
        )
    )  # fmt: skip


@dataclass
class Rounding:
    """A connector that stores each prompt rounded down to ``unit`` (of P - d tokens)."""

    unit: int
    d: int = 0
    empty_entries: bool = True  # an entry of 0 slots where the rounding leaves nothing
    first_chunk_only: bool = False
    keep: bool = False  # does not store again what it holds (by the rounded prefix)
    held: set[tuple[int, int]] = field(default_factory=set)

    def policy(self) -> Policy:
        return Policy(self._store)

    def aligned(self, prompt: Prompt) -> int:
        return (prompt.length - self.d) // self.unit * self.unit

    def _store(self, prompt: Prompt, index: int, start: int, end: int, last: bool) -> list[Entry]:
        aligned = self.aligned(prompt)
        key = (aligned, prompt.digest if aligned else 0)
        if self.keep and index == 0:
            if key in self.held:
                return []
            self.held.add(key)
        elif self.keep and key not in self.held:
            return []
        if self.first_chunk_only:
            if index:
                return []
            return [Entry(prompt.id, min(aligned, end), prompt.length)]
        size = min(aligned, end) - start
        if size > 0 or (index == 0 and aligned == 0 and self.empty_entries):
            return [Entry(prompt.id, max(0, size), prompt.length, start)]
        return []
