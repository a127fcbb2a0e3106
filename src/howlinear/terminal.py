"""Results on a terminal: tables that fit 80 columns and say more on wider ones.

Strings from outside (model names, module paths) are shown as text: no markup, no control codes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from howlinear.records import BlockCompression, BlockProbe, BlockProfile, BlockSwap, ExpertSwap

COLOURS = {
    "broadly linear": "green",
    "partly linear": "yellow",
    "outlier-concentrated": "yellow",
    "first-position only": "magenta",
    "nonlinear": "red",
}


SAFETY_MEANS = {  # in the order shown
    "likely safe": "likely safe",
    "costly": "costly",
    "sink": "costly unless sink units are kept",
}


def plain(text: object, width: int | None = None) -> Text:
    """Text from outside, without control characters, cut in the middle to `width`."""
    shown = "".join(c if c.isprintable() else "?" for c in str(text))
    if width is not None and len(shown) > width:
        head = (width - 1) // 2
        shown = shown[:head] + "…" + shown[len(shown) - (width - 1 - head) :]
    return Text(shown)


def number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None or value != value else f"{value:.{digits}f}"


def _wide(b: BlockProfile) -> list[str]:
    condition = "-" if b.input_condition is None else f"{b.input_condition:.1e}"
    return [
        number(b.first_share),
        number(b.stream_error, 4),
        "-" if b.swap_signal is None else f"{b.swap_signal:.3f}",
        f"{b.input_rank}/{b.d_in}",
        condition,
        number(b.rows_per_column, 1),
    ]


def show_shard(console: Console, data: dict[str, Any], blocks: list[dict[str, Any]]) -> None:
    """What `howlinear profile --shard` prints: there is nothing to score yet."""
    settings = data["settings"]
    part, parts = settings["shard"]
    rows = max(b["rows"] for b in blocks)
    console.print(plain(f"{data['model']['id']}, {len(blocks)} blocks"))
    console.print(
        plain(
            f"shard {part} of {parts}: {settings['read']} of {settings['tokens']} tokens, {rows} rows "
            "a block; add the shards up with `howlinear merge`"
        )
    )


def _show_experts(console: Console, experts: list[dict[str, Any]], asked: str) -> None:
    """A line a layer: how linear its experts are, and which were given too little."""
    console.print()
    on = "every token" if asked == "all" else "the tokens routed to each"
    console.print(plain(f"experts, on {on}: R2 of each, and of the layer's lowest and highest"))
    for index in dict.fromkeys(e["index"] for e in experts):
        own = [e for e in experts if e["index"] == index]
        scored = sorted((e for e in own if e["problem"] is None), key=lambda e: e["r2"])
        tokens = [e["tokens"] for e in own if e["expert"] != "shared"]
        text = f"{index:>3}  {len(own)} experts, {min(tokens)} to {max(tokens)} tokens"
        if scored:
            middle = scored[len(scored) // 2]
            text += f"; R2 {scored[0]['r2']:.3f} ({scored[0]['expert']}), median {middle['r2']:.3f}"
            text += f", {scored[-1]['r2']:.3f} ({scored[-1]['expert']})"
        console.print(plain(text))
        thin = [e for e in own if e["problem"] is not None]
        if thin:
            names = ", ".join(e["expert"] for e in thin[:6]) + (", ..." if len(thin) > 6 else "")
            console.print(
                plain(f"     not scored, too few tokens: {names} ({len(thin)} of {len(own)})")
            )


def show_expert_swaps(console: Console, data: dict[str, Any], blocks: list[ExpertSwap]) -> None:
    """The table that `howlinear swap --experts` prints."""
    base = data["base"]
    console.print(
        plain(f"perplexity {base['perplexity']:.2f}, {base['protocol']}, {base['tokens']} tokens")
    )
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for name in ("expert", "tokens", "R2", "nats ± se", "perplexity", "KL", "top-1"):
        table.add_column(name, justify="right", no_wrap=True)
    for b in blocks:
        table.add_row(
            plain(f"{b.index}.{b.expert}"),
            str(b.tokens),
            number(b.r2),
            f"{b.delta_nll:+.4f} ±{b.delta_nll_se:.4f}",
            f"{b.delta_ppl:+.2f}",
            f"{b.kl:.4f}",
            f"{b.top1:.3f}",
        )
    console.print(table)


def show_profile(console: Console, data: dict[str, Any], blocks: list[BlockProfile]) -> None:
    """The table that `howlinear profile` prints."""
    model, text, settings = data["model"], data["corpus"], data["settings"]
    console.print(plain(f"{model['id']}, {model['dtype']}, {len(blocks)} blocks"))
    scheme = f"{settings['folds']} folds" if settings["folds"] else "one 80/20 split"
    console.print(
        plain(
            f"{text['name']} {text['part']}: {settings['tokens']} tokens in windows of "
            f"{settings['window']}, protocol {settings['protocol']}, {scheme}"
        )
    )
    wide = console.width >= 132
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("#", justify="right")
    table.add_column("module", overflow="ellipsis", no_wrap=True)
    for name in ("R2 ± se", "body", "scalar", "feat.", "rank"):
        table.add_column(name, justify="right", no_wrap=True)
    if wide:
        for name in ("first", "stream err.", "signal", "input rank", "condition", "rows/col."):
            table.add_column(name, justify="right", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    room = max(12, console.width - (60 if not wide else 120))
    for b in blocks:
        se = "" if b.r2_se is None else f" ±{b.r2_se:.3f}".replace("±0.", "±.")
        cells = [
            number(b.r2) + se,
            number(b.r2_body),
            number(b.r2_scalar),
            number(b.r2_feature["median"], 2),
            "-" if b.effective_rank is None else str(b.effective_rank),
        ]
        kind = Text(b.kind, style=COLOURS.get(b.kind, ""))
        extra = _wide(b) if wide else []
        table.add_row(str(b.index), plain(b.path, room), *cells, *extra, kind)
    console.print(table)
    s = data["summary"]
    console.print(
        f"R2 from {number(s['r2_min'])} (block {s['r2_min_block']}) to {number(s['r2_max'])} "
        f"(block {s['r2_max_block']})"
    )
    if s["largest_jump"] is not None:
        pair = f"blocks {s['largest_jump_after']} and {s['largest_jump_before']}"
        console.print(f"largest jump {number(s['largest_jump'])}, between {pair}")
    console.print(f"rank correlation of R2 with depth {number(s['depth_spearman'], 2)}")
    by_safety: dict[str, list[int]] = {}
    for b in blocks:
        by_safety.setdefault(b.safety, []).append(b.index)
    words = [
        f"{meaning} {ranges(by_safety[word])}"
        for word, meaning in SAFETY_MEANS.items()
        if word in by_safety
    ]
    if words:
        console.print(plain(f"as one matrix, by estimate: {'; '.join(words)}"))
        console.print("`howlinear swap RUN` measures what a swap costs")
    if data.get("experts"):
        _show_experts(console, data["experts"], settings["experts"])
    for note in data["notes"]:
        console.print(plain(f"note: {note}"))


def ranges(indices: list[int]) -> str:
    """3, 5, 9-12, as `--blocks` takes it."""
    parts: list[list[int]] = []
    for i in sorted(indices):
        if parts and i == parts[-1][1] + 1:
            parts[-1][1] = i
        else:
            parts.append([i, i])
    return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in parts)


def signed(value: float | None) -> str:
    """A difference in four figures or so, whatever its size."""
    if value is None or value != value:
        return "-"
    digits = 2 if abs(value) < 100 else 0
    return f"{value:+.{digits}f}" if abs(value) < 1e5 else f"{value:+.1e}"


def show_swaps(console: Console, data: dict[str, Any], blocks: list[BlockSwap]) -> None:
    """The table that `howlinear swap` prints."""
    model, text, settings = data["model"], data["corpus"], data["settings"]
    console.print(plain(f"{model['id']}, {len(blocks)} blocks, each replaced alone"))
    base = data["base"]
    if base is not None:
        bits = base["bits_per_byte"]
        shown = f"perplexity {base['perplexity']:.2f} ± {base['perplexity_se']:.2f}"
        shown += "" if bits is None else f", {bits:.3f} bits a byte"
        where = f"{text['name']} {text['report']}, {settings['protocol']}, {base['tokens']} tokens"
        console.print(plain(f"{shown} as it is ({where})"))
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("#", justify="right")
    names = ["Δppl ± se", "units", "plain", "zero", "mean", "KL", "top-1"] if base else []
    wide = console.width >= 120
    extra = ["cosine", "rmse", "stream err."] if wide or not base else []
    for name in (*names, *extra, "params", "signal"):
        table.add_column(name, justify="right", no_wrap=True)
    for b in blocks:
        cells = []
        if base is not None:
            se = number(b.delta_ppl_se, 2)  # of one window there is none
            cells += [
                f"{signed(b.delta_ppl)} ±{se}",
                str(len(b.units)),
                signed(b.delta_ppl_plain),
                signed(b.delta_ppl_zero),
                signed(b.delta_ppl_mean),
                number(b.kl),
                number(b.top1),
            ]
        if extra:
            cells += [number(b.cosine), number(b.rmse, 4), number(b.stream_error, 4)]
        signal = "-" if b.swap_signal is None else f"{b.swap_signal:.2g}"
        table.add_row(str(b.index), *cells, f"{-b.params_saved / 1e6:+.2f}M", signal)
    console.print(table)
    if base is not None:
        console.print(
            "Δppl: with the map; plain: plain least squares; zero: removed; mean: constant"
        )
    known = {name: value for name, value in data["signals"].items() if value is not None}
    if known:
        listed = ", ".join(f"{name} {value:+.2f}" for name, value in known.items())
        console.print(plain(f"rank correlation with what plain least squares costs: {listed}"))
    for note in data["notes"]:
        console.print(plain(f"note: {note}"))


def show_probes(console: Console, data: dict[str, Any], blocks: list[BlockProbe]) -> None:
    """The tables that `howlinear probe` prints, one a kind of probe."""
    rows, text = data["settings"]["rows"], data["corpus"]
    console.print(plain(f"{data['model']['id']}, {len(blocks)} blocks probed"))
    console.print(
        plain(
            f"{text['name']}: fitted on {rows['fit']} rows of {text['fit']}, chosen on "
            f"{rows['choose']} of {text['choose']}, reported on {rows['report']} of {text['report']}"
        )
    )
    for kind, (title, columns) in PROBE_TABLES.items():
        own = [(b, getattr(b, kind)) for b in blocks if getattr(b, kind) is not None]
        if not own:
            continue
        console.print()
        console.print(Text(title, style="bold"))
        done = [(b, found) for b, found in own if "skipped" not in found]
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
        table.add_column("#", justify="right")
        for name in columns:
            table.add_column(name, justify="right", overflow="ellipsis", no_wrap=True)
        for b, found in done:
            for cells in PROBE_ROWS[kind](b, found):
                table.add_row(str(b.index), *(plain(cell) for cell in cells))
        if done:
            console.print(table)
        for b, found in own:
            if "skipped" in found:
                console.print(plain(f"block {b.index} left out: {found['skipped']}"))
    console.print()
    for name, found in data["summary"].items():
        console.print(
            f"{name.replace('_', ' ')} over {found['blocks']} blocks: median "
            f"{number(found['median'], 4)}, largest {number(found['max'], 4)}; correlation with "
            f"1 - R2: {signed(found['pearson_with_1_minus_r2'])} (Pearson), "
            f"{signed(found['spearman_with_1_minus_r2'])} (ranks)"
        )
    for note in data["notes"]:
        console.print(plain(f"note: {note}"))


Cells = list[list[str]]


def _cost(found: dict[str, Any], name: str) -> str:
    """What a fitted layer costs when swapped in, where that was measured."""
    return signed(found.get("swap", {}).get(name, {}).get("delta_ppl"))


def _gain(found: dict[str, Any]) -> str:
    gain = found["gain"]
    shown = "-" if gain is None or gain != gain else f"{gain:+.4f}"
    return f"{shown} ±{number(found['gain_se'], 4)}"


def _bilinear_rows(b: BlockProbe, found: dict[str, Any]) -> Cells:
    ranks = {step["rank"]: step["gain"] for step in found["ranks"] or []}
    sweep = " ".join(f"{ranks[r]:.3f}" for r in (1, 4, 64) if r in ranks) or "-"
    gains = [seed["gain"] for seed in found["seeds"]]
    spread = f"{max(gains) - min(gains):.4f}" if len(gains) > 1 else "-"
    costs = [_cost(b.linear, "linear"), _cost(found, "bilinear")]
    cells = [number(b.r2), _gain(found), spread, sweep, number(found["recruitment"], 2)]
    return [[*cells, *costs, f"{found['seconds']:.0f}"]]


def _degree_rows(b: BlockProbe, found: dict[str, Any]) -> Cells:
    steps = found["steps"]
    shares = [number(step["recovered"]) for step in (steps[0], steps[1], steps[-1])]
    return [[number(b.r2), *shares, _cost(found, found["best"]), found["verdict"]]]


def _units_rows(b: BlockProbe, found: dict[str, Any]) -> Cells:
    steps = {step["k"]: step for step in found["steps"]}
    k = found["at_two_matrices"]
    cells = [number(steps[n]["r2"]) if n in steps else "-" for n in (0, 1, 16, 64, 256)]
    cells += [str(k), number(steps[k]["r2"]), f"{steps[k]['parameters'] / 1e6:.2f}M"]
    return [[*cells, _cost(b.linear, "linear"), _cost(found, f"{k} units")]]


def _network_rows(name: str) -> Callable[[BlockProbe, dict[str, Any]], Cells]:
    def rows(b: BlockProbe, found: dict[str, Any]) -> Cells:
        done = f"{found['steps']}{'' if found['converged'] else ' (not converged)'}"
        cells = [
            number(b.r2),
            number(found["r2"]),
            _gain(found),
            f"{found['parameters'] / 1e6:.2f}M",
        ]
        return [[*cells, _cost(b.linear, "linear"), _cost(found, name), done]]

    return rows


def _trained_rows(b: BlockProbe, found: dict[str, Any]) -> Cells:
    by = {(run["optimiser"], run["inputs"]): run["r2"] for run in found["runs"]}
    cells = [
        f"{number(by[name, 'raw'])} {number(by[name, 'whitened'])}"
        for name in ("sgd", "adam", "adamw")
    ]
    return [[number(found["r2_closed_form"]), *cells, f"{found['input_condition']:.1e}"]]


def _where_rows(b: BlockProbe, found: dict[str, Any]) -> Cells:
    first = sum(p["share"] for p in found["positions"] if p["from"] == 0)
    tokens = ", ".join(
        f"{(t['text'] or str(t['token'])).strip() or '␣'} {t['times_mean']:.1f}x ({t['count']})"
        for t in found["tokens"][:3]
    )
    writes = (found["directions"] or [{}])[0].get("writes")
    read = "" if writes is None else " ".join(str(t).strip() for t in writes["up"][:3])
    return [[number(first), tokens, read]]


def _quantised_rows(b: BlockProbe, found: dict[str, Any]) -> Cells:
    errors = [f"{found[name]['error']:.2e}" for name in ("int8", "int4")]
    costs = [_cost(b.linear, "linear"), *(_cost(found, name) for name in ("int8", "int4"))]
    return [[number(1 - b.r2), *errors, *costs]]


def _healing_rows(b: BlockProbe, found: dict[str, Any]) -> Cells:
    costs = [_cost(found, name) for name in ("swapped", "healed", "control")]
    return [[str(len(found["units"])), *costs, str(found["healed"]["steps"])]]


NETWORK = ("linear R2", "R2", "gain ± se", "params", "Δppl linear", "Δppl", "steps")
PROBE_TABLES = {
    "bilinear": (
        "bilinear: y ~ Wx + b + A[(Ux) * (Vx)]",
        ("R2", "gain ± se", "seeds", "at 1, 4, 64", "recr.", "Δppl linear", "Δppl", "s"),
    ),
    "degree": (
        "degree: share of the rest that polynomials of leading directions recover",
        ("R2", "2nd", "3rd", "2nd wide", "Δppl best", "verdict"),
    ),
    "units": (
        "units: R2 of the matrix beside k hidden units",
        ("k = 0", "1", "16", "64", "256", "k at 2W", "R2", "params", "Δppl linear", "Δppl"),
    ),
    "dense": ("dense (2x): Linear-GELU-Linear", NETWORK),
    "poly": ("poly (2x): two bilinear layers", NETWORK),
    "seeded": ("seeded poly: all trained from the closed form", NETWORK),
    "trained": (
        "trained: R2 of a linear layer by gradient descent, on inputs raw and whitened",
        ("closed form", "SGD", "Adam", "AdamW", "condition"),
    ),
    "where": (
        "where: what carries the rest",
        ("first", "tokens, times the mean (count)", "the map writes"),
    ),
    "quantised": (
        "quantised: error over variance, beside 1 - R2 of one matrix",
        ("1 - R2", "int8", "int4", "Δppl linear", "Δppl int8", "Δppl int4"),
    ),
    "healing": (
        "healing: rise of perplexity as swapped, fine-tuned, and of the block itself fine-tuned",
        ("units", "swapped", "healed", "control", "steps"),
    ),
}
PROBE_ROWS: dict[str, Callable[[BlockProbe, dict[str, Any]], Cells]] = {
    "bilinear": _bilinear_rows,
    "degree": _degree_rows,
    "units": _units_rows,
    "dense": _network_rows("dense"),
    "poly": _network_rows("poly"),
    "seeded": _network_rows("seeded"),
    "trained": _trained_rows,
    "where": _where_rows,
    "quantised": _quantised_rows,
    "healing": _healing_rows,
}


def show_compression(
    console: Console, data: dict[str, Any], blocks: list[BlockCompression]
) -> None:
    """The tables that `howlinear compress` prints: what became of the blocks, and the methods."""
    gone = [b for b in blocks if b.replaced]
    console.print(plain(f"{data['model']['id']}: {len(gone)} of {len(blocks)} blocks replaced"))
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for name in ("#", "module", "matrix", "units", "parameters", "left"):
        table.add_column(name, justify="left" if name == "module" else "right", no_wrap=True)
    for b in gone:
        matrix = "full" if b.rank is None else f"rank {b.rank}" if b.rank else "-"
        left = f"{b.parameters_left / b.parameters:.0%}"
        sizes = (f"{b.parameters:,}", left)
        table.add_row(str(b.index), plain(b.path, 28), matrix, str(len(b.units)), *sizes)
    console.print(table)
    share = data["removed"] / data["feed_forward"]
    console.print(
        f"{data['removed']:,} parameters removed: {share:.1%} of the feed-forward blocks', "
        f"{data['removed'] / data['parameters']:.1%} of the model's"
    )
    if (change := data["change"]) is not None:
        before, after = (change[k]["perplexity"] for k in ("original", "changed"))
        console.print(
            f"perplexity {before:.2f} to {after:.2f} ({after / before - 1:+.1%}; "
            f"{change['delta_ppl']:+.2f} ± {change['delta_ppl_se']:.2f}), {change['protocol']}, "
            f"{change['tokens']} tokens that nothing was fitted to or chosen by"
        )
    if (made := data["exported"]) is not None:
        stored = "" if made["perplexity"] is None else f", perplexity {made['perplexity']:.2f} so"
        console.print(
            f"written in {made['dtype']}: {made['parameters']:,} parameters, "
            f"{made['bytes'] / 1e6:.0f} MB{stored}; loaded again in a new process, it agrees"
        )
        for note in made["notes"]:
            console.print(plain(f"note: {note}"))
    if len({p["method"] for p in data["curve"]}) > 1:
        _show_curve(console, data["curve"])
    for note in data["notes"]:
        console.print(plain(f"note: {note}"))


def _show_curve(console: Console, curve: list[dict[str, Any]]) -> None:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for name in ("removed", "blocks", "perplexity", "Δppl ± se", "method"):
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for p in sorted(curve, key=lambda p: (p["removed"], p["method"])):
        delta = f"{signed(p['delta_ppl'])} ±{number(p['delta_ppl_se'], 2)}"
        cells = (f"{p['share']:.1%}", str(p["blocks"]), number(p["perplexity"], 2), delta)
        style = "bold" if p["method"] == "ours" else ""
        table.add_row(*cells, METHODS[p["method"]], style=style)
    console.print(table)


METHODS = {
    "ours": "refitted along the plan",
    "swap": "one matrix each, cheapest swaps first",
    "r2": "one matrix each, highest R2 first",
    "zero": "blocks removed, cheapest first",
}


def show_bench(console: Console, data: dict[str, Any]) -> None:
    """The table that `howlinear bench` prints: a model, and the one beside it."""
    s, roles = data["settings"], ("model", "against")[: len(data["speeds"])]
    for role in roles:
        if role in data:
            console.print(plain(f"{role}: {data[role]['id']}", console.width))
    threads = f"{s['threads']} thread{'s' * (s['threads'] > 1)}"
    console.print(
        f"{s['batch']} x {s['length']} tokens of prefill, {s['new_tokens']} decoded after "
        f"{s['prompt']}, {s['repeats']} times; {s['dtype']}, {s['device']}, {threads}"
    )
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for name in ("", "params", "memory", "on disk", "prefill tokens/s", "decode tokens/s"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for role, speed in zip(roles, data["speeds"], strict=True):
        disk = speed["bytes_on_disk"]
        table.add_row(
            role,
            f"{speed['parameters'] / 1e6:.1f}M",
            f"{speed['bytes'] / 1e6:.0f} MB",
            "-" if disk is None else f"{disk / 1e6:.0f} MB",
            *(_rate(speed[phase]) for phase in ("prefill", "decode")),
        )
    console.print(table)
    compared = data["comparison"]
    if compared is not None:
        console.print(plain(compared["verdict"]))
    if compared is not None and compared["saved_share"] is not None:
        console.print(f"share of the promised saving of time: {compared['saved_share']:.2f}")


def _rate(spread: dict[str, float] | None) -> str:
    if spread is None:
        return "-"
    digits = 1 if spread["median"] < 100 else 0
    low, middle, high = (f"{spread[k]:.{digits}f}" for k in ("q25", "median", "q75"))
    return f"{middle} ({low}-{high})"


def _table(*columns: str, left: tuple[str, ...] = ()) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(plain(name, 24), justify="left" if name in left else "right", no_wrap=True)
    return table


def _with_se(value: float | None, se: float | None, digits: int = 3) -> str:
    return number(value, digits) + ("" if se is None or se != se else f" ±{se:.{digits}f}")


def _between(estimate: dict[str, float | None]) -> str:
    """A number with its 95 % interval, where there is one."""
    value, low, high = (estimate[k] for k in ("value", "low", "high"))
    shown = number(value)
    return shown if low is None or high is None else f"{shown} ({low:.3f} to {high:.3f})"


def show_comparison(console: Console, data: dict[str, Any], blocks: list[dict[str, Any]]) -> None:
    """The tables that `howlinear compare` prints."""
    names = [run["name"] for run in data["runs"]]
    for name, run in zip(names, data["runs"], strict=True):
        model, text = run["model"] or {}, run["corpus"] or {}
        said = (model.get("id", "?"), text.get("name", "?"))
        console.print(plain(f"{name}: {said[0]}, {said[1]}", console.width))
    table = _table("#", *names)
    for row in blocks:
        cells = ["-" if r is None else _with_se(r["r2"], r["r2_se"]) for r in row["runs"]]
        table.add_row(str(row["index"]), *cells)
    console.print(table)
    for pair in data["pairs"]:
        console.print()
        console.print(plain(f"{pair['a']} to {pair['b']}, with 95 % intervals over folds:"))
        console.print(f"  correlation over depth {_between(pair['pearson'])}", end="")
        console.print(f", of ranks {_between(pair['spearman'])}")
        console.print(f"  mean shift of R2 {_between(pair['mean_shift'])}", end="")
        console.print(f", mean size {_between(pair['mean_size_of_shift'])}")
        console.print(
            f"  largest at block {pair['largest_shift_at']}: {_between(pair['largest_shift'])}"
        )
    if data["crossed"]:
        console.print()
        table = _table("fitted on", "scored on", "mean R2", left=("fitted on", "scored on"))
        for c in data["crossed"]:
            table.add_row(plain(c["fit"]), plain(c["scored"]), _between(c["mean"]))
        console.print(table)
    for note in data["notes"]:
        console.print(plain(f"note: {note}"))


def show_random_init(console: Console, data: dict[str, Any], blocks: list[dict[str, Any]]) -> None:
    """The table of `howlinear control random-init`."""
    s, found = data["settings"], data["summary"]
    console.print(plain(f"{data['model']['id']}, {len(blocks)} blocks, {s['tokens']} tokens"))
    said = "their own weights, permuted" if s["weights"] == "shuffled" else "fresh weights"
    table = _table("#", "R2 trained", "body", f"{s['seeds']} untrained", "body untrained", "")
    for b in blocks:
        body = [u["r2_body"] for u in b["untrained"]]
        where = "below" if b["r2"] < b["low"] else "above" if b["r2"] > b["high"] else "inside"
        table.add_row(
            str(b["index"]),
            _with_se(b["r2"], b["r2_se"]),
            number(b["r2_body"]),
            f"{b['low']:.3f} to {b['high']:.3f}",
            f"{min(body):.3f} to {max(body):.3f}",
            where,
        )
    console.print(table)
    console.print(
        f"untrained: {said}. Trained R2 is below their band in {found['below']} of {len(blocks)} "
        f"blocks and above it in {found['above']}; mean {found['mean_trained']:.3f} trained, "
        f"{found['mean_untrained']:.3f} untrained; range over depth {found['range_trained']:.3f} "
        f"and {found['range_untrained']:.3f}"
    )


def show_cross_feed(console: Console, data: dict[str, Any], blocks: list[dict[str, Any]]) -> None:
    """The two-way table of `howlinear control cross-feed`."""
    console.print(plain(f"A: {data['model']['id']}", console.width))
    console.print(plain(f"B: {data['model_b']['id']}", console.width))
    names = ("aa", "ab", "ba", "bb", "a_moved", "b_moved")
    shown = ("AA", "AB", "BA", "BB", "A→B", "B→A")
    table = _table("a", "b", *shown, "B-A", "weights", "inputs")
    for b in blocks:
        cells = [number(b["cells"][name]["value"]) for name in names]
        split = [signed3(b["split"][name]["value"]) for name in ("difference", "weights", "inputs")]
        table.add_row(str(b["index"]), str(b["index_b"]), *cells, *split)
    console.print(table)
    found = data["summary"]
    console.print(
        "AB: R2 of A's weights on B's inputs; A→B: of A's weights on its own inputs, moved to the "
        "mean and covariance of B's"
    )
    console.print(
        f"mean of R2 of B less R2 of A: {signed3(found['difference'])}, of which weights make "
        f"{signed3(found['weights'])} and inputs {signed3(found['inputs'])}"
    )


def signed3(value: float | None) -> str:
    return "-" if value is None or value != value else f"{value:+.3f}"


def show_matched(console: Console, data: dict[str, Any], blocks: list[dict[str, Any]]) -> None:
    """The table of `howlinear control matched`."""
    s = data["settings"]
    console.print(plain(f"{data['model']['id']}, {len(blocks)} blocks, {s['tokens']} tokens"))
    names = ["own", "gaussian", "whitened", *(f"x{scale:g}" for scale in s["scales"])]
    table = _table("#", *names, "predicted", "its Gaussian")
    for b in blocks:
        cells = [number(b["r2"][name]["value"]) for name in names]
        told = b["predicted"]
        extra = ["-", "-"]
        if told is not None:
            extra = [number(told["r2"]["value"]), number(told["r2_gaussian"])]
        table.add_row(str(b["index"]), *cells, *extra)
    console.print(table)
    console.print(
        "R2 on own inputs; on Gaussian ones of the same mean and covariance; on own inputs whitened "
        "and scaled. predicted: the map from weights, mean and covariance alone, on own and on "
        "Gaussian inputs"
    )
    for note in data["notes"]:
        console.print(plain(f"note: {note}"))


def show_training(console: Console, data: dict[str, Any], blocks: list[dict[str, Any]]) -> None:
    """The table of `howlinear control checkpoints`: a row a checkpoint."""
    console.print(plain(f"{data['asked']['model']}, {len(blocks)} blocks", console.width))
    room = max(1, (console.width - 24) // 6)
    step = -(-len(blocks) // room)  # as many as fit
    shown = blocks[::step]
    table = _table("checkpoint", "mean", *(str(b["index"]) for b in shown), left=("checkpoint",))
    for i, c in enumerate(data["checkpoints"]):
        mean = sum(b["r2"][i] for b in blocks) / len(blocks)
        cells = (number(b["r2"][i]) for b in shown)
        table.add_row(plain(c["name"], 16), number(mean), *cells)
    console.print(table)
