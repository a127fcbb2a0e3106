"""`howlinear swap`: replace each block alone by its map and measure the cost."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from typer import Option

from howlinear.cli import flags
from howlinear.cli.output import show
from howlinear.cli.progress import progress_bars
from howlinear.cli.sources import Loader, RunSource
from howlinear.cli.tables.swap import show_expert_swaps, show_swaps

PredictedTokens = Annotated[
    int, Option(help="Tokens to predict; half as many to choose units by.", min=1)
]
Units = Annotated[
    Literal["auto", "0", "1", "2", "4"],
    Option(help="Sink units that each map keeps; auto: chosen for each block."),
]
Experts = Annotated[
    str | None,
    Option(
        help="Replace single experts instead: all, or layers and experts such as 3,5.17,7.shared."
    ),
]
Weighting = Annotated[
    Literal["none", "body", "stream", "output"],
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
    units: Units = "auto",
    blocks: flags.Blocks = None,
    experts: Experts = None,
    weighting: Weighting = "none",
    protocol: Eval = "windows-128",
    batch_size: flags.BatchSize = 8,
    device: flags.Device = "cpu",
    trust_remote_code: flags.TrustRemoteCode = False,
    allow_pickle: flags.AllowPickle = False,
    as_json: flags.AsJson = False,
) -> None:
    """Replace each block alone by its map and measure what that costs."""
    from howlinear.losses.protocols import EvalProtocol
    from howlinear.run.ranks import Ranks
    from howlinear.run.work import Work
    from howlinear.swapping.expert_swaps import measure_expert_swaps
    from howlinear.swapping.swaps import measure_swaps

    source = RunSource(run)
    EvalProtocol.parse(protocol)  # refused before the model is loaded
    ranks = Ranks.start()
    net = source.load(Loader(device, trust_remote_code, allow_pickle))
    cut = source.protocol(protocol)
    report, n_bytes = source.held_out("report", cut, tokens)
    result: Any
    with progress_bars() as begin:
        common: dict[str, Any] = {"report": report, "protocol": cut}
        common["work"] = Work(ranks, batch_size, begin)
        if experts is not None:
            result = measure_expert_swaps(net, run, experts, **common)
        else:
            common |= {"units": units if units == "auto" else int(units), "weighting": weighting}
            fit = source.fit_windows() if weighting in ("stream", "output") else None
            choose, _ = source.held_out("choose", cut, max(tokens // 2, 1))
            result = measure_swaps(net, run, choose=choose, fit=fit, at=blocks, **common)
    result = result.with_bytes(n_bytes)
    result.about.update(source.about("choose", "report"))
    if ranks.rank == 0:
        result.save(run)
    show_table = show_swaps if experts is None else show_expert_swaps
    show(result, show_table, run / f"{result.to_dict()['kind']}.json", as_json)
    ranks.stop()
