"""Three small language models of our own, trained from scratch on WikiText-2 while a monitor watches.

    python examples/learned/train.py gpt2 -o models/gpt2            # or gpt-neox, llama
    python examples/learned/train.py llama -o models/llama-1 --seed 1 --lr 3e-3 --weight-decay 0
    python examples/learned/train.py all -o models                  # every model of docs/learned.md

The three differ in what the paper's families differ in, and in nothing else: GPT-2 runs attention
and a GELU block in turn, GPT-NeoX both beside each other, Llama a gated SwiGLU block of as many
parameters. Width, depth, tokenizer, text, its order, the number of tokens and the optimiser are the
same; about a million parameters each. One core is enough.

A folder holds a float16 checkpoint that transformers loads, its tokenizer, `train.json` (settings
and losses) and `monitor.jsonl` (the profile at step 0, during and after training).
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils.logging import disable_progress_bar

from howlinear import builtin_text, windows
from howlinear.profiling.monitor import LinearityMonitor

VOCABULARY, LENGTH, DEPTH, HEADS, BATCH = 2048, 128, 8, 4, 8
WATCHED = 10_240  # tokens that the monitor reads: one cell for each of five folds
AT = (1, 4, 16, 64, 128, 256, 512, 768)  # steps to measure at, beside the first and the last

FAMILIES = ("gpt2", "gpt-neox", "llama")
EVERY = {
    "gpt2-wide": ("gpt2", "--width=192"),
    **{f"{family}-{seed}": (family, f"--seed={seed}") for seed in (0, 1) for family in FAMILIES},
    "gpt2-lr-low": ("gpt2", "--lr=3e-4"),
    "gpt2-lr-high": ("gpt2", "--lr=1e-2"),
    "gpt2-no-decay": ("gpt2", "--weight-decay=0"),
    **{f"{family}-2": (family, "--seed=2") for family in FAMILIES},
}


def tokenizer_of(text: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE of VOCABULARY tokens, the same for the same text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"]
    )
    bpe.train_from_iterator(text.splitlines(keepends=True), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|endoftext|>", model_max_length=LENGTH
    )


def model_of(family: str, width: int, seed: int) -> torch.nn.Module:
    """Fresh weights, as transformers initialises them, but for the same spread in all three."""
    torch.manual_seed(seed)
    common = {"vocab_size": VOCABULARY, "tie_word_embeddings": True, "initializer_range": 0.02}
    common |= {"bos_token_id": 0, "eos_token_id": 0}
    if family == "gpt2":
        config = GPT2Config(
            n_embd=width,
            n_layer=DEPTH,
            n_head=HEADS,
            n_positions=LENGTH,
            activation_function="gelu",
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
            **common,
        )
        return GPT2LMHeadModel(config)
    common |= {
        "hidden_size": width,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": HEADS,
        "max_position_embeddings": LENGTH,
    }
    if family == "gpt-neox":
        return GPTNeoXForCausalLM(GPTNeoXConfig(intermediate_size=4 * width, **common))
    # three matrices in place of two
    return LlamaForCausalLM(LlamaConfig(intermediate_size=8 * width // 3, **common))


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Up in the first twentieth, then a cosine down to a tenth."""
    warm = max(1, steps // 20)
    if step < warm:
        return peak * (step + 1) / warm
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / (steps - warm))))


def loss_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def train(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    text = builtin_text()
    tokenizer = tokenizer_of(text.fit)
    model = model_of(options.family, options.width, options.seed).train()
    ids = windows(text.fit, tokenizer, LENGTH)
    held = windows(text.choose(), tokenizer, LENGTH, tokens=64_000)
    watched = windows(text.report(), tokenizer, LENGTH, tokens=WATCHED)
    generator = torch.Generator().manual_seed(options.seed)
    order = torch.cat([torch.randperm(len(ids), generator=generator) for _ in range(9)])
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimiser = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": options.weight_decay}, {"params": others}],
        lr=options.lr,
        betas=(0.9, 0.95),
        weight_decay=0.0,
    )
    out = Path(options.out)
    monitor = LinearityMonitor(
        model, watched, every=AT, max_overhead=None, path=out / "monitor.jsonl"
    )
    losses, began = [], time.perf_counter()
    for step in range(options.steps):
        monitor.step(step)
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, options.steps, options.lr)
        loss = loss_of(model, ids[order[step * BATCH : (step + 1) * BATCH]])
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(round(loss.item(), 4))
        if step % 100 == 99:
            print(f"{out.name}: step {step + 1}, loss {sum(losses[-100:]) / 100:.3f}", flush=True)
    monitor.finish(options.steps)
    seconds = time.perf_counter() - began
    model.eval()
    with torch.no_grad():
        held_out = [loss_of(model, batch).item() for batch in held.split(BATCH)]
    disable_progress_bar()
    model.half().save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "train.json").write_text(
        json.dumps(
            {
                "family": options.family,
                "seed": options.seed,
                "width": options.width,
                "lr": options.lr,
                "weight_decay": options.weight_decay,
                "steps": options.steps,
                "tokens": options.steps * BATCH * LENGTH,
                "parameters": sum(p.numel() for p in model.parameters()),
                "held_out_loss": round(sum(held_out) / len(held_out), 4),
                "seconds": round(seconds),
                "monitor_seconds": round(monitor.spent, 1),
                "losses": losses,
            }
        )
        + "\n"
    )
    print(f"{out.name}: {sum(held_out) / len(held_out):.3f} held out, {seconds:.0f} s", flush=True)


def train_all(out: Path, steps: int) -> None:
    """Two at a time, a core each; what is there already stays."""
    waiting = [name for name in EVERY if not (out / name / "train.json").exists()]
    running: list[subprocess.Popen[bytes]] = []
    while waiting or running:
        while waiting and len(running) < 2:
            name = waiting.pop(0)
            flags = [*EVERY[name], f"--steps={steps}", f"--out={out / name}"]
            running.append(subprocess.Popen([sys.executable, __file__, *flags]))
        time.sleep(1)
        if any(process.poll() for process in running):
            sys.exit("a training failed")
        running = [process for process in running if process.poll() is None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family", choices=(*FAMILIES, "all"))
    parser.add_argument("-o", "--out", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=1024)
    options = parser.parse_args()
    if options.family == "all":
        train_all(Path(options.out), options.steps)
    else:
        train(options)


if __name__ == "__main__":
    main()
