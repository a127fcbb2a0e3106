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
    "Moments": "moments",
    "TSQR": "moments",
    "Affine": "affine",
    "fit": "affine",
    "score": "affine",
    "blocks": "families",
    "tap": "families",
    "swapped": "families",
    "load": "models",
    "windows": "corpus",
    "profile": "profiling",
    "Profile": "profiling",
    "text_loss": "perplexity",
    "compare": "perplexity",
    "evaluate": "evaluation",
    "swap_costs": "sweeps",
    "probe": "probing",
    "compress_model": "compress",
    "install_maps": "installing",
    "compare_runs": "comparing",
    "merge_runs": "merging",
    "LinearityMonitor": "monitor",
    "LinearityCallback": "monitor",
}

__all__ = [
    "TSQR",
    "Affine",
    "LinearityCallback",
    "LinearityMonitor",
    "Moments",
    "Profile",
    "blocks",
    "compare",
    "compare_runs",
    "compress_model",
    "evaluate",
    "fit",
    "install_maps",
    "load",
    "merge_runs",
    "probe",
    "profile",
    "score",
    "swap_costs",
    "swapped",
    "tap",
    "text_loss",
    "windows",
]

if TYPE_CHECKING:
    from howlinear.affine import Affine, fit, score
    from howlinear.comparing import compare_runs
    from howlinear.compress import compress_model
    from howlinear.corpus import windows
    from howlinear.evaluation import evaluate
    from howlinear.families import blocks, swapped, tap
    from howlinear.installing import install_maps
    from howlinear.merging import merge_runs
    from howlinear.models import load
    from howlinear.moments import TSQR, Moments
    from howlinear.monitor import LinearityCallback, LinearityMonitor
    from howlinear.perplexity import compare, text_loss
    from howlinear.probing import probe
    from howlinear.profiling import Profile, profile
    from howlinear.sweeps import swap_costs


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"howlinear.{_HOME[name]}"), name)
    raise AttributeError(f"module 'howlinear' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
