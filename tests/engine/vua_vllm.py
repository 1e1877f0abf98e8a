"""A vendor's wrapper around vLLM's command line, as in `bin/vua-vllm serve ...`."""

import sys

from vllm.entrypoints.cli.main import main

if __name__ == "__main__":
    sys.argv[0] = "vua-vllm"
    sys.exit(main())
