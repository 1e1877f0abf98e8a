"""The records of a spool, a named type for each kind: what their eight words are.

Standard library only: this module is imported inside vLLM's processes. A row is a tuple of eight
words, so that it can be added to a recorder as it is; the hot path adds plain tuples of the same order,
and a test holds them equal. :func:`decode` reads one record, :func:`columns` a table of records of one
kind: there each field is an array, one item a record.

``head`` is word 0 (:func:`~kvtrace.trace.format.pack_head`); its parts are read by :func:`role`,
:func:`code`, :func:`detail`, :func:`flags` and :func:`thread`. Names of fields:

- ``t``, ``t0``, ``t1``: ``perf_counter_ns`` of the writing host; ``t0`` and ``t1`` a call's begin and end;
- ``step``: the engine's tag and the number of its ``schedule()`` call, 0 for no step;
- ``request``, ``layer``, ``*_name``: ids of NAME records, 0 for none;
- counts are -1 where they could not be observed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from kvtrace.trace.format import UNKNOWN, Kind

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Word: TypeAlias = Any
"""An int in a row, an array of int64 where the row is the columns of a table."""


class Name(NamedTuple):
    """Gives an integer to a string. The text follows in BYTES records; ``crc`` is its CRC-32."""

    head: Word
    id: Word
    length: Word
    crc: Word
    spare4: Word = 0
    spare5: Word = 0
    spare6: Word = 0
    spare7: Word = 0


class Bytes(NamedTuple):
    """56 bytes of the text of the NAME or FACT before it."""

    head: Word
    part1: Word
    part2: Word
    part3: Word
    part4: Word
    part5: Word
    part6: Word
    part7: Word


class FactRecord(NamedTuple):
    """A JSON document (:mod:`kvtrace.trace.facts`); code: Fact. The text follows in BYTES records."""

    head: Word
    t: Word
    length: Word
    crc: Word
    spare4: Word = 0
    spare5: Word = 0
    spare6: Word = 0
    spare7: Word = 0


class HookCall(NamedTuple):
    """One call of a connector's hook. code: of :mod:`~kvtrace.trace.hooks`, detail: the connector's index.

    ``slots``, ``entries``: what the metadata bound at that moment declares for this hook's direction, over
    the whole step. ``extra``: of get_block_ids_with_load_errors the number of blocks; the name of the
    exception's type where Flag.RAISED.
    """

    head: Word
    t0: Word
    t1: Word
    step: Word
    layer: Word
    slots: Word
    entries: Word
    extra: Word


class OpCall(NamedTuple):
    """One run of an attention or KV-cache update body. code: of :mod:`~kvtrace.trace.ops`, detail: Dispatch.

    ``mode``: CUDA-graph mode of the forward context (0 NONE, 1 PIECEWISE, 2 FULL, -1 unknown). ``skip``:
    Skip.
    """

    head: Word
    t0: Word
    t1: Word
    step: Word
    layer: Word
    spare5: Word
    mode: Word
    skip: Word


class Step(NamedTuple):
    """One ``Scheduler.schedule()``. ``gone``: preempted << 32 | finished ids handed to the workers."""

    head: Word
    t0: Word
    t1: Word
    step: Word
    tokens: Word
    requests: Word
    new_requests: Word
    gone: Word


class Chunk(NamedTuple):
    """Prompt tokens [start, start + tokens) of one request computed in a step. Decode steps write none: a
    request's decode tokens follow from its FINISH."""

    head: Word
    t: Word
    request: Word
    step: Word
    start: Word
    tokens: Word
    prompt: Word
    block: Word


class Arrival(NamedTuple):
    """A request comes to the scheduler. ``digest``: 63-bit keyed BLAKE2b of the prompt's token ids;
    ``prefix``: the same of the longest block-aligned proper prefix ((n - 1) // block * block tokens), 0
    where that is empty. The key is the run's and stays in memory. ``salt``: keyed digest of the request's
    cache salt, which makes other digests of equal tokens; 0 none."""

    head: Word
    t: Word
    request: Word
    salt: Word = 0
    prompt: Word = 0
    digest: Word = 0
    prefix: Word = 0
    max_tokens: Word = UNKNOWN


