"""The timeline, read with Perfetto's published schema: nothing unknown, slices closed, flows that meet."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from google.protobuf.unknown_fields import UnknownFieldSet
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as schema
from synth import Fate, Prompt, Rounding, Sim, run_json

from kvtrace.export.run import open_run
from kvtrace.export.selection import Wanted
from kvtrace.export.timeline import write_perfetto
from kvtrace.export.trace_file import Sequence, TraceFile

Shell = Callable[..., tuple[int, str, str]]


def unknown(message: Any) -> int:
    """Fields that the schema does not know, in a message and in all that it holds."""
    found = len(UnknownFieldSet(message))
    for field, value in message.ListFields():
        if field.message_type is not None:
            found += sum(map(unknown, value)) if not hasattr(value, "ListFields") else unknown(value)
    return found


class Timeline:
    """A trace file as Perfetto reads it: names resolved, events by track in the order of their times."""

    def __init__(self, data: bytes) -> None:
        self.trace = schema.Trace.FromString(data)
        assert not unknown(self.trace) and self.trace.ByteSize() == len(data)
        self.tracks: dict[int, Any] = {}
        self.events: dict[int, list[tuple[int, Any, str, dict[str, Any]]]] = defaultdict(list)
        interned: dict[int, dict[tuple[str, int], str]] = defaultdict(dict)
        for packet in self.trace.packet:
            names = interned[packet.trusted_packet_sequence_id]
            for kind in ("event_names", "debug_annotation_names", "debug_annotation_string_values"):
                for entry in getattr(packet.interned_data, kind):
                    text = entry.name if hasattr(entry, "name") else entry.str.decode()
                    assert names.setdefault((kind, entry.iid), text) == text
            if packet.HasField("track_descriptor"):
                self.tracks[packet.track_descriptor.uuid] = packet.track_descriptor
            elif packet.HasField("track_event"):
                event = packet.track_event
                values = {
                    names["debug_annotation_names", one.name_iid]: (
                        names["debug_annotation_string_values", one.string_value_iid]
                        if one.string_value_iid
                        else getattr(one, "bool_value" if one.HasField("bool_value") else "int_value")
                    )
                    for one in event.debug_annotations
                }
                name = names["event_names", event.name_iid] if event.name_iid else ""
                self.events[event.track_uuid].append((packet.timestamp, event, name, values))
        for events in self.events.values():
            events.sort(key=lambda one: one[0])  # stable, as Perfetto's

    def title(self, uuid: int) -> str:
        track = self.tracks[uuid]
        return track.name or track.thread.thread_name or track.process.process_name

    def slices(self) -> list[tuple[str, str, int, int, dict[str, Any], Any]]:
        """(track, name, begin, end, values, event), each closed, nested on its track."""
        found = []
        for uuid, events in self.events.items():
            stack: list[Any] = []
            for t, event, name, values in events:
                if event.type == event.TYPE_SLICE_BEGIN:
                    stack.append((t, event, name, values))
                elif event.type == event.TYPE_SLICE_END:
                    begin, first, named, given = stack.pop()
                    found.append((self.title(uuid), named, begin, t, given, first))
            assert not stack, self.title(uuid)
        return found

    def instants(self) -> list[tuple[str, str, dict[str, Any], Any]]:
        return [
            (self.title(uuid), name, values, event)
            for uuid, events in self.events.items()
            for _, event, name, values in events
            if event.type == event.TYPE_INSTANT
        ]


def timeline(run: Path, wanted: Wanted | None = None) -> Timeline:
    place = run.parent / f"{run.name}.pftrace"
    written = write_perfetto(open_run(run, wanted), place)
    found = Timeline(place.read_bytes())
    assert written.tracks == len(found.tracks)
    assert written.slices == len(found.slices()) and written.instants == len(found.instants())
    return found


def test_every_call_is_a_slice_with_its_numbers(run: Path) -> None:
    slices = timeline(run).slices()
    names = Counter(name for _, name, *_ in slices)
    assert names["execute_model"] == 12 and names["schedule"] == 6
    assert names["save_kv_layer"] == 24 and names["unified_attention_with_output"] == 24
    saves = [
        values for _, name, _, _, values, _ in slices if name == "save_kv_layer" and values["slots"] == 512
    ]
    assert {(one["layer"], one["step"]) for one in saves} == {
        ("model.layers.0.self_attn.attn", 5), ("model.layers.1.self_attn.attn", 5),
    }  # fmt: skip
    mine = next(one for one in slices if one[1] == "request mine")
    assert mine[4]["id"] == "cmpl-7f3a-0" and mine[4]["prompt"] == 300 and mine[4]["finished"] is True
    inside = [
        name
        for track, name, begin, end, *_ in slices
        if track == "mine" and mine[2] <= begin <= end <= mine[3]
    ]
    assert {"lookup", "prefill 0 to 300"} <= set(inside)


def test_metadata_that_reaches_no_worker_leaves_its_flow_open(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    sim = Sim(folder, tp=2)
    sim.serve([Prompt("a", 512)], Rounding(512).policy(), fate=lambda n: Fate(unbound_ranks=frozenset({1})))
    sim.write()
    run_json(folder)
    found = timeline(folder)
    begun = [flow for *_, event in found.instants() for flow in event.flow_ids]
    ended = [flow for *_, event in found.slices() for flow in event.terminating_flow_ids]
    assert len(begun) == 2 and len(ended) == 1 and set(ended) < set(begun)


def test_a_part_of_a_run(run: Path) -> None:
    slices = timeline(run, Wanted(steps=(5, 5), layers="1")).slices()
    assert {values.get("step", 5) for *_, values, _ in slices} == {5}
    assert {values["layer"] for *_, values, _ in slices if "layer" in values} == {
        "model.layers.1.self_attn.attn"
    }
    requests = {name for _, name, *_ in slices if name.startswith("request ")}
    assert requests == {"request cmpl-7b00-0"}


def test_calls_that_overlap_on_one_thread_stay_whole(tmp_path: Path) -> None:
    """Threads share an index past the greatest one: their calls must not close each other."""
    from io import BytesIO

    from kvtrace.export.timeline import Slice, _Tracks, _Writer

    run = tmp_path / "run"
    sim = Sim(run)
    sim.serve([Prompt("a", 64)], Rounding(512).policy())
    sim.write()
    opened = open_run(run)
    file = BytesIO()
    out = TraceFile(file)
    process = opened.processes[0]
    no_flows: Any = None
    writer = _Writer(process, 0, _Tracks(out, process, 1), Sequence(out, 2), no_flows)
    spans = [(0, 10, "a"), (2, 4, "b"), (5, 15, "c"), (10, 12, "d"), (15, 15, "e"), (15, 20, "f")]
    writer.slices([Slice(t0, t1, ("thread", 0), name, {}) for t0, t1, name in spans])
    got = sorted((begin, end, name) for _, name, begin, end, *_ in Timeline(file.getvalue()).slices())
    assert got == sorted(spans)


def test_the_verb_says_what_it_wrote(shell: Shell, run: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = shell("export", run, "--format", "perfetto")
    assert (code, err) == (0, "") and out.startswith("wrote test.pftrace (") and "2 flows" in out
    assert Timeline((tmp_path / "test.pftrace").read_bytes()).slices()
