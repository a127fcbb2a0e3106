"""Exports of the built-in model in the engines that are installed: `make engines`.

    python benchmarks/engines.py runs/demo              # stock, nemotron-nas and gguf; about 45 minutes on 2 cores
    python benchmarks/engines.py runs/demo gguf         # or some of them

For each kind: `howlinear compress RUN --export KIND --remove-params 12%`, then `howlinear bench --engines` with
4,096 tokens and seven timings by turns. vLLM is found where the program `vllm` is on the path.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from howlinear.cli.app import main as howlinear

KINDS = ("gguf", "nemotron-nas", "stock")
SHARE, TOKENS, REPEATS = "12%", 4096, 7


def main(run: str, *kinds: str) -> None:
    with tempfile.TemporaryDirectory() as work:
        for kind in kinds or KINDS:
            out = Path(work, kind)
            command("compress", run, "-o", out, "--export", kind, "--remove-params", SHARE)
            sizes = ("--tokens", TOKENS, "--repeats", REPEATS, "--new-tokens", 64)
            command("bench", out, "--engines", "--trust-remote-code", *sizes)


def command(*parts: object) -> None:
    sys.argv = ["howlinear", *map(str, parts)]
    print(*sys.argv, flush=True)
    try:
        howlinear()
    except SystemExit as end:
        if end.code:
            raise
    print(flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
