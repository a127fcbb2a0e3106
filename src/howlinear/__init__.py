"""How linear is each feed-forward block of a transformer, and how sure are we?

    import howlinear as hl

    model, tokenizer = hl.load("HuggingFaceTB/SmolLM2-135M")
    result = hl.profile(model, hl.windows(text, tokenizer, 512))
    for block in result.blocks:
        print(block.index, block.path, block.r2, block.r2_se, block.kind)

Names are imported when first used, so that `import howlinear` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "Moments": "linear.moments",
    "TSQR": "linear.moments",
    "Affine": "linear.affine",
    "fit": "linear.solving",
    "score": "linear.scoring",
    "blocks": "models.families",
    "tap": "models.hooks",
    "swapped": "models.hooks",
    "load": "models.loading",
    "windows": "models.cutting",
    "spread_windows": "models.cutting",
    "Text": "models.corpus",
    "builtin_text": "models.corpus",
    "text_file": "models.corpus",
    "dataset_text": "models.corpus",
    "Course": "profiling.passes",
    "profile": "profiling.profiler",
    "Profile": "profiling.profiler",
    "text_loss": "losses.perplexity",
    "compare": "losses.perplexity",
    "evaluate": "losses.evaluation",
    "swap_costs": "losses.sweeps",
    "probe": "probing.probes",
    "Budget": "compression.plan",
    "CompressSettings": "compression.compress",
    "ProbeSettings": "probing.kinds",
    "compress_model": "compression.compress",
    "install_maps": "export.install",
    "compare_runs": "profiling.comparing",
    "merge_runs": "profiling.merging",
    "residuals": "profiling.token_errors",
    "LinearityMonitor": "profiling.monitor",
    "LinearityCallback": "profiling.monitor",
}

__all__ = [
    "TSQR",
    "Affine",
    "Budget",
    "CompressSettings",
    "Course",
    "LinearityCallback",
    "LinearityMonitor",
    "Moments",
    "ProbeSettings",
    "Profile",
    "Text",
    "blocks",
    "builtin_text",
    "compare",
    "compare_runs",
    "compress_model",
    "dataset_text",
    "evaluate",
    "fit",
    "install_maps",
    "load",
    "merge_runs",
    "probe",
    "profile",
    "residuals",
    "score",
    "spread_windows",
    "swap_costs",
    "swapped",
    "tap",
    "text_file",
    "text_loss",
    "windows",
]

if TYPE_CHECKING:
    from howlinear.compression.compress import CompressSettings, compress_model
    from howlinear.compression.plan import Budget
    from howlinear.export.install import install_maps
    from howlinear.linear.affine import Affine
    from howlinear.linear.moments import TSQR, Moments
    from howlinear.linear.scoring import score
    from howlinear.linear.solving import fit
    from howlinear.losses.evaluation import evaluate
    from howlinear.losses.perplexity import compare, text_loss
    from howlinear.losses.sweeps import swap_costs
    from howlinear.models.corpus import Text, builtin_text, dataset_text, text_file
    from howlinear.models.cutting import spread_windows, windows
    from howlinear.models.families import blocks
    from howlinear.models.hooks import swapped, tap
    from howlinear.models.loading import load
    from howlinear.probing.kinds import ProbeSettings
    from howlinear.probing.probes import probe
    from howlinear.profiling.comparing import compare_runs
    from howlinear.profiling.merging import merge_runs
    from howlinear.profiling.monitor import LinearityCallback, LinearityMonitor
    from howlinear.profiling.passes import Course
    from howlinear.profiling.profiler import Profile, profile
    from howlinear.profiling.token_errors import residuals


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"howlinear.{_HOME[name]}"), name)
    raise AttributeError(f"module 'howlinear' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