class Growth(NamedTuple):
    """A streaming session got its next part: the prompt of a live request is ``prompt`` tokens from this step
    on, of which ``start`` have KV. Of these, what stands behind the prompt as it was before was generated
    between the parts."""

    head: Word
    t: Word
    request: Word
    step: Word
    start: Word
    prompt: Word
    spare6: Word = 0
    spare7: Word = 0


class Lookup(NamedTuple):
    """``get_num_new_matched_tokens``. ``local``: tokens that the GPU's prefix cache holds, ``external``: the
    connector's answer (NONE_ANSWER where it returned None). detail: as in MetadataEntry."""

    head: Word
    t0: Word
    t1: Word
    step: Word
    request: Word
    local: Word
    external: Word
    spare7: Word = 0


class Allocation(NamedTuple):
    """``update_state_after_alloc``. ``external``: tokens that the scheduler accepted from the connector.
    detail: as in MetadataEntry."""

    head: Word
    t0: Word
    t1: Word
    step: Word
    request: Word
    external: Word
    spare6: Word = 0
    spare7: Word = 0


class MetadataEntry(NamedTuple):
    """One entry of the metadata that ``build_connector_meta`` returned: Flag.STORE or LOAD. ``slots``: KV
    slots that it names; ``tokens``: tokens it speaks of; ``start``: position of its first slot in the
    request; each -1 where the entry does not say. detail: the index of the connector, where it is inside
    another one, else 0."""

    head: Word
    t: Word
    request: Word
    step: Word
    slots: Word
    tokens: Word
    start: Word
    spare7: Word = 0


class Preemption(NamedTuple):
    """The scheduler took a request's blocks back. ``computed``: tokens whose KV was lost by that."""

    head: Word
    t: Word
    request: Word
    step: Word
    computed: Word
    spare5: Word = 0
    spare6: Word = 0
    spare7: Word = 0


class Finish(NamedTuple):
    """A request left the scheduler. ``computed``: tokens whose KV was computed or reused (prompt and
    decode), ``status_name``: vLLM's RequestStatus."""

    head: Word
    t: Word
    request: Word
    step: Word
    computed: Word
    output: Word
    status_name: Word
    preemptions: Word


class Execution(NamedTuple):
    """One ``execute_model`` on a worker. ``mode``: as in OpCall, of the target model's forward; ``padded``:
    tokens of the batch that the model ran, padding included (0 unknown).

    Flag.STORE: the step was watched for what is read from the KV caches (LOAD: for what is written there).
    That is: every call of the worker's hooks between the binding and the clearing of its metadata; the calls
    of the hooks that come once a step (``start_load_kv``, ``wait_for_save``, ``get_finished``,
    ``handle_preemptions``) in the step after it; and the work that these handed to threads, executors and
    event loops. Hooks that come once a step are watched as well, within the budget and without a flag, in
    steps in which requests end.

    What may be concluded: a slot in which this step put a token, and that no SlotsTouched (with STORE) names
    from this step on until the step after it has ended and its work in the background is done, was not read
    by then in any way that Python sees. Not, where a SlotsTouched of the layer says that slots were read and
    not which (``slot_set`` 0), where one with both flags holds the slot (given out by address), and where
    facts.WatchLimits of this connector speak of a way that can't be followed. That it is not read *later*
    (a copy many steps on, from a step that is not watched) does not follow from one step's flag."""

    head: Word
    t0: Word
    t1: Word
    step: Word
    tokens: Word
    requests: Word
    mode: Word
    padded: Word


class QuietCalls(NamedTuple):
    """A quiet step's calls of one hook or op past the spool's size limit (detail: with DETAIL_IS_OP an op).
    ``layer_set`` names a JSON list of layer name ids; durations in ns."""

    head: Word
    t0: Word
    layer_set: Word
    step: Word
    count: Word
    total_ns: Word
    least_ns: Word
    most_ns: Word


