"""One host of two, in namespaces of its own: writes the run of one engine, on the clock that it has there.

python host.py kv_producer|kv_consumer FOLDER
"""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[0] / "ledger"), str(HERE.parents[1])]

from two_runs import Engine, Host  # noqa: E402

from kvtrace.agent.boot import boot  # noqa: E402

IDS = {"remote_request_id": "p-1", "remote_engine_id": "engine of kv_producer"}


def main() -> None:
    role, folder = sys.argv[1:]
    at = time.perf_counter_ns()
    host = Host(socket.gethostname(), boot(), time.time_ns() - at)
    engine = Engine(Path(folder), 3 if role == "kv_producer" else 4, role, f"engine of {role}", host, at)
    if role == "kv_producer":
        engine.computes("p-1", 600, 512)
        engine.returned("p-1", IDS)
    else:
        engine.fetches("d-1", IDS, 600, 384)
    engine.write()
    interfaces = sorted(name for _, name in socket.if_nameindex())
    print(json.dumps({"host": host.name, "boot": host.boot, "t": at, "interfaces": interfaces}))


if __name__ == "__main__":
    main()
