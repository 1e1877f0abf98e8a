"""On the path of the tests' engines: a fifth of importing vLLM is garbage collection that finds nothing."""

import gc

gc.set_threshold(100_000, 20, 100)
