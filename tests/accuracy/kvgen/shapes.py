"""What the metadata of a generated connector looks like, and the code that fills and reads it.

A shape is a record type (what one entry is), a container (how entries lie in the metadata), the fields of an
entry (who, what, where) and how much one entry covers; or one of the special ones, which have no entries.
Both sides come from here: ``put``/``get`` bodies for the scheduler, ``each`` bodies for the worker, which
yield ``(rid, key, where)``.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvgen.names import Names

RECORDS = ("dataclass", "plain", "slotted", "namedtuple", "msgspec", "dict", "tuple", "list")
CONTAINERS = (
    "two-lists",
    "flagged",
    "by-request",
    "step-object",
    "grouped",
    "payload",
    "tuples",
    "deque",
    "keyed",
)
SPECIAL = ("flat", "ragged", "map", "blob", "combined", "deltas", "array")
# Fields that say nothing of where or what: concept -> its value, in the scheduler.
ENTRY_NOISE = {
    "total": "len(toks)",
    "layer_ids": "[0, 1, 2, 3]",
    "stamp": "time.monotonic()",
    "attempt": "0",
    "final": "hi >= len(toks)",
    "group": "0",
    "model": "'tiny-llama'",
    "rank": "(0, 1)",
    "hashes": "[str(n).encode() * 6 for n in range(hi // 16)]",
}
STEP_NOISE = {
    "finished": ("set", "set(scheduler_output.finished_req_ids)"),
    "running": ("list", "list(scheduler_output.num_scheduled_tokens)"),
    "scheduled": ("dict", "dict(scheduler_output.num_scheduled_tokens)"),
    "stamp": ("float", "time.time()"),
    "budget": ("int", "scheduler_output.total_num_scheduled_tokens"),
    "version": ("int", "3"),
}
WHERE = ("blocks", "slot-tensor", "slot-list", "block-interval", "token-interval", "range")


@dataclass(frozen=True)
class Shape:
    """Attributes:
    form: ``entries`` or one of SPECIAL.
    record, container: of ``entries``.
    what: how the worker learns the name of what it stores: the key itself, the tokens (it computes the
        key), or the request's id and the unit's number.
    where: how it learns where the KV lies.
    covers: one entry for each unit, for a span of units, or for the whole prefix as one unit.
    rid: entries name their request.
    dataclass_meta: the metadata class itself is a dataclass.
    noise: fields of entries, and of the metadata itself (``step:...``), that say nothing.
    """

    form: str
    record: str
    container: str
    what: str
    where: str
    covers: str
    rid: bool
    dataclass_meta: bool
    noise: tuple[str, ...] = ()

    @property
    def slots(self) -> bool:
        """The worker gets slots instead of blocks."""
        return self.form == "entries" and self.where in ("slot-tensor", "slot-list")


class ShapeSource:
    """Writes one shape. ``block``, ``unit`` (tokens) and ``per_unit`` (blocks) are expressions."""

    def __init__(self, shape: Shape, names: Names, block: str, unit: str, per_unit: str) -> None:
        self.shape, self.names, self.block, self.unit, self.per_unit = shape, names, block, unit, per_unit
        self.whole = shape.covers == "whole"
        self.keys = names["call:keys"]

    # --- names -----------------------------------------------------------------------------------

    def _field(self, concept: str) -> str:
        return self.names[f"field:{concept}"]

    def container_name(self, direction: str) -> str:
        return self._field("puts" if direction == "put" else "gets")

    def fields(self) -> list[tuple[str, str]]:
        """(concept, name) of an entry's fields, in order."""
        shape = self.shape
        concepts = ["rid"] if shape.rid or shape.what == "index" else []
        concepts += [{"key": "key", "tokens": "tokens", "index": "index"}[shape.what]]
        if shape.where in ("block-interval", "token-interval"):
            concepts += ["table", "lo", "hi"]
        elif shape.where == "range":
            concepts += ["table", "span"]
        else:
            concepts += ["slots" if shape.slots else "blocks"]
            if shape.covers == "span" and shape.what == "tokens":
                concepts += ["skip"]
        concepts += [name for name in shape.noise if name in ENTRY_NOISE]
        if shape.container == "flagged":
            concepts += ["flag"]
        return [(concept, self._field(concept)) for concept in concepts]

    # --- definitions -----------------------------------------------------------------------------

    def definitions(self) -> str:
        text = ""
        if self.shape.form == "entries":
            text += self._record_class()
            if self.shape.container == "step-object":
                text += self._step_class()
        if self.shape.form == "combined":
            text += self._combined_class()
        return text + self._meta_class()

    def _record_class(self) -> str:
        name, fields = self.names["class:entry"], [field for _, field in self.fields()]
        if self.shape.record == "dataclass":
            return f"\n\n@dataclass\nclass {name}:\n" + "".join(f"    {f}: Any\n" for f in fields)
        if self.shape.record == "namedtuple":
            return f"\n\nclass {name}(NamedTuple):\n" + "".join(f"    {f}: Any\n" for f in fields)
        if self.shape.record == "msgspec":
            return f"\n\nclass {name}(msgspec.Struct):\n" + "".join(f"    {f}: Any\n" for f in fields)
        if self.shape.record in ("plain", "slotted"):
            slots = f"    __slots__ = {tuple(fields)!r}\n\n" if self.shape.record == "slotted" else ""
            body = "".join(f"        self.{f} = {f}\n" for f in fields)
            return f"\n\nclass {name}:\n{slots}    def __init__(self, {', '.join(fields)}):\n{body}"
        return ""

    def _step_class(self) -> str:
        puts, gets = self._field("puts"), self._field("gets")
        return (
            f"\n\nclass {self.names['class:step']}:\n    def __init__(self):\n"
            f"        self.{puts} = []\n        self.{gets} = []\n"
        )

    def _combined_class(self) -> str:
        f = self._field
        return f"""

class {self.names["class:entry"]}:
    def __init__(self, {f("rid")}, {f("tokens")}, {f("blocks")}):
        self.{f("rid")} = {f("rid")}
        self.{f("tokens")} = {f("tokens")}
        self.{f("blocks")} = {f("blocks")}
        self.{f("gets")} = None
        self.{f("puts")} = None
"""

    def _attributes(self) -> list[tuple[str, str]]:
        """(attribute, factory) of the metadata object."""
        return [*self._main_attributes(), *((name, factory) for name, factory, _ in self.step_noise())]

    def step_noise(self) -> list[tuple[str, str, str]]:
        """(attribute, factory, value in the scheduler) of what says nothing of stores and loads."""
        wanted = [name.removeprefix("step:") for name in self.shape.noise if name.startswith("step:")]
        return [(self._field(name), *STEP_NOISE[name]) for name in wanted]

    def _main_attributes(self) -> list[tuple[str, str]]:
        f, form = self._field, self.shape.form
        if form == "flat":
            names = [f"{f(d)}_{part}" for d in ("puts", "gets") for part in ("keys", "pages", "who")]
            return [(name, "list") for name in names]
        if form == "ragged":
            return [(f(c), "list") for c in ("flat", "counts", "key", "mode", "rid")]
        if form == "map":
            return [(f("puts"), "dict"), (f("gets"), "dict"), (f("rid"), "dict")]
        if form == "blob":
            return [(f("blob"), "bytes")]
        if form == "combined":
            return [(f("by_request"), "dict")]
        if form == "deltas":
            return [(f(c), "dict") for c in ("new", "grown", "upto")] + [
                (f("gone"), "list"),
                (f("gets"), "list"),
            ]
        if form == "array":
            return [(f("puts"), "list"), (f("gets"), "list"), (f("key"), "list"), (f("rid"), "list")]
        return {
            "flagged": [(f("payload"), "list")],
            "by-request": [(f("puts"), "dict"), (f("gets"), "dict")],
            "step-object": [(f("step"), self.names["class:step"])],
            "grouped": [(f("groups"), "dict")],
            "payload": [(f("payload"), "dict")],
            "tuples": [(f("puts"), "tuple"), (f("gets"), "tuple")],
            "deque": [(f("puts"), "collections.deque"), (f("gets"), "collections.deque")],
            "keyed": [(f("puts"), "dict"), (f("gets"), "dict")],
        }.get(self.shape.container, [(f("puts"), "list"), (f("gets"), "list")])

    def _meta_class(self) -> str:
        name, attributes = self.names["class:meta"], self._attributes()
        if self.shape.dataclass_meta:
            body = "".join(f"    {a}: Any = field(default_factory={factory})\n" for a, factory in attributes)
            return f"\n\n@dataclass\nclass {name}(KVConnectorMetadata):\n{body}"
        body = "".join(f"        self.{a} = {factory}()\n" for a, factory in attributes)
        return f"\n\nclass {name}(KVConnectorMetadata):\n    def __init__(self):\n{body}"

    def create(self) -> str:
        return f"{self.names['class:meta']}()"

    # --- scheduler side ---------------------------------------------------------------------------

    def add(self, direction: str) -> str:
        """Body of the method that notes tokens [lo, hi) of a request.

        Its arguments: meta, rid, toks (at least up to hi), keys (of all full units), table, lo, hi.
        """
        if self.shape.form != "entries":
            return str(getattr(self, f"_add_{self.shape.form}")(direction))
        values = self._values(direction)
        entry = self._construct(values)
        if self.shape.covers == "unit":
            lines = [f"for j in range(lo // {self.unit}, hi // {self.unit}):", f"    item = {entry}"]
            return "\n".join([*lines, "    " + self._append(direction)])
        return f"item = {entry}\n{self._append(direction)}"

    def _blocks_at(self) -> str:
        """The blocks of one entry, in the scheduler."""
        if self.shape.covers == "unit":
            return f"table[j * {self.per_unit}:(j + 1) * {self.per_unit}]"
        if self.whole:
            return f"table[:{self._last('hi')}]"
        return f"table[lo // {self.block}:hi // {self.block}]"

    def _last(self, tokens: str) -> str:
        """Blocks of the first ``tokens`` tokens, the last one perhaps in part."""
        return f"-(-{tokens} // {self.block})"

    def _values(self, direction: str) -> list[str]:
        shape, b, pu = self.shape, self.block, self.per_unit
        unit = shape.covers == "unit"
        first, last = (f"j * {pu}", f"(j + 1) * {pu}") if unit else (f"lo // {b}", f"hi // {b}")
        low, high = (f"j * {self.unit}", f"(j + 1) * {self.unit}") if unit else ("lo", "hi")
        if self.whole:
            first, low, last = "0", "0", self._last("hi")
        slot_list = f"[p * {b} + o for p in {self._blocks_at()} for o in range({b})]"
        key = {"unit": "keys[j]", "span": f"keys[lo // {self.unit}:hi // {self.unit}]"}.get(
            shape.covers, f"keys[hi // {self.unit} - 1] if hi else {self.keys}_of_nothing()"
        )
        of = {
            "rid": "rid",
            "key": key,
            "tokens": f"list(toks[:{high}])",
            "index": "j" if unit else f"{low} // {self.unit}",
            "blocks": self._blocks_at(),
            "slots": f"torch.tensor({slot_list}, dtype=torch.long)"
            if shape.where == "slot-tensor"
            else slot_list,
            "table": "list(table)",
            "lo": first if shape.where == "block-interval" else low,
            "hi": last if shape.where == "block-interval" else high,
            "span": f"range({first}, {last})",
            "skip": "lo",
            "flag": str(direction == "put"),
            **ENTRY_NOISE,
        }
        return [of[concept] for concept, _ in self.fields()]

    def _construct(self, values: list[str]) -> str:
        names = [name for _, name in self.fields()]
        if self.shape.record == "dict":
            return "{" + ", ".join(f"{n!r}: {v}" for n, v in zip(names, values, strict=True)) + "}"
        if self.shape.record == "tuple":
            return "(" + ", ".join(values) + ",)"
        if self.shape.record == "list":
            return "[" + ", ".join(values) + "]"
        arguments = ", ".join(f"{n}={v}" for n, v in zip(names, values, strict=True))
        return f"{self.names['class:entry']}({arguments})"

    def _append(self, direction: str) -> str:
        f, name = self._field, self.container_name(direction)
        number = len(f("puts"))  # any number that is the same on both sides
        return {
            "flagged": f"meta.{f('payload')}.append(item)",
            "by-request": f"meta.{name}.setdefault(rid, []).append(item)",
            "step-object": f"meta.{f('step')}.{name}.append(item)",
            "grouped": f"meta.{f('groups')}.setdefault({number % 2}, {{}})"
            f".setdefault('{name}', []).append(item)",
            "payload": f"meta.{f('payload')}.setdefault('{name}', []).append(item)",
            "tuples": f"meta.{name} = (*meta.{name}, item)",
            "keyed": f"meta.{name}[f'{{rid}}:{{lo}}:{{len(meta.{name})}}'] = item",
        }.get(self.shape.container, f"meta.{name}.append(item)")

    # --- worker side ------------------------------------------------------------------------------

    def each(self, direction: str) -> str:
        """Body of a generator over the entries of ``meta``: yields (rid or None, key, where)."""
        if self.shape.form != "entries":
            return str(getattr(self, f"_each_{self.shape.form}")(direction))
        loop = self._loop(direction)
        access = {concept: self._access(concept) for concept, _ in self.fields()}
        rid = access.get("rid", "None")
        body = [f"rid = {rid}", f"where = {self._where(access)}", *self._yield(access)]
        return loop + "\n" + "\n".join("    " + line for line in body)

    def _access(self, concept: str) -> str:
        names = self.fields()
        place, name = next((i, n) for i, (c, n) in enumerate(names) if c == concept)
        if self.shape.record == "dict":
            return f"item[{name!r}]"
        if self.shape.record in ("tuple", "list"):
            return f"item[{place}]"
        return f"item.{name}"

    def _loop(self, direction: str) -> str:
        f, name = self._field, self.container_name(direction)
        if self.shape.container == "flagged":
            wanted = "" if direction == "put" else "not "
            test = wanted + self._access("flag").replace("item", "i", 1)
            return f"for item in [i for i in meta.{f('payload')} if {test}]:"
        source = {
            "by-request": f"[i for group in meta.{name}.values() for i in group]",
            "step-object": f"meta.{f('step')}.{name}",
            "grouped": f"[i for g in meta.{f('groups')}.values() for i in g.get('{name}', ())]",
            "payload": f"meta.{f('payload')}.get('{name}', ())",
            "keyed": f"list(meta.{name}.values())",
        }.get(self.shape.container, f"meta.{name}")
        return f"for item in {source}:"

    def _where(self, access: dict[str, str]) -> str:
        b = self.block
        if self.shape.where == "block-interval":
            return f"{access['table']}[{access['lo']}:{access['hi']}]"
        if self.shape.where == "token-interval":
            return f"{access['table']}[{access['lo']} // {b}:{self._last(access['hi'])}]"
        if self.shape.where == "range":
            return f"[{access['table']}[i] for i in {access['span']}]"
        if self.shape.where == "slot-list":
            return f"torch.tensor({access['slots']}, dtype=torch.long)"
        return access["slots" if self.shape.slots else "blocks"]

    def _yield(self, access: dict[str, str]) -> list[str]:
        """The lines that name what lies there, and give it out by the unit."""
        shape, unit = self.shape, self.unit
        size = unit if shape.slots else self.per_unit
        if shape.covers == "whole":
            name = {"key": access.get("key", ""), "index": "f'{rid}'"}.get(shape.what, "")
            if shape.what == "tokens":
                tokens = access["tokens"]
                name = f"{self.keys}({tokens}, {unit})[-1] if {tokens} else {self.keys}_of_nothing()"
            return [f"yield rid, {name}, where"]
        if shape.covers == "unit":
            name = {
                "key": access.get("key", ""),
                "tokens": f"{self.keys}({access.get('tokens')}, {unit})[-1]",
                "index": f"'%s.%d' % (rid, {access.get('index')})",
            }[shape.what]
            return [f"yield rid, {name}, where"]
        if shape.what == "key":
            return [
                f"for j, key in enumerate({access['key']}):",
                f"    yield rid, key, where[j * {size}:(j + 1) * {size}]",
            ]
        if shape.what == "index":
            return [
                f"for j in range(len(where) // {size}):",
                f"    yield rid, '%s.%d' % (rid, {access['index']} + j), where[j * {size}:(j + 1) * {size}]",
            ]
        skip = access.get("skip") or self._skipped(access)
        return [
            f"names = {self.keys}({access['tokens']}, {unit})[{skip} // {unit}:]",
            "for j, key in enumerate(names):",
            f"    yield rid, key, where[j * {size}:(j + 1) * {size}]",
        ]

    def _skipped(self, access: dict[str, str]) -> str:
        """Leading tokens that an entry does not cover, where an interval says it."""
        if self.shape.where == "token-interval":
            return access["lo"]
        if self.shape.where == "range":
            return f"({access['span']}.start * {self.block})"
        return f"({access['lo']} * {self.block})"

    # --- the special ones -------------------------------------------------------------------------

    def _units(self, body: str) -> str:
        """A loop over the units of [lo, hi), or the one whole prefix; binds j, key and blks."""
        by_number = self.shape.what == "index"
        if self.whole:
            key = "rid" if by_number else f"keys[hi // {self.unit} - 1] if hi else {self.keys}_of_nothing()"
            return f"key = {key}\nblks = table[:{self._last('hi')}]\n{body}"
        inner = "\n".join("    " + line for line in body.splitlines())
        key = "f'{rid}.{j}'" if by_number else "keys[j]"
        return (
            f"for j in range(lo // {self.unit}, hi // {self.unit}):\n"
            f"    key = {key}\n"
            f"    blks = table[j * {self.per_unit}:(j + 1) * {self.per_unit}]\n"
            f"{inner}"
        )

    def _add_flat(self, direction: str) -> str:
        name = self.container_name(direction)
        size = f"; meta.{name}_who.append((rid, len(blks)))"
        return self._units(f"meta.{name}_keys.append(key); meta.{name}_pages.extend(blks){size}")

    def _each_flat(self, direction: str) -> str:
        name = self.container_name(direction)
        return f"""at = 0
for key, (rid, count) in zip(meta.{name}_keys, meta.{name}_who):
    yield rid, key, meta.{name}_pages[at:at + count]
    at += count"""

    def _add_ragged(self, direction: str) -> str:
        f = self._field
        return self._units(
            f"meta.{f('flat')}.extend(blks)\n"
            f"meta.{f('counts')}.append(len(blks))\n"
            f"meta.{f('key')}.append(key)\n"
            f"meta.{f('mode')}.append({1 if direction == 'put' else 0})\n"
            f"meta.{f('rid')}.append(rid)"
        )

    def _each_ragged(self, direction: str) -> str:
        f = self._field
        return f"""at = 0
for i, count in enumerate(meta.{f("counts")}):
    if meta.{f("mode")}[i] == {1 if direction == "put" else 0}:
        yield meta.{f("rid")}[i], meta.{f("key")}[i], meta.{f("flat")}[at:at + count]
    at += count"""

    def _add_map(self, direction: str) -> str:
        name = self.container_name(direction)
        return self._units(f"meta.{name}[key] = blks\nmeta.{self._field('rid')}[key] = rid")

    def _each_map(self, direction: str) -> str:
        name = self.container_name(direction)
        return f"""for key, blks in meta.{name}.items():
    yield meta.{self._field("rid")}[key], key, blks"""

    def _add_blob(self, direction: str) -> str:
        blob = f"meta.{self._field('blob')}"
        return (
            f"rows = json.loads({blob} or b'[]')\n"
            + self._units(f"rows.append([{'1' if direction == 'put' else '0'}, rid, key, blks])")
            + f"\n{blob} = json.dumps(rows).encode()"
        )

    def _each_blob(self, direction: str) -> str:
        return f"""for way, rid, key, blks in json.loads(meta.{self._field("blob")} or b'[]'):
    if way == {1 if direction == "put" else 0}:
        yield rid, key, blks"""

    def _add_combined(self, direction: str) -> str:
        f = self._field
        return (
            f"item = meta.{f('by_request')}.get(rid)\n"
            "if item is None:\n"
            f"    item = {self.names['class:entry']}(rid, list(toks), list(table))\n"
            f"    meta.{f('by_request')}[rid] = item\n"
            f"if len(toks) > len(item.{f('tokens')}):\n"
            f"    item.{f('tokens')} = list(toks)\n"
            f"item.{self.container_name(direction)} = (lo, hi)"
        )

    def _each_combined(self, direction: str) -> str:
        f, unit, pu = self._field, self.unit, self.per_unit
        head = f"""for item in meta.{f("by_request")}.values():
    if item.{self.container_name(direction)} is None:
        continue
    lo, hi = item.{self.container_name(direction)}
    rid, table = item.{f("rid")}, item.{f("blocks")}
"""
        if self.whole:
            key = f"{self.keys}(item.{f('tokens')}[:hi], {unit})[-1] if hi else {self.keys}_of_nothing()"
            key = "rid" if self.shape.what == "index" else key
            return head + f"    yield rid, {key}, table[:{self._last('hi')}]"
        name = "f'{rid}.{j}'" if self.shape.what == "index" else "names[j]"
        keys = (
            ""
            if self.shape.what == "index"
            else f"    names = {self.keys}(item.{f('tokens')}[:hi], {unit})\n"
        )
        return (
            head
            + keys
            + (
                f"    for j in range(lo // {unit}, hi // {unit}):\n"
                f"        yield rid, {name}, table[j * {pu}:(j + 1) * {pu}]"
            )
        )

    def _add_array(self, direction: str) -> str:
        f, name = self._field, self.container_name(direction)
        return self._units(
            f"meta.{f('key')}.append(key)\n"
            f"meta.{f('rid')}.append(rid)\n"
            f"meta.{name}.append(np.array([len(meta.{f('key')}) - 1, *blks], dtype=np.int64))"
        )

    def _each_array(self, direction: str) -> str:
        f, name = self._field, self.container_name(direction)
        return f"""for row in meta.{name}:
    yield meta.{f("rid")}[row[0]], meta.{f("key")}[row[0]], row[1:].tolist()"""

    def _add_deltas(self, direction: str) -> str:
        """Only loads are noted; what is stored the worker works out from what it hears (see source.py)."""
        if direction == "put":
            raise ValueError("a worker that works out its stores itself gets no entries")
        return self._units(f"meta.{self._field('gets')}.append((rid, key, blks))")

    def _each_deltas(self, direction: str) -> str:
        if direction == "put":
            raise ValueError("a worker that works out its stores itself gets no entries")
        return f"for rid, key, blks in meta.{self._field('gets')}:\n    yield rid, key, blks"
