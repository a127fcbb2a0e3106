"""`howlinear swap`: replace each block alone by its map and measure the cost."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from typer import Option

from howlinear.cli import flags
from howlinear.cli.output import show
from howlinear.cli.progress import progress_bars
from howlinear.cli.sources import Loader, RunSource, model_inputs, window_length
from howlinear.cli.tables.swap import show_expert_swaps, show_swaps


class Units(StrEnum):
    auto = "auto"
    none = "0"
    one = "1"
    two = "2"
    four = "4"


class Weighting(StrEnum):
    none = "none"
    body = "body"
    stream = "stream"
    output = "output"


PredictedTokens = Annotated[
    int, Option(help="Tokens to predict; half as many to choose units by.", min=1)
]
SinkUnits = Annotated[
    Units, Option(help="Sink units that each map keeps; auto: chosen for each block.")
]
Experts = Annotated[
    str | None,
    Option(
        help="Replace single experts instead: all, or layers and experts such as 3,5.17,7.shared."
    ),
]
RowWeights = Annotated[
    Weighting,
    Option(
        help="Weights of rows in the fit: equal (none), equal without first positions (body), "
        "1/|h| (stream) or 1/|y|^2 (output)."
    ),
]
Eval = Annotated[
    str,
    Option(
        "--eval",
        help="How the held-out text is cut: windows-N, stride-LENGTH-STRIDE or gptq-2048.",
    ),
]


def swap(
    run: flags.RunPath,
    tokens: PredictedTokens = 4096,
    units: SinkUnits = Units.auto,
    blocks: flags.Blocks = None,
    experts: Experts = None,
    weighting: RowWeights = Weighting.none,
    protocol: Eval = "windows-128",
    batch_size: flags.BatchSize = 8,
    device: flags.Device = "cpu",
    trust_remote_code: flags.TrustRemoteCode = False,
    allow_pickle: flags.AllowPickle = False,
    as_json: flags.AsJson = False,
) -> None:
    """Replace each block alone by its map and measure what that costs."""
    source = RunSource(run)

    from howlinear.losses.protocols import EvalProtocol, held_out_tokens
    from howlinear.run.ranks import Ranks
    from howlinear.run.work import Work
    from howlinear.swapping.expert_swaps import measure_expert_swaps
    from howlinear.swapping.swaps import measure_swaps

    cut, ranks = EvalProtocol.parse(protocol), Ranks.start()
    net, tokenizer = source.load(Loader(device, trust_remote_code, allow_pickle))
    if cut.name.startswith("windows"):
        cut = EvalProtocol.parse(f"windows-{window_length(net, tokenizer, cut.length)}")
    report, n_bytes = held_out_tokens(source.text.report(), tokenizer, cut, tokens, source.bos)
    result: Any
    with progress_bars() as begin:
        common: dict[str, Any] = {"protocol": cut, "work": Work(ranks, batch_size, begin)}
        if experts is not None:
            result = measure_expert_swaps(net, run, experts, report=report, **common)
        else:
            half = max(tokens // 2, 1)
            choose, _ = held_out_tokens(source.text.choose(), tokenizer, cut, half, source.bos)
            weighted = weighting in (Weighting.stream, Weighting.output)
            result = measure_swaps(
                net,
                run,
                choose=model_inputs(net, choose, batch_size),
                report=model_inputs(net, report, batch_size),
                fit=model_inputs(net, source.fit_windows(tokenizer)) if weighted else None,
                at=blocks,
                units=units.value if units is Units.auto else int(units),
                weighting=weighting.value,
                **common,
            )
    result = result.with_bytes(n_bytes)
    result.about.update(source.about("choose", "report"))
    if ranks.rank == 0:
        result.save(run)
    show_table = show_swaps if experts is None else show_expert_swaps
    show(result, show_table, run / f"{result.to_dict()['kind']}.json", as_json)
    ranks.stop()