class Seal(NamedTuple):
    """Ends a block. ``number``: of the block, from 0. ``records``: those before it that belong to it.
    ``crc``: CRC-32 of these and of this record's first three words, begun with the header's CRC."""

    head: Word
    number: Word
    records: Word
    crc: Word
    spare4: Word = 0
    spare5: Word = 0
    spare6: Word = 0
    spare7: Word = 0


class Trailer(NamedTuple):
    """This process stopped recording; code: Stop. ``lost``: records dropped after that."""

    head: Word
    t: Word
    lost: Word
    spare3: Word = 0
    spare4: Word = 0
    spare5: Word = 0
    spare6: Word = 0
    spare7: Word = 0


class Effect(NamedTuple):
    """What one watched hook call really did. code: the hook, detail: the connector's index, Flag.STORE (read
    from the KV tensor) or LOAD (written into it). ``slots``: KV slots of this layer that tensor operations
    copied, -1 where none could be watched; ``bytes``, ``files``: bytes in, and number of, files that the
    call opened for writing; ``target``: 63-bit keyed digest of the first such path (0 none)."""

    head: Word
    t: Word
    layer: Word
    step: Word
    slots: Word
    bytes: Word
    files: Word
    target: Word


class Prefixes(NamedTuple):
    """Keyed 63-bit digests of a prompt's beginnings of first, first + stride, ... tokens (0 = past the
    end); the key is that of Arrival."""

    head: Word
    request: Word
    first: Word
    stride: Word
    digest0: Word
    digest1: Word
    digest2: Word
    digest3: Word


class TransferBegun(NamedTuple):
    """An asynchronous transfer of a request began (Flag.STORE: request_finished kept its blocks).
    detail: as in MetadataEntry."""

    head: Word
    t: Word
    request: Word
    step: Word
    spare4: Word = 0
    spare5: Word = 0
    spare6: Word = 0
    spare7: Word = 0


class TransferDone(NamedTuple):
    """A request's asynchronous transfer was reported finished (Flag.STORE or LOAD), by a worker or to the
    scheduler (the record's role). ``failed``: 1 where the connector said so. detail: as in MetadataEntry."""

    head: Word
    t: Word
    request: Word
    step: Word
    failed: Word
    spare5: Word = 0
    spare6: Word = 0
    spare7: Word = 0


class DeviceCall(NamedTuple):
    """One call timed on the device, by a pair of events around it. code, detail: as in QuietCalls. ``t0``,
    ``host_ns``: host time of its begin and how long it took. ``device_ns``: between the events, -1 unknown.
    ``before_ns``: what was still to run on its stream when it began, a lower bound. Flag.STREAMS: it ended
    on another stream."""

    head: Word
    t0: Word
    step: Word
    layer: Word
    device_ns: Word
    before_ns: Word
    host_ns: Word
    spare7: Word = 0


class TimedStep(NamedTuple):
    """One step whose calls were timed on the device. ``calls``: event pairs with times; ``untimed``: calls
    that got none; ``lost``: event pairs given up. ``own_ns``: host time that the timing itself took;
    ``busy_ns``: host time of the steps since the last such record, this one included."""

    head: Word
    t: Word
    step: Word
    calls: Word
    untimed: Word
    lost: Word
    own_ns: Word
    busy_ns: Word


class BlocksGiven(NamedTuple):
    """From this step on ``count`` blocks with consecutive ids stand in the request's block table of KV cache
    group ``group``: ``block + i`` at place ``first + i``; where ``count`` is negative the ids fall
    (``block - i``). Flag.FIRST: the table begins anew, RESUMED: after a preemption. The null block (0) is
    never written, and no record says that blocks were given back."""

    head: Word
    t: Word
    request: Word
    step: Word
    group: Word
    first: Word
    block: Word
    count: Word


