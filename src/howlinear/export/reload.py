"""Is what loads from a folder the model that was written there? A new process tells.

round_weights(model, torch.bfloat16)            # what is checked is what is saved
with stored_as(model, torch.bfloat16):
    model.save_pretrained(folder)
verify(folder, model, {"input_ids": ids}, "narrow")
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.export.hf import auto_class
from howlinear.models.ggufs import one_line

logger = logging.getLogger(__name__)


# ------------------------------------------------------------------------------------- rounding


def round_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Round all that is saved to `dtype`, in place, and leave the model in float32.

    A checkpoint in bfloat16 is another model than the one in memory; after this they are the same,
    and can be compared to the rounding of float32.
    """
    model.float()
    state = model.state_dict()
    tensors = {name: t for name, t in state.items() if t.is_floating_point() and t.numel()}
    for name, tensor in tensors.items():
        low, high = (float(end) for end in tensor.aminmax())  # isfinite takes 20 times longer
        if not -torch.finfo(dtype).max <= low <= high <= torch.finfo(dtype).max:
            raise ValueError(f"{name} does not fit in {dtype}")
    for tensor in tensors.values():
        tensor.copy_(tensor.to(dtype))


@contextmanager
def stored_as(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, all that is saved is in `dtype`, and afterwards in float32 again.

    Nothing is lost if it was rounded before. `model.to(dtype)` would round more: frequencies of
    rotary positions, which are not saved.
    """
    held = {id(t): t for t in model.state_dict(keep_vars=True).values() if t.is_floating_point()}
    try:
        for tensor in held.values():
            tensor.data = tensor.data.to(dtype)
        yield
    finally:
        for tensor in held.values():
            tensor.data = tensor.data.float()


# ------------------------------------------------------------------------------------- checking


def verify(folder: Path, model: nn.Module, inputs: Mapping[str, Tensor], kind: str) -> None:
    """Load the folder in a new process, and compare; ValueError if it differs.

    `model` is what was written, after `round_weights`, in eval mode; `inputs` are a few short
    windows, as the model takes them. The new process has no howlinear, except that nothing else
    reads nemotron-nas there. What it loads must be the model's tensors, bit for bit. In float32, the
    first output (logits, or hidden states without a head) must agree to 1e-4 of its largest value:
    another order of summation changes it by 1e-6 to 1e-5, a layer in bfloat16 by 1e-3 or more. Greedy
    generation must choose the same 16 tokens, up to a choice between equals.
    """
    _check_size(folder, model)
    try:
        want = _results(model, dict(inputs))
    except (LookupError, TypeError, ValueError, RuntimeError) as err:  # transformers' own limits
        logger.warning("only outputs are compared: the model does not generate: %s", one_line(err))
        want = _results(model, dict(inputs), generate=False)
    with tempfile.TemporaryDirectory() as work:
        got, told = _in_new_process(folder, model, inputs, kind, Path(work), "tokens" in want)
    if told["wrong"]:
        raise ValueError(
            f"{folder} loads with missing or unknown weights, first {told['wrong'][0]}"
        )
    _compare_tensors(folder, _digests(model), told["digests"])
    _compare(folder, want, got)


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _check_size(folder: Path, model: nn.Module) -> None:
    """The files hold no more than the model's tensors, tied ones once, in the dtype they should have."""
    dtype = getattr(torch, json.loads((folder / "config.json").read_text())["dtype"])
    tensors = {(t.data_ptr(), t.shape): t for t in model.state_dict().values()}.values()
    most = sum(
        t.numel() * (dtype.itemsize if t.is_floating_point() else t.itemsize) for t in tensors
    )
    size = 0
    for path in weight_files(folder):
        with path.open("rb") as file:
            size += path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")
    if size > most:
        raise ValueError(f"{folder} has {size} bytes of weights, {most} at most in {dtype}")


def _compare_tensors(folder: Path, want: Mapping[str, str], got: Mapping[str, str]) -> None:
    """By name and digest."""
    wrong = sorted(n for n in want.keys() | got.keys() if want.get(n) != got.get(n))
    if wrong:
        raise ValueError(
            f"{folder}: {len(wrong)} weights are not what the model has, first {wrong[0]}"
        )


def _compare(folder: Path, want: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> None:
    close = 1e-4 * float(want["output"].abs().max())
    if got.keys() != want.keys():
        raise ValueError(f"{folder} loads as a model that does not generate, or does")
    if got["output"].shape != want["output"].shape:
        shapes = f"{tuple(got['output'].shape)}, expected {tuple(want['output'].shape)}"
        raise ValueError(f"{folder} gives an output of shape {shapes}")
    apart = float((got["output"] - want["output"]).abs().max())
    if not apart <= close:  # NaN is not
        raise ValueError(
            f"{folder} gives other outputs when loaded: {apart:.3g} apart, {close:.3g} at most"
        )
    for step, (a, b) in enumerate(zip(want.get("tokens", ()), got.get("tokens", ()), strict=True)):
        differ = a != b
        if not bool(differ.any()):
            continue
        two = want["scores"][step][differ].topk(2).values
        if bool((two[:, 0] - two[:, 1] > 2 * close).any()):
            raise ValueError(f"{folder} generates other text when loaded, from token {step} on")
        return  # a choice between equals: what follows may differ


# ----------------------------------------------------------------------------- the new process
# These three are sent there as text: they need no name of this module.


def _results(model: Any, inputs: dict[str, Tensor], generate: bool = True) -> dict[str, Tensor]:
    """The first output, and 16 greedy tokens with their logits where the model writes text."""
    import torch

    with torch.no_grad():
        device = next(model.parameters()).device
        inputs = {name: value.to(device) for name, value in inputs.items()}
        found = {"output": model(**inputs)[0].cpu().contiguous()}
        if generate and model.can_generate() and "input_ids" in inputs:
            prompt = {n: v for n, v in inputs.items() if n in ("input_ids", "attention_mask")}
            options = {"output_logits": True, "return_dict_in_generate": True, "num_beams": 1}
            made = model.generate(**prompt, **options, max_new_tokens=16, do_sample=False)
            found["scores"] = torch.stack(made.logits).float().cpu()  # (steps, B, vocabulary)
            found["tokens"] = made.sequences[:, -len(made.logits) :].t().cpu().contiguous()
    return found


def _digests(model: Any) -> dict[str, str]:
    """A hash of each tensor by name."""
    import hashlib

    state = {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}
    return {
        n: f"{tuple(t.shape)} {hashlib.sha256(t.numpy()).hexdigest()}" for n, t in state.items()
    }


def _reload(folder: str, kind: str, auto: str, work: str, generate: str) -> None:
    import json
    import sys
    from pathlib import Path

    class NoHowlinear:
        def find_spec(self, name: str, *_: object) -> None:
            if name.partition(".")[0] == "howlinear":
                raise ModuleNotFoundError("an export must load without howlinear", name=name)

    if kind == "nemotron-nas":
        from howlinear.export.nemotron_nas import read_back

        model, wrong = read_back(folder).float(), set()
    else:
        sys.meta_path.insert(0, NoHowlinear())
        import transformers

        model, info = getattr(transformers, auto).from_pretrained(
            folder, trust_remote_code=kind == "hf", dtype="float32", output_loading_info=True
        )
        wrong = {*info["missing_keys"], *info["unexpected_keys"]}
    from safetensors.torch import load_file, save_file

    given = load_file(Path(work, "inputs"))
    save_file(_results(model.eval(), given, bool(generate)), Path(work, "got"))
    told = {"wrong": sorted(wrong), "digests": _digests(model)}
    Path(work, "told").write_text(json.dumps(told))


def _in_new_process(
    folder: Path,
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    kind: str,
    work: Path,
    generate: bool,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors.torch import load_file, save_file

    save_file(
        {name: ids.cpu().clone().contiguous() for name, ids in inputs.items()}, work / "inputs"
    )
    parts = [inspect.getsource(part) for part in (_results, _digests, _reload)]
    program = "\n".join(
        ["from __future__ import annotations", *parts, "import sys", "_reload(*sys.argv[1:])"]
    )
    given = (str(folder.resolve()), kind, auto_class(model), str(work), "generate" * generate)
    own = {
        "HF_HUB_OFFLINE": "1",
        "HF_MODULES_CACHE": str(work / "modules"),
        "OMP_NUM_THREADS": str(
            torch.get_num_threads()
        ),  # on a busy machine, more can be far slower
    }
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, *given],
        env={**os.environ, **own},
        cwd=work,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    if done.returncode:
        why = one_line((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
        raise ValueError(f"{folder} does not load in a new process: {why}")
    return load_file(work / "got"), json.loads((work / "told").read_text())
