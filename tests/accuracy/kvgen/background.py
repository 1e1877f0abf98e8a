"""The threads of generated connectors: an executor, a queue with threads of its own, an asyncio loop, a
thread that wakes now and then and writes what has gathered."""

from __future__ import annotations

from kvgen.names import Names
from kvgen.plan import Plan


def source(plan: Plan, kind: str, names: Names) -> str:
    """A class with submit(function, *arguments), wait() and close(), constructed with a number of threads."""
    text = {"pool": _pool, "thread": _thread, "aio": _aio, "behind": _behind}[kind](plan)
    words = {"CLS": names["class:bg"], "PREFIX": names["self:pending"].strip("_")}
    words.update({word.upper(): names[f"call:{word}"] for word in ("submit", "wait", "close")})
    for mark, word in words.items():
        text = text.replace(f"@{mark}@", word)
    return text


def _pool(plan: Plan) -> str:
    return """

class @CLS@:
    def __init__(self, threads):
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="@PREFIX@")
        self._futures = []

    def @SUBMIT@(self, function, *arguments):
        self._futures.append(self._pool.submit(function, *arguments))

    def @WAIT@(self):
        futures, self._futures = self._futures, []
        for future in futures:
            future.result()

    def @CLOSE@(self):
        self._pool.shutdown(@HOW@)
""".replace("@HOW@", "wait=False, cancel_futures=True" if plan.fault == "queue-thrown-away" else "wait=True")


def _thread(plan: Plan) -> str:
    run = """            try:
                function(*arguments)
            except Exception as error:
                @LOG@
            finally:
                self._queue.task_done()"""
    run = run.replace(
        "@LOG@", ("self._errors += 1", "log.debug('job failed: %s', error)", "pass")[plan.variant % 3]
    )
    if plan.fault == "thread-dies":
        run = "            function(*arguments)\n            self._queue.task_done()"
    drop = "        self._queue.queue.clear()\n" if plan.fault == "queue-thrown-away" else ""
    submit = "        self._queue.put((function, arguments))"
    size = ""
    if plan.fault == "queue-full":
        size = "maxsize=2"
        submit = """        try:
            self._queue.put_nowait((function, arguments))
        except queue.Full:
            self._errors += 1"""
        if plan.variant % 2:
            submit = """        if self._queue.full():
            self._errors += 1
            return
        self._queue.put((function, arguments))"""
    return f"""

class @CLS@:
    def __init__(self, threads):
        self._queue = queue.Queue({size})
        self._errors = 0
        self._threads = [
            threading.Thread(target=self._run, name=f"@PREFIX@-{{i}}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self):
        while True:
            job = self._queue.get()
            if job is None:
                self._queue.task_done()
                return
            function, arguments = job
{run}

    def @SUBMIT@(self, function, *arguments):
{submit}

    def @WAIT@(self):
        self._queue.join()

    def @CLOSE@(self):
{drop}        for thread in self._threads:
            if thread.is_alive():
                self._queue.put(None)
        for thread in self._threads:
            thread.join(timeout=5)
"""


def _behind(plan: Plan) -> str:
    every = (0.03, 0.08, 0.2)[plan.variant % 3]
    return f"""

class @CLS@:
    def __init__(self, threads):
        self._jobs = collections.deque()
        self._over = threading.Event()
        self._errors = 0
        self._thread = threading.Thread(target=self._run, name="@PREFIX@", daemon=True)
        self._thread.start()

    def _run(self):
        while not self._over.wait({every}):
            self._write()

    def _write(self):
        while self._jobs:
            function, arguments = self._jobs.popleft()
            try:
                function(*arguments)
            except Exception as error:
                self._errors += 1
                log.warning("write failed: %s", error)

    def @SUBMIT@(self, function, *arguments):
        self._jobs.append((function, arguments))

    def @WAIT@(self):
        pass

    def @CLOSE@(self):
        self._over.set()
        self._thread.join()
        self._write()
"""


def _aio(plan: Plan) -> str:
    work = "return function(*arguments)"
    if plan.variant % 2:
        job = "functools.partial(function, *arguments)"
        work = f"return await asyncio.get_running_loop().run_in_executor(None, {job})"
    return f"""

class @CLS@:
    def __init__(self, threads):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="@PREFIX@", daemon=True)
        self._thread.start()
        self._jobs = []

    async def _work(self, function, arguments):
        {work}

    def @SUBMIT@(self, function, *arguments):
        self._jobs.append(asyncio.run_coroutine_threadsafe(self._work(function, arguments), self._loop))

    def @WAIT@(self):
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.result()

    def @CLOSE@(self):
        concurrent.futures.wait(self._jobs)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
"""