class SlotsTouched(NamedTuple):
    """KV slots of one layer that one watched call, or one piece of background work, touched: Flag.STORE: it
    read them; LOAD: it wrote them; both: their memory was given out by address, and may have been read or
    written. code: the hook, 0 for none; detail: the connector's index. A slot is block * block size of its
    KV cache group + offset. ``slot_set``: name of the set: runs ``first+count``, ascending, joined by commas:
    those touched in full, then after a ``/`` those of which only a part was (``/`` alone: an operation picked
    slots of the layer, and none at all); 0 where that is not known. LOAD and ASYNC, with 0: work in the
    background for a load asked for the address of the whole layer, may have written there, and ended then.
    ``slots``, ``partly``: how many of each, -1 where not known. ``step``: for which it worked, 0 unknown.
    ``call``: running number of the call in its process; its Effect has the same ``t``. ``t``: the end of a
    hook's call; of background work when the layer was written first, or read last."""

    head: Word
    t: Word
    layer: Word
    step: Word
    slot_set: Word
    slots: Word
    partly: Word
    call: Word


class StatesTouched(NamedTuple):
    """States (of Mamba, of linear attention) of one layer that one watched call, or one piece of background
    work, touched: Flag.STORE: it read them; LOAD: it wrote them; both: their memory was given out by address.
    code, detail, ``t``, ``step``, ``call``: as in SlotsTouched. ``blocks``: name of the set of their blocks
    in the layer's KV cache group, as that of a set of slots; 0 where it is not known. ``part``: number of the
    tensor among the ``parts`` of the layer's state. With ``layer`` 0 it is the last record of a hook's call:
    ``part`` 1 says that nothing else can have touched a state in it, 0 that something may have."""

    head: Word
    t: Word
    layer: Word
    step: Word
    blocks: Word
    part: Word
    parts: Word
    call: Word


class Outside(NamedTuple):
    """What one watched call, or one piece of background work, did to one file or peer, by names and sizes.
    code: Way; detail: the connector's index. ``call``: as in SlotsTouched. ``target``: name of the file
    (``~`` for the user's home) or of the peer. ``bytes``: by which a file grew, or that were sent; -1 where
    that can't be told: it is written in place. ``size``: of the file then. ``errors``: of a peer how many
    connections were refused or broke, of a file 1 where it is not there when the call is over. Flag.FIRST:
    the file held something before, and was written anew. Way.NAME: the file was removed (Flag.REPLACED,
    ``size`` 0), or got the name ``size``: renamed (Flag.REPLACED), or linked."""

    head: Word
    t: Word
    call: Word
    step: Word
    target: Word
    bytes: Word
    size: Word
    errors: Word


class BlockPrints(NamedTuple):
    """Fingerprints of the KV of a request's prompt blocks at the end of a step, over all KV layers
    of the worker in that KV cache group (detail): of the blocks at places ``first``, ``first + 1``, ... of
    its block table; 0 where there is none. 63 bits of a linear hash of the bytes with secret factors that
    come from the key of Arrival's digests."""

    head: Word
    request: Word
    step: Word
    first: Word
    print0: Word
    print1: Word
    print2: Word
    print3: Word


class BlockPrintsAgain(BlockPrints):
    """As PRINTS, of loaded blocks: what they hold after ``step``, which is later than their first use. The
    request may be over by then; a block that was given to another since says nothing of it."""


SIGNS, SIZE_STEPS, SIZE_OFFSET = 48, 128, 64
"""Of a word of a BlockSketches record: bits that are signs, and what the other 15 stand for."""


class BlockSketches(BlockPrints):
    """As PRINTS, where the connector may load and vLLM keeps KV as numbers, not as bytes: about which ones a
    block holds, where PRINTS say exactly which. Of each word the lowest 48 bits are signs of sums over parts
    of the block, with secret signs of their own: of alike KV few of them differ, of KV that has nothing in
    common half. The bits above are 128 * (64 + the binary logarithm of how large the numbers are, the mean of
    the layers)."""


NUMBERS, NUMBER_BITS = 9, 21
"""Of a LayerPrints record: how many numbers it holds, three a word, and their bits."""


