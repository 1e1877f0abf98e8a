"""``kvtrace metrics``: the numbers of a run for Prometheus."""

from __future__ import annotations

import typer

from kvtrace.cli.output import emit


def metrics(
    run: str | None = typer.Argument(
        None, metavar="[RUN]", help="A run directory of kvtrace run. [default: the newest one in reports/]"
    ),
    port: int = typer.Option(
        9464, "--port", metavar="N", min=0, max=65535, help="Where it listens; 0: any that is free."
    ),
    host: str = typer.Option("127.0.0.1", "--host", metavar="ADDRESS", help="Of which interface."),
    once: bool = typer.Option(False, "--once", help="Print the metrics and end."),
) -> None:
    """Serve what kvtrace top shows as OpenMetrics.

    Until Ctrl-C. Only files are read: nothing is added to vLLM's processes. Needs the extra
    kvtrace[metrics].
    """
    from kvtrace.live.exposition import CONTENT_TYPE, check_installed, exposition
    from kvtrace.live.server import MetricsServer
    from kvtrace.live.watch import LiveRun, find_run
    from kvtrace.merge.one_run import one_run

    check_installed()
    if run is not None:
        one_run(run, "metrics")
    watch = LiveRun(find_run(run))
    if once:
        emit(exposition(watch.look(wait=True)))
        return
    with MetricsServer(host, port, CONTENT_TYPE, lambda: exposition(watch.look())) as server:
        emit(f"serving http://{host}:{server.server_address[1]}/metrics\n")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
