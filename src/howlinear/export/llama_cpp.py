"""Run a GGUF file in llama.cpp: log-probabilities of a text, and speed.

    with LlamaCpp.start("out/model.gguf", length=512) as engine:
        engine.score(ids)                               # log-probabilities, and the most likely tokens
        engine.speed(ids, ids[:16], new_tokens=32)      # seconds: prefill, decode

llama.cpp comes as a Python package (`xllamacpp`) or as a program on the path (`llama-server`); both answer the
same requests. The server returns probabilities of tokens that it samples, and none of the prompt's. So each
token is asked for: the request adds a large bias to the sampler's score of the next token of the text, and the
server answers with its probability before that bias. The prompt before it stays in the server's memory.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

SURE = 1000.0  # added to the score of the token that is to be sampled
PATIENCE = 120  # seconds until a server answers
NO_PROXY = urllib.request.build_opener(
    urllib.request.ProxyHandler({})
)  # the server is on this machine


def installed() -> str | None:
    """How llama.cpp can be run here, if at all."""
    if importlib.util.find_spec("xllamacpp"):
        return "xllamacpp"
    return "llama-server" if shutil.which("llama-server") else None


class Prediction(NamedTuple):
    """For one token of a text: its log-probability, the most likely token in its place, and that one's."""

    log_probability: float
    most_likely: int
    highest: float


@dataclass
class LlamaCpp:
    """A GGUF file in a running server. `ask` answers one request for a completion."""

    ask: Callable[[dict[str, Any]], dict[str, Any]]

    @classmethod
    @contextmanager
    def start(
        cls, path: str | Path, length: int, threads: int = 1, way: str | None = None
    ) -> Iterator[LlamaCpp]:
        """The server ends with the block. `length`: the most tokens that are asked for."""
        starters = {"xllamacpp": _in_process, "llama-server": _on_a_port}
        way = way or installed()
        if way is None:
            raise ValueError("llama.cpp is not there: pip install xllamacpp")
        with starters[way](str(path), length + 1, threads) as ask:
            yield cls(ask)

    def score(self, ids: Sequence[int]) -> list[Prediction | None]:
        """What is predicted for each token after the first, given those before it.

        None where the token is a part of a character: the server does not report those.
        """
        answers: list[Prediction | None] = []
        for i in range(1, len(ids)):
            request = {"prompt": list(ids[:i]), "n_predict": 1, "temperature": 0, "n_probs": 1}
            request |= {"logit_bias": [[ids[i], SURE]], "cache_prompt": True}
            reported = self.ask(request)["choices"][0].get("logprobs") or {}
            for answer in reported.get("content") or [None]:
                if answer is not None and answer["id"] != ids[i]:
                    raise ValueError(f"llama.cpp sampled token {answer['id']}, not {ids[i]}")
                answers.append(answer and _prediction(answer))
        return answers

    def speed(
        self, ids: Sequence[int], prompt: Sequence[int], new_tokens: int
    ) -> tuple[float, float]:
        """Seconds, by the server's own clock: reading `ids`; writing new tokens after a prompt."""
        fresh = {"temperature": 0, "cache_prompt": False, "ignore_eos": True}
        read = self.ask(fresh | {"prompt": list(ids), "n_predict": 1})["timings"]
        # one more: the first new token comes from the prompt's last position
        wrote = self.ask(fresh | {"prompt": list(prompt), "n_predict": new_tokens + 1})["timings"]
        if read["prompt_n"] != len(ids):
            raise ValueError(f"llama.cpp read {read['prompt_n']} of {len(ids)} tokens")
        return read["prompt_ms"] / 1e3, wrote["predicted_ms"] / 1e3


@contextmanager
def _in_process(path: str, length: int, threads: int) -> Iterator[Callable[..., dict[str, Any]]]:
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path = path
    settings.n_ctx, settings.n_parallel = length, 1
    settings.verbosity, settings.warmup = -1, False
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
    try:
        server = xllamacpp.Server(settings)  # ends when nothing refers to it
    except RuntimeError as problem:
        raise ValueError(f"llama.cpp does not load {path}: {problem}") from None
    yield lambda request: _checked(server.handle_completions(request))


@contextmanager
def _on_a_port(path: str, length: int, threads: int) -> Iterator[Callable[..., dict[str, Any]]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = {"-m": path, "-c": length, "-t": threads, "-np": 1, "--port": port}
    command = ["llama-server", *(str(part) for pair in flags.items() for part in pair)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait(server, f"http://127.0.0.1:{port}/health")
        yield lambda request: _posted(f"http://127.0.0.1:{port}", request)
    finally:
        server.terminate()
        server.wait()


def _wait(server: subprocess.Popen[bytes], url: str) -> None:
    """Until the server has loaded its model."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if server.poll() is not None:
            raise ValueError(f"llama-server ended with code {server.returncode}")
        try:
            with NO_PROXY.open(url, timeout=5):
                return
        except OSError:  # not listening yet, or still loading
            time.sleep(0.2)
    raise ValueError(f"llama-server does not answer after {PATIENCE} s")


def _posted(address: str, request: dict[str, Any]) -> dict[str, Any]:
    """The answer of a server to a request for a completion."""
    headers = {"Content-Type": "application/json"}
    post = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(request).encode(), headers
    )
    try:
        with NO_PROXY.open(post, timeout=PATIENCE) as answer:
            return _checked(json.load(answer))
    except OSError as problem:
        raise ValueError(f"llama-server does not answer: {problem}") from None


def _prediction(answer: dict[str, Any]) -> Prediction:
    best = answer["top_logprobs"][0]
    return Prediction(float(answer["logprob"]), int(best["id"]), float(best["logprob"]))


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    if "choices" not in answer:
        raise ValueError(f"llama.cpp refuses: {str(answer)[:200]}")
    return answer