class LayerPrints(NamedTuple):
    """Fingerprints of single layers, small ones, of a request's prompt blocks at the end of a step (KV cache
    group: detail). ``layer_set``: as in QuietCalls, up to 9 layers. The three words hold 9 numbers of 21
    bits, the first in the lowest bits: of the block at place ``first`` one a layer, then of the next block,
    as many as there is room for. 0: none, or nothing but zeroes. Equal KV has equal numbers in all layers."""

    head: Word
    request: Word
    step: Word
    first: Word
    layer_set: Word
    numbers0: Word
    numbers1: Word
    numbers2: Word


Row: TypeAlias = tuple[Any, ...]
"""One of :data:`ROWS`."""
R = TypeVar("R", bound=NamedTuple)

ROWS: dict[Kind, type[Any]] = {
    Kind.NAME: Name,
    Kind.BYTES: Bytes,
    Kind.FACT: FactRecord,
    Kind.HOOK: HookCall,
    Kind.OP: OpCall,
    Kind.STEP: Step,
    Kind.CHUNK: Chunk,
    Kind.REQUEST: Arrival,
    Kind.LOOKUP: Lookup,
    Kind.ALLOC: Allocation,
    Kind.META: MetadataEntry,
    Kind.PREEMPT: Preemption,
    Kind.FINISH: Finish,
    Kind.EXEC: Execution,
    Kind.QUIET: QuietCalls,
    Kind.EFFECT: Effect,
    Kind.PREFIX: Prefixes,
    Kind.OPEN: TransferBegun,
    Kind.DONE: TransferDone,
    Kind.DEVICE: DeviceCall,
    Kind.TIMED: TimedStep,
    Kind.BLOCKS: BlocksGiven,
    Kind.SLOTS: SlotsTouched,
    Kind.OUTSIDE: Outside,
    Kind.PRINTS: BlockPrints,
    Kind.REPRINTS: BlockPrintsAgain,
    Kind.LAYERS: LayerPrints,
    Kind.TRAILER: Trailer,
    Kind.SEAL: Seal,
    Kind.GROWN: Growth,
    Kind.STATES: StatesTouched,
    Kind.SKETCHES: BlockSketches,
}
KIND_OF: dict[type[Any], Kind] = {row: kind for kind, row in ROWS.items()}


def decode(words: Sequence[int]) -> Row:
    """One record of eight words as the row of its kind.

    Raises:
        KeyError: the kind is none of this version.
    """
    row: Row = ROWS[Kind(words[0] & 0xFF)]._make(words)
    return row


def columns(row: type[R], table: NDArray[np.int64]) -> R:
    """A table of shape (n, 8) whose records are all of one kind, as one row of arrays of shape (n,)."""
    made: R = row._make(table.T)
    return made


def of_kind(row: type[R], table: NDArray[np.int64]) -> R:
    """The records of that kind in a table of any, as one row of arrays."""
    return columns(row, table[kind(table[:, 0]) == KIND_OF[row]])


_AT_ONCE = 4096


def one_by_one(table: NDArray[np.int64]) -> Iterator[list[int]]:
    """The records of a table as Python's numbers. These take ten times the memory: so not all at once."""
    for begin in range(0, len(table), _AT_ONCE):
        yield from table[begin : begin + _AT_ONCE].tolist()


# The parts of word 0; each works on an int and on an array.


def kind(head: Word) -> Word:
    return head & 0xFF


def role(head: Word) -> Word:
    return (head >> 8) & 0xFF


def code(head: Word) -> Word:
    return (head >> 16) & 0xFF


MOST_DETAIL = 0xFF
"""The index of a connector is kept in so many bits: more connectors of one process share it."""


def detail(head: Word) -> Word:
    """Of a hook or effect the connector's index in its process, of an op how its body was reached."""
    return (head >> 24) & MOST_DETAIL


def flags(head: Word) -> Word:
    return (head >> 32) & 0xFFFF


def thread(head: Word) -> Word:
    return (head >> 48) & 0x7FFF
