"""README.md of an export: what was replaced, what was measured, how to load it, how it was made.

table = measured_table(result, exported, change)
text = card("stock", origin("org/name"), auto="AutoModelForCausalLM", table=table, ...)
"""

from __future__ import annotations

import re
from typing import Any

from howlinear.compression.compress import Compression
from howlinear.export.folder import Origin
from howlinear.losses.perplexity import Comparison
from howlinear.models.ggufs import one_line

CARD = """\
---
{front}---

# {title}

{count} of the {total} feed-forward blocks of {base} are replaced by maps that were fitted to the
blocks' inputs and outputs.

{table}

## Load

{load}
## How it was made

{fence}
{command}
{fence}
"""
TRANSFORMERS = """\
```python
from transformers import {auto}{and_tokenizer}
model = {auto}.from_pretrained("."{trust})
{tokenizer}```

`.` is the folder of this file. """
LOAD = {
    "hf": TRANSFORMERS
    + """`trust_remote_code` is needed because no class of transformers has
such blocks. The code is one short file, `modeling_howlinear.py`; `linear_blocks` in
`config.json` lists the blocks.
""",
    "stock": TRANSFORMERS
    + """It loads with plain transformers and contains no code: the model is the original's class with
fewer hidden units in each block, and was loaded so in a new process.
""",
    "nemotron-nas": """\
The format is `nemotron-nas`; `block_configs` in `config.json` has the width of each block, and `mlp_bias` is true:
linear maps are hidden units with a constant gate. It is written for vLLM:

```
vllm serve . --trust-remote-code
```

The code is the class of the config, `configuration_decilm.py`. A loader of howlinear read the folder, and it agrees
with the model that was measured.

```python
from howlinear.export.nemotron_nas import read_back
model = read_back(".")
```

`.` is the folder of this file; `read_back` is for checking.
""",
    "gguf": """\
One file, `model.gguf`, for llama.cpp and what is built on it:

```
llama-server -m model.gguf
```

The file was read again and its bytes agree with the model that was measured. `howlinear bench . --engines`
runs it in the engines that are installed and compares them with these bytes.
""",
}
ENGINES = """
Engines that read models of this class read it too. `howlinear bench . --engines` runs those that are installed and
compares them with these weights.

| | |
|---|---|
| vLLM | `vllm serve .` |
| SGLang | `python -m sglang.launch_server --model-path .` |
| MLX | `mlx_lm.server --model .` |
| llama.cpp | `llama-server -m model.gguf`, after its `convert_hf_to_gguf.py . --outfile model.gguf` |
"""
FRONT: dict[str, dict[str, Any]] = {
    "hf": {"library_name": "transformers", "tags": ["howlinear", "custom_code"]},
    "stock": {"library_name": "transformers", "tags": ["howlinear"]},
    "nemotron-nas": {"tags": ["howlinear", "nemotron-nas"]},
    "gguf": {"library_name": "gguf", "tags": ["howlinear", "gguf"]},
}


def card(
    kind: str,
    origin: Origin,
    *,
    auto: str,
    count: int,
    total: int,
    table: str,
    command: str,
    has_tokenizer: bool = True,
) -> str:
    """README.md of an export with `count` of `total` blocks replaced, loaded by the Auto class `auto`.

    `table` is markdown and goes in unchanged; names and the command are escaped.
    """
    from huggingface_hub.utils import yaml_dump

    front = {"base_model": one_line(origin.base_model), **origin.license, **FRONT[kind]}
    base, command = markdown(origin.base_model), one_line(command, limit=10_000)
    trust = ", trust_remote_code=True" if kind == "hf" else ""  # tokenizers need it too
    tokenizer = f'tokenizer = AutoTokenizer.from_pretrained("."{trust})\n'
    load = LOAD[kind].format(
        auto=auto,
        trust=trust,
        and_tokenizer=", AutoTokenizer" if has_tokenizer else "",
        tokenizer=tokenizer if has_tokenizer else "",
    )
    if kind == "stock" and auto == "AutoModelForCausalLM":
        load += ENGINES
    return CARD.format(
        front=yaml_dump(front),
        title=f"{base.rpartition('/')[2]} with smaller feed-forward blocks",
        base=base,
        count=count,
        total=total,
        table=table.strip(),
        load=load,
        fence="`" * max(3, 1 + max(map(len, re.findall("`+", command)), default=0)),
        command=command,
    )


def markdown(text: str) -> str:
    """A name from elsewhere as plain text in Markdown and HTML."""
    return re.sub(r"([\\`*_\[\]{}<>()#|!&~])", r"\\\1", one_line(text))


# ------------------------------------------------------------------------------------- tables


def measured_table(result: Compression, exported: dict[str, Any], change: Comparison | None) -> str:
    """Perplexity and sizes, notes, and what replaces each block, in markdown."""
    rows = [_row("", "original", "compressed", "change"), "|---|---:|---:|---:|"]
    if change is not None:
        a, b = change.original, change.changed
        values = ((a.perplexity, a.perplexity_se), (b.perplexity, b.perplexity_se))
        growth = f"{change.delta_ppl:+.3f} ± {change.delta_ppl_se:.3f}"
        rows.append(_row("perplexity", *(f"{v:.3f} ± {se:.3f}" for v, se in values), growth))
    rows += _sizes(result, exported)
    notes = [f"- {markdown(note)}" for note in (*result.notes, *exported["notes"])]
    protocol = [] if change is None else [_protocol(result, exported["dtype"], change)]
    parts = [rows, protocol, notes, _blocks(result)]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _sizes(result: Compression, exported: dict[str, Any]) -> list[str]:
    before, after = result.parameters, exported["parameters"]
    feed_forward = result.feed_forward, result.feed_forward - (before - after)
    counts = {"parameters": (before, after), "in feed-forward blocks": feed_forward}
    rows = [_row(k, f"{a:,}", f"{b:,}", f"{b / a - 1:+.1%}") for k, (a, b) in counts.items()]
    size = exported["bytes_before"], exported["tensor_bytes"]
    stored = f"MB in {exported['dtype']}" if exported["dtype"] != "source" else "MB of tensors"
    return [
        *rows,
        _row(stored, *(f"{n / 1e6:,.1f}" for n in size), f"{size[1] / size[0] - 1:+.1%}"),
    ]


def _protocol(result: Compression, dtype: str, change: Comparison) -> str:
    corpus = result.about.get("corpus") or {}
    text = " ".join(str(corpus[key]) for key in ("name", "report") if corpus.get(key))
    return (
        f"Perplexity: {change.protocol}; {change.tokens:,} tokens"
        f"{f' of {markdown(text)}' if text else ''}, with weights in {dtype}. ± is one standard error over "
        "windows; the change is paired by window. Before rounding, KL(original, compressed) was "
        f"{change.kl:.4f} ± {change.kl_se:.4f} nats per token, and the most likely token was the same "
        f"for {change.top1:.1%} of tokens."
    )


def _blocks(result: Compression) -> list[str]:
    rows = [_row("block", "replaced by", "parameters", "instead of"), "|---|---|---:|---:|"]
    for b in result.blocks:
        if b.replaced:
            matrix = {None: "a matrix", 0: ""}.get(b.rank, f"a matrix of rank {b.rank}")
            units = f"{len(b.units)} of its hidden units" if b.units else ""
            parts = " and ".join(part for part in (matrix, units) if part) or "a constant"
            name = f"{b.index} {markdown(b.path)}"
            rows.append(_row(name, parts, f"{b.parameters_left:,}", f"{b.parameters:,}"))
    return rows


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
