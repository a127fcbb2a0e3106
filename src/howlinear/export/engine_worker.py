"""A checkpoint in transformers or vLLM, in a process of its own: requests and answers are lines of JSON.

    python engine_worker.py vllm FOLDER LENGTH TRUST

It imports nothing of howlinear: the Python that has vLLM need not have it. The first line that it writes
has the engine's version. Then each line that it reads is a request:

    {"score": ids}                      -> [[log-probability, most likely token, its log-probability], ...]
    {"speed": ids, "prompt": p, "new_tokens": n}   -> seconds of reading `ids`, seconds of n tokens after `p`
"""

import json
import os
import sys
import time
from typing import Any

VLLM = {  # one process, a small cache, cores as the system gives them
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",  # bfloat16 products of some CPUs end the process
}


class Transformers:
    """A stock checkpoint, or one with code of its own, loaded as its card says."""

    def __init__(self, folder: str, length: int, trust: bool) -> None:
        import torch
        import transformers

        self.torch, self.version = torch, transformers.__version__
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.model = load(folder, dtype=torch.float32, trust_remote_code=trust).eval()

    def score(self, ids: list[int]) -> list[list[float]]:
        with self.torch.no_grad():
            logits = self.model(self.torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        best = logits.max(-1)
        own = logits.gather(1, self.torch.tensor(ids[1:])[:, None])[:, 0]
        rows = (own, best.indices, best.values)
        return [list(row) for row in zip(*(r.tolist() for r in rows), strict=True)]

    def seconds(self, ids: list[int], new_tokens: int) -> float:
        settings = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
        prompt = self.torch.tensor([ids])
        start = time.perf_counter()
        with self.torch.no_grad():
            self.model.generate(
                prompt, attention_mask=self.torch.ones_like(prompt), pad_token_id=0, **settings
            )
        return time.perf_counter() - start


class Vllm:
    """A checkpoint that vLLM runs, in float32."""

    def __init__(self, folder: str, length: int, trust: bool) -> None:
        os.environ.update(VLLM)
        import vllm

        self.version, self.settings = vllm.__version__, vllm.SamplingParams
        self.model = vllm.LLM(
            folder,
            dtype="float32",
            enforce_eager=True,
            max_model_len=length,
            max_num_seqs=1,
            max_num_batched_tokens=length,
            enable_prefix_caching=False,
            trust_remote_code=trust,
            skip_tokenizer_init=True,
        )

    def _run(self, ids: list[int], **settings: Any) -> Any:
        asked = self.settings(temperature=0, ignore_eos=True, detokenize=False, **settings)
        return self.model.generate([{"prompt_token_ids": ids}], asked, use_tqdm=False)[0]

    def score(self, ids: list[int]) -> list[list[float]]:
        answers = []
        done = self._run(ids, max_tokens=1, prompt_logprobs=1)
        for token, known in zip(ids[1:], done.prompt_logprobs[1:], strict=True):
            best = next(t for t, entry in known.items() if entry.rank == 1)
            answers.append([known[token].logprob, best, known[best].logprob])
        return answers

    def seconds(self, ids: list[int], new_tokens: int) -> float:
        start = time.perf_counter()
        self._run(ids, max_tokens=new_tokens)
        return time.perf_counter() - start


def speed(engine: Any, ids: list[int], prompt: list[int], new_tokens: int) -> list[float]:
    """Seconds until one token follows `ids`; seconds of further tokens after a prompt."""
    prefill = engine.seconds(ids, 1)
    first = engine.seconds(prompt, 1)
    return [prefill, engine.seconds(prompt, new_tokens + 1) - first]


def main(name: str, folder: str, length: str, trust: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print their own lines
    engines: dict[str, Any] = {"transformers": Transformers, "vllm": Vllm}
    engine = engines[name](folder, int(length), trust == "trust")
    print(json.dumps(engine.version), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "score" in request:
            answer = engine.score(request["score"])
        else:
            answer = speed(engine, request["speed"], request["prompt"], request["new_tokens"])
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
