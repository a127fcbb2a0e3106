"""Check an export by loading it in a new process and comparing it with the model that was written.

round_weights(model, torch.bfloat16)            # the model in memory equals the stored one
with stored_as(model, torch.bfloat16):
    model.save_pretrained(folder)
verify(folder, model, {"input_ids": ids}, "stock")
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.export.hf import auto_class, saved
from howlinear.export.weights import tensor_bytes
from howlinear.models.ggufs import one_line
from howlinear.models.offload import is_offloaded, value_of

logger = logging.getLogger(__name__)


def verify(folder: Path, model: nn.Module, inputs: Mapping[str, Tensor], kind: str) -> None:
    """Load the folder in a new process and compare; ValueError if it differs.

    `model` is the model that was written, after `round_weights`, in eval mode; `inputs` are a few
    short windows. The new process cannot import howlinear, except for nemotron-nas, which nothing
    else reads there. The loaded tensors must equal the model's bit for bit. In float32 the first
    output (logits, or hidden states without a head) must agree to 1e-4 of its largest value: another
    order of summation changes it by 1e-6 to 1e-5, a layer in bfloat16 by 1e-3 or more. Greedy
    generation must choose the same 16 tokens, except where two tokens are equally likely.

    Of a model with offloaded weights, the new process leaves the weights on disk, too, and no text
    is generated: each token would read all of them.
    """
    _check_size(folder, model)
    disk = is_offloaded(model)
    try:
        want = _results(model, dict(inputs), generate=not disk)
    except (LookupError, TypeError, ValueError, RuntimeError) as err:  # raised by transformers
        logger.warning("only outputs are compared: the model does not generate: %s", one_line(err))
        want = _results(model, dict(inputs), generate=False)
    with tempfile.TemporaryDirectory(prefix=".", dir=folder.parent if disk else None) as work:
        generate = "generate" if "tokens" in want else ""
        arguments = (kind, auto_class(model), generate, "disk" if disk else "")
        got, state = _in_new_process(folder, inputs, arguments, Path(work))
    if state["wrong"]:
        raise ValueError(
            f"{folder} loads with missing or unknown weights, first {state['wrong'][0]}"
        )
    _compare_tensors(folder, _digests(model), state["digests"])
    _compare(folder, want, got)


def _check_size(folder: Path, model: nn.Module) -> None:
    """Refuse files that are larger than the model's tensors in the dtype of the config, tied ones once."""
    dtype = getattr(torch, json.loads((folder / "config.json").read_text())["dtype"])
    state = saved(model).items()  # offloaded tensors have no pointer
    tensors = {(t.data_ptr() or name, t.shape): t for name, t in state}.values()
    most = sum(
        t.numel() * (dtype.itemsize if t.is_floating_point() else t.itemsize) for t in tensors
    )
    if (size := tensor_bytes(folder)) > most:
        raise ValueError(f"{folder} has {size} bytes of weights, {most} at most in {dtype}")


def _compare_tensors(folder: Path, want: Mapping[str, str], got: Mapping[str, str]) -> None:
    """Compare digests by name."""
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
    if not apart <= close:  # also true of NaN
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
        return  # two tokens are equally likely: the text after them may differ


# ----------------------------------------------------------------------------- the new process
# The source of these functions is the program of the new process: they use no other name here than
# `value_of`, whose source is part of it.


def _results(model: Any, inputs: dict[str, Tensor], generate: bool = True) -> dict[str, Tensor]:
    """The first output; 16 greedy tokens and their logits where the model generates text."""
    import torch

    with torch.no_grad():
        places = (p.device for p in model.parameters() if not p.is_meta)
        device = next(places, torch.device("cpu"))
        inputs = {name: value.to(device) for name, value in inputs.items()}
        results = {"output": model(**inputs)[0].cpu().contiguous()}
        if generate and model.can_generate() and "input_ids" in inputs:
            prompt = {n: v for n, v in inputs.items() if n in ("input_ids", "attention_mask")}
            options = {"output_logits": True, "return_dict_in_generate": True, "num_beams": 1}
            made = model.generate(**prompt, **options, max_new_tokens=16, do_sample=False)
            results["scores"] = torch.stack(made.logits).float().cpu()  # (steps, B, vocabulary)
            results["tokens"] = made.sequences[:, -len(made.logits) :].t().cpu().contiguous()
    return results


def _digests(model: Any) -> dict[str, str]:
    """Shape and SHA-256 of each tensor by name."""
    import hashlib

    digests = {}
    for name, tensor in model.state_dict().items():
        value: Any = value_of(model, name, tensor).cpu().contiguous().numpy()
        digests[name] = f"{tuple(value.shape)} {hashlib.sha256(value).hexdigest()}"
    return digests


def _reload(folder: str, work: str, kind: str, auto: str, generate: str, disk: str) -> None:
    """Load the folder; write its results, tensors' digests and missing or unknown names to `work`."""
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

        options = {"trust_remote_code": kind == "hf", "dtype": "float32"}
        if disk:
            options |= {"device_map": {"": "disk"}, "offload_folder": str(Path(work, "weights"))}
        model, info = getattr(transformers, auto).from_pretrained(
            folder, **options, output_loading_info=True
        )
        wrong = {*info["missing_keys"], *info["unexpected_keys"]}
    from safetensors.torch import load_file, save_file

    inputs = load_file(Path(work, "inputs"))
    save_file(_results(model.eval(), inputs, bool(generate)), Path(work, "results"))
    state = {"wrong": sorted(wrong), "digests": _digests(model)}
    Path(work, "state").write_text(json.dumps(state))


def _in_new_process(
    folder: Path, inputs: Mapping[str, Tensor], arguments: Sequence[str], work: Path
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The results of the loaded model, and the digests of its tensors."""
    from safetensors.torch import load_file, save_file

    copies = {name: ids.cpu().clone().contiguous() for name, ids in inputs.items()}
    save_file(copies, work / "inputs")
    functions = [inspect.getsource(part) for part in (value_of, _results, _digests, _reload)]
    head = "from __future__ import annotations"
    program = "\n".join([head, *functions, "import sys", "_reload(*sys.argv[1:])"])
    variables = {
        "HF_HUB_OFFLINE": "1",
        "HF_MODULES_CACHE": str(work / "modules"),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),  # more can be far slower if others compute
    }
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, str(folder.resolve()), str(work), *arguments],
        env={**os.environ, **variables},
        cwd=work,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    if done.returncode:
        why = one_line((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
        raise ValueError(f"{folder} does not load in a new process: {why}")
    return load_file(work / "results"), json.loads((work / "state").read_text())
