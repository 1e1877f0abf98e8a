"""The help of every command. Made by scripts/help_texts.py: do not edit."""

from __future__ import annotations

HELP = {
    "": """\
Usage: kvtrace [OPTIONS] COMMAND [ARGS]...

  Why were so few KV blocks saved or loaded? Traces vLLM's KV connector hooks
  and explains it.

Options:
  -V, --version         Show the version.
  --install-completion  Install completion for the current shell.
  --show-completion     Show completion for the current shell, to copy it or
                        customize the installation.
  -h, --help            Show this message and exit.

Commands:
  run       Run a vLLM command traced, then make the report.
  doctor    Say before a run what it will trace, and what it will not save.
  verify    Prove that a connector gives back what it took.
  explain   Explain why KV blocks were saved and loaded, or were not.
  requests  List the requests of a run, worst first.
  why       Show what happened to one request, and to each of its tokens.
  top       Show a run while it goes on.
  metrics   Serve what kvtrace top shows as OpenMetrics.
  merge     Join the runs of several engines: prefill and decode.
  export    Write a run, or a part of it, for other programs.
  baseline  Write the contract of a good run, for kvtrace check.
  check     Fail where a run lost hooks, tokens or targets, and say why.
  diff      Show what differs between two runs.
  docs      Explain a cause, or answer a question about vLLM's part.
  scenario  List and run the reproductions: a real vLLM, one cause each.

  Examples:
    kvtrace run -- vllm serve MODEL --kv-transfer-config '{...}'
    kvtrace explain reports/RUN/report.json
    kvtrace why reports/RUN --request ID
""",
    "run": """\
Usage: kvtrace run [OPTIONS] [[--] COMMAND...]...

  Run a vLLM command traced, then make the report.

  The command's stdin, stdout and stderr are untouched, signals reach it once,
  and its exit code is kvtrace's: 128 + N where signal N ended it; 2 where it
  succeeded but no vLLM process was traced.

Arguments:
  [--] COMMAND... <list[str]>  Any command that starts vLLM, with its own
                               options unchanged.

Options:
  -o, --output DIR                Run directory: new, or empty. [default:
                                  reports/<timestamp>-<name>]
  --name NAME                     Name of the run. [default: the command's
                                  program]
  --limit SIZE                    Per process: past this size, steps in which
                                  nothing was stored or loaded are kept as
                                  sums.  [default: 1G]
  --device-timing off|sampled|full
                                  CUDA only: device time of hooks and
                                  attention, in no step, in as many as the
                                  budget allows, or in all.  [default:
                                  sampled]
  --watch first|sampled|full      Steps with prompt tokens, saves or loads
                                  whose reads and writes of KV slots are
                                  watched: the first 8, every 32nd too, or all
                                  that the budget allows.  [default: full]
  --budget SHARE                  Share of the steps' time that the watch may
                                  take, from the first step on, and sampled
                                  device timing. Without it 1%, which the
                                  watch keeps to when it has taken 2 seconds.
  --metadata-adapter MODULE:FUNCTION
                                  A function that says what the connector's
                                  metadata declares, where its shape does not.
  --keep-messages                 Record messages of exceptions and logs with
                                  the values in them, which may be users'
                                  content.
  --keep-settings                 Record the strings of the command line and
                                  of the connector's configuration as they
                                  are; else what may be a secret becomes its
                                  length and a digest.
  --stuck-after SECONDS           Look with py-spy (kvtrace[spy]) at where a
                                  process of vLLM stands that has recorded
                                  nothing for so long; 0: only on 'kill -RTMIN
                                  PID' of kvtrace, or s in kvtrace top.
                                  [default: 30]
  --sample RATE                   Record a py-spy profile (kvtrace[spy]) of
                                  each worker and engine core: so many samples
                                  per second, in speedscope format beside the
                                  trace.
  -h, --help                      Show this message and exit.

  Examples:
    kvtrace run -- vllm serve MODEL --kv-transfer-config '{...}'
    kvtrace run -o traces/r1 --name nightly -- python bench.py
    kvtrace run --metadata-adapter mine.kv:kv_entries -- vllm serve MODEL
    kvtrace run --stuck-after 60 -- vllm serve MODEL
""",
    "doctor": """\
Usage: kvtrace doctor [OPTIONS] [[--] COMMAND...]...

  Say before a run what it will trace, and what it will not save.

  Versions, hooks, the connector's class, its configuration and its store: ok,
  warning, problem or not known, each with a remedy. No engine is started, no
  connector is made. Exit codes: 0 no problem, 1 a problem, 2 usage.

Arguments:
  [--] COMMAND... <list[str]>  The command that kvtrace run would get; it is
                               not run.

Options:
  --connector MODULE:CLASS     Check this connector's class; COMMAND may be
                               left out.
  --timeout SECONDS            How long importing vLLM, the connector, or
                               making vLLM's configuration may take, each.
                               [default: 180.0; 1<=x<=3600]
  --format text|markdown|json  text (for a terminal), markdown (for an issue),
                               json (for programs).  [default: text]
  --no-color                   No colour (also: NO_COLOR=1).
  -h, --help                   Show this message and exit.

  Examples:
    kvtrace doctor -- vllm serve MODEL --kv-transfer-config '{...}'
    kvtrace doctor --connector mine.kv:MyConnector
    kvtrace doctor --format json -- vllm serve MODEL | jq .lines
""",
    "verify": """\
Usage: kvtrace verify [OPTIONS] [[--] COMMAND...]...

  Prove that a connector gives back what it took.

  To the right asker, and to nobody else. Starts a server of its own, asks
  prompts, empties the GPU's own prefix cache, asks again, and compares the
  KV. Exit codes: 0 no property failed, 1 one did, 2 usage, or the server did
  not start.

Arguments:
  [--] COMMAND... <list[str]>  Starts the server to verify, as vllm serve
                               MODEL ...

Options:
  --connector MODULE:CLASS        In place of COMMAND: a small server with
                                  this connector (or one of vLLM's, by its
                                  name).
  --config JSON                   With --connector: its
                                  kv_connector_extra_config.
  --model DIR|KIND                With --connector: this model, or the small
                                  one of this kind: gqa, mla, sliding, hybrid.
  --prefill COMMAND               In place of COMMAND, with --decode: the
                                  server that saves.
  --decode COMMAND                The server that loads; each prompt goes to
                                  --prefill first.
  --suite quick|full              How much is tried.  [default: quick]
  --case CASE                     Try this workload alone, as a failure names
                                  it: 'a96 ; a96'.
  --error SHARE                   How far KV that comes back may be from what
                                  was computed, on the mean of a layer; 0% for
                                  none.  [default: 10%]
  --hook-share SHARE              Share of a step's time that one hook may
                                  take.
  --store DIR                     The connector's directory, empty at the
                                  start: a restart must find what is in it,
                                  and suite full damages it.
  --reference / --no-reference    Also start the same command without its
                                  connector, and compare answers.  [default:
                                  reference]
  --shrink SECONDS                Look so long for the smallest failing case;
                                  0: not.  [default: 60.0; x>=0]
  --seed <int range>              Of the prompts. [default: a new one]  [x>=0]
  --start-timeout SECONDS         How long the server may take to start.
                                  [default: 900.0; x>=1]
  -o, --output DIR                Where the traced runs go: new, or empty.
                                  [default: reports/<timestamp>-verify-...]
  --junit FILE                    Also write JUnit XML.
  --format text|markdown|json|html|junit
                                  text (for a terminal), markdown (for an
                                  issue), json (for programs), html (a page
                                  for a browser), junit (JUnit XML).
                                  [default: text]
  --no-color                      No colour (also: NO_COLOR=1).
  -h, --help                      Show this message and exit.

  Examples:
    kvtrace verify -- vllm serve MODEL --kv-transfer-config '{...}'
    kvtrace verify --connector mine.kv:MyConnector --config '{...}'
    kvtrace verify --case 'a96 ; a96' --connector mine.kv:MyConnector
""",
    "explain": """\
Usage: kvtrace explain [OPTIONS] {PATH}

  Explain why KV blocks were saved and loaded, or were not.

Arguments:
  PATH <str>  A report.json, or a run directory of kvtrace run.  [required]

Options:
  -v, --verbose                   Evidence, causes that were ruled out,
                                  coverage, timing; -vv: all that the report
                                  holds.
  --format text|markdown|json|html
                                  text (for a terminal), markdown (for an
                                  issue), json (for programs), html (for a
                                  browser, with pictures).  [default: text]
  -o, --output FILE               Write to this file, not to stdout.
  --force                         Replace the file of -o if it is there.
  --no-color                      No colour (also: NO_COLOR=1).
  -h, --help                      Show this message and exit.

  Examples:
    kvtrace explain reports/RUN
    kvtrace explain -v reports/RUN/report.json | less
    kvtrace explain reports/RUN --format markdown
    kvtrace explain reports/RUN --format html -o report.html
""",
    "requests": """\
Usage: kvtrace requests [OPTIONS] {PATH}

  List the requests of a run, worst first.

  A report holds the worst 200 only; a run directory has all.

Arguments:
  PATH <str>  A report.json, or a run directory of kvtrace run.  [required]

Options:
  --verdict ID                    Only these: a cause's id, saved, partly-
                                  saved, loaded, ...
  --sort <worst|best|prompt|arrival|id>
                                  worst: most tokens not saved.  [default:
                                  worst]
  --limit N                       At most N.  [x>=1]
  --format text|markdown|json     text (for a terminal), markdown (for an
                                  issue), json (for programs).  [default:
                                  text]
  --no-color                      No colour (also: NO_COLOR=1).
  -h, --help                      Show this message and exit.

  Examples:
    kvtrace requests reports/RUN
    kvtrace requests reports/RUN --verdict first-chunk-only --limit 10
""",
    "why": """\
Usage: kvtrace why [OPTIONS] {PATH}

  Show what happened to one request, and to each of its tokens.

  A report without its run holds the request's sums and the findings that name
  it.

Arguments:
  PATH <str>  A run directory of kvtrace run, or a report.json.  [required]

Options:
  --request ID                 The client's or the engine's id, or its unique
                               beginning.  [required]
  --layer N                    Each call of one layer, with its time: number
                               or name.
  --token K                    Only what concerns this position (from 0).
  --format text|markdown|json  text (for a terminal), markdown (for an issue),
                               json (for programs).  [default: text]
  --no-color                   No colour (also: NO_COLOR=1).
  -h, --help                   Show this message and exit.

  Examples:
    kvtrace why reports/RUN --request cmpl-90
    kvtrace why reports/RUN --request cmpl-90 --token 512 --layer 0
""",
    "top": """\
Usage: kvtrace top [OPTIONS] [[RUN]]

  Show a run while it goes on.

  Steps, requests, tokens, hooks, open hooks and steps, findings so far. q or
  Ctrl-C ends it; it ends by itself with the run, and the last picture stays.
  Only files are read. s asks kvtrace run to look at where all processes
  stand.

Arguments:
  [RUN] <str>  A run directory of kvtrace run. [default: the newest one in
               reports/]

Options:
  --every SECONDS  Time between two pictures.  [default: 1.0; x>=0.1]
  --once           Print one picture and end.
  --no-color       No colour (also: NO_COLOR=1).
  -h, --help       Show this message and exit.

  Examples:
    kvtrace top
    kvtrace top reports/RUN --every 5
    kvtrace top reports/RUN --once
""",
    "metrics": """\
Usage: kvtrace metrics [OPTIONS] [[RUN]]

  Serve what kvtrace top shows as OpenMetrics.

  Until Ctrl-C. Only files are read: nothing is added to vLLM's processes.
  Needs the extra kvtrace[metrics].

Arguments:
  [RUN] <str>  A run directory of kvtrace run. [default: the newest one in
               reports/]

Options:
  --port N        Where it listens; 0: any that is free.  [default: 9464;
                  0<=x<=65535]
  --host ADDRESS  Of which interface.  [default: 127.0.0.1]
  --once          Print the metrics and end.
  -h, --help      Show this message and exit.

  Examples:
    kvtrace metrics --port 9464
    kvtrace metrics reports/RUN --once
""",
    "merge": """\
Usage: kvtrace merge [OPTIONS] {RUN...}...

  Join the runs of several engines: prefill and decode.

  Requests are joined by the ids that the connector handed over. explain,
  requests and why take the result.

Arguments:
  RUN... <list[str]>  Run directories of kvtrace run, with two engines or more
                      in all.  [required]

Options:
  -o, --output DIR             New directory for it; else
                               reports/<time>-merged.
  --clock-error MS             By how much wall clocks of two hosts may be
                               off.  [default: 100.0; x>=0]
  --format text|markdown|json  text (for a terminal), markdown (for an issue),
                               json (for programs).  [default: text]
  --no-color                   No colour (also: NO_COLOR=1).
  -h, --help                   Show this message and exit.

  Examples:
    kvtrace merge reports/PREFILL reports/DECODE
    kvtrace merge reports/HOST-A reports/HOST-B -o reports/both --clock-error 5
""",
    "export": """\
Usage: kvtrace export [OPTIONS] {PATH}

  Write a run, or a part of it, for other programs.

Arguments:
  PATH <str>  A run directory of kvtrace run.  [required]

Options:
  --format perfetto|parquet|csv  A timeline, or tables (docs/export.md).
                                 [required]
  -o, --output PLACE             File (perfetto) or directory to write.
  --steps A:B                    Only steps A to B, both included.
  --layers LIST                  Only these: 0,5-8, or parts of names.
  --request ID                   Only this request and its steps.
  --force                        Replace what an earlier export left there.
  -h, --help                     Show this message and exit.

  Examples:
    kvtrace export reports/RUN --format perfetto -o run.pftrace
    kvtrace export reports/RUN --format perfetto --steps 100:200 --layers 0,5-8
    kvtrace export reports/RUN --format parquet -o fleet
""",
    "baseline": """\
Usage: kvtrace baseline [OPTIONS] {PATH}

  Write the contract of a good run, for kvtrace check.

  Coverage, shares of the ledgers, findings, targets: small JSON without times
  or anything of the machine, to be committed.

Arguments:
  PATH <str>  A report.json, or a run directory of kvtrace run.  [required]

Options:
  -o, --output FILE  Where to write it.  [default: kvtrace-baseline.json]
  --force            Replace the file if it is there.
  -h, --help         Show this message and exit.

  Examples:
    kvtrace baseline reports/RUN
    kvtrace baseline reports/RUN -o good.json --force
""",
    "check": """\
Usage: kvtrace check [OPTIONS] {PATH}

  Fail where a run lost hooks, tokens or targets, and say why.

  Without a baseline and without rules: no fault, and every KV layer hooked.
  Exit codes: 0 passed, 1 failed, 2 usage or unreadable input.

Arguments:
  PATH <str>  A report.json, or a run directory of kvtrace run.  [required]

Options:
  --baseline FILE                 The contract that kvtrace baseline wrote.
  --min HOOK=SHARE                Least coverage of a hook in each layer, on
                                  each rank. Repeatable.
  --min-saved-tokens SHARE        Least share saved of the tokens computed
                                  here (not counting decode that is never
                                  offered).
  --forbid CAUSE                  Fail on this finding; 'fault': on every
                                  fault. Repeatable.
  --allow CAUSE                   Let this finding, and the tokens it costs,
                                  pass. Repeatable.
  --tolerance SHARE               How much worse a ledger share may be.
                                  [default: 0.02]
  --config FILE                   Rules. [default: kvtrace.toml or
                                  pyproject.toml, here or above]
  --no-config                     Read no file of rules.
  --junit FILE                    Also write JUnit XML.
  --sarif FILE                    Also write SARIF 2.1.0.
  --github                        Also write GitHub annotations and the job
                                  summary.
  --format text|markdown|json|junit|sarif
                                  text (for a terminal), markdown (for an
                                  issue), json (for programs), junit (JUnit
                                  XML), sarif (SARIF 2.1.0).  [default: text]
  --json                          The same as --format json.
  --no-color                      No colour (also: NO_COLOR=1).
  -h, --help                      Show this message and exit.

  Examples:
    kvtrace check reports/RUN --baseline kvtrace-baseline.json
    kvtrace check reports/RUN --min-saved-tokens 0.95 --forbid fault
    kvtrace check reports/RUN --junit kvtrace.xml --github
""",
    "diff": """\
Usage: kvtrace diff [OPTIONS] {A} {B}

  Show what differs between two runs.

  Settings, targets, coverage, ledgers, findings.

Arguments:
  A <str>  A report.json or a run directory: before.  [required]
  B <str>  A report.json or a run directory: after.  [required]

Options:
  --format text|markdown|json  text (for a terminal), markdown (for an issue),
                               json (for programs).  [default: text]
  --no-color                   No colour (also: NO_COLOR=1).
  -h, --help                   Show this message and exit.

  Examples:
    kvtrace diff reports/BEFORE reports/AFTER
""",
    "docs": """\
Usage: kvtrace docs [OPTIONS] [[ID]]

  Explain a cause, or answer a question about vLLM's part.

Arguments:
  [ID] <str>  A cause, or what people ask about: unified_attention,
              save_kv_layer, prefix-caching, cuda-graphs, use_direct_call.
              Without it, all are listed.

Options:
  --format text|markdown|json  text (for a terminal), markdown (for an issue),
                               json (for programs).  [default: text]
  --no-color                   No colour (also: NO_COLOR=1).
  -h, --help                   Show this message and exit.

  Examples:
    kvtrace docs
    kvtrace docs below-save-granularity
""",
    "scenario": """\
Usage: kvtrace scenario [OPTIONS] COMMAND [ARGS]...

  List and run the reproductions: a real vLLM, one cause each.

Options:
  -h, --help  Show this message and exit.

Commands:
  list  List the scenarios.
  run   Run scenarios on the vLLM of this Python.

  Examples:
    kvtrace scenario list
    kvtrace scenario run flagship
""",
    "scenario list": """\
Usage: kvtrace scenario list [OPTIONS]

  List the scenarios.

  Name, the cause that each must give first, what it does.

Options:
  --dir DIR                    The scenarios folder. [default: the checkout's]
  --format text|markdown|json  text (for a terminal), markdown (for an issue),
                               json (for programs).  [default: text]
  --no-color                   No colour (also: NO_COLOR=1).
  -h, --help                   Show this message and exit.

  Examples:
    kvtrace scenario list
    kvtrace scenario list --dir scenarios
""",
    "scenario run": """\
Usage: kvtrace scenario run [OPTIONS] [[NAME]...]...

  Run scenarios on the vLLM of this Python.

  Exit code 1 where one does not give what it must.

Arguments:
  [NAME]... <list[str]>  [default: all]

Options:
  -o, --out DIR         New folder. [default: reports/<timestamp>-scenarios]
  --check / --no-check  Compare with what each must give.  [default: check]
  --dir DIR             The scenarios folder. [default: the checkout's]
  -h, --help            Show this message and exit.

  Examples:
    kvtrace scenario run
    kvtrace scenario run flagship --out runs
""",
}
"""Command ("" for kvtrace alone) -> its help, for terminals of 80 columns and more."""
