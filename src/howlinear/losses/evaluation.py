"""A model in memory, changed or not, on the tasks of lm-evaluation-harness.

    scores = evaluate(model, ["arc_easy", "hellaswag"], tokenizer, limit=200)["results"]
    scores["arc_easy"]["acc,none"], scores["arc_easy"]["acc_stderr,none"]

    with swapped(model, {block: layer}):                       # or with a block replaced
        evaluate(model, ["arc_easy"], tokenizer)
    evaluate(model, ["mine"], tokenizer, include_path="tasks/")   # tasks of one's own

Needs the packages lm-eval and accelerate. Returns what `lm_eval.simple_evaluate` returns.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from howlinear.models.ggufs import one_line
from howlinear.models.hooks import evaluating

# Options of the harness's model wrapper; all others are options of `simple_evaluate`. Options of the
# wrapper that concern loading are left out. `simple_evaluate` ignores its batch size for a model that
# is loaded already, so the wrapper gets it too.
WRAPPER = (
    "max_batch_size", "max_length", "truncation", "add_bos_token", "prefix_token_id",
    "softmax_dtype", "mixed_precision_dtype", "logits_cache", "think_end_token",
    "enable_thinking", "chat_template_args",
)  # fmt: skip


def evaluate(
    model: nn.Module,
    tasks: Sequence[Any],
    tokenizer: Any = None,
    *,
    batch_size: int | str = 8,
    include_path: str | Path | Sequence[str | Path] | None = None,
    task_manager: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """Scores of a model on tasks of lm-evaluation-harness: names, or its task objects.

    `options` are those of `lm_eval.simple_evaluate` (`limit`, `num_fewshot`, `apply_chat_template`)
    and of its `HFLM` (`max_length`, `add_bos_token`). Neither model nor tokenizer is changed; the
    harness does seed the random numbers of Python, numpy and torch.
    """
    harness, hf = _harness("lm_eval"), _harness("lm_eval.models.huggingface")
    if not getattr(model, "can_generate", lambda: False)():
        raise ValueError(
            f"{type(model).__name__} does not predict the next token, which the tasks ask for: "
            "load it with AutoModelForCausalLM if it was trained to"
        )
    manager = _manager(tasks, task_manager, include_path, options.get("metadata"))
    wrapper = {name: options.pop(name) for name in WRAPPER if name in options}
    config: Any = model.config
    wrapper |= {"tokenizer": _tokenizer(model, tokenizer), "batch_size": batch_size}
    # by default chosen by model_type, which a compressed model does not share
    wrapper["backend"] = "seq2seq" if config.is_encoder_decoder else "causal"
    with evaluating(model):
        wrapped = hf.HFLM(pretrained=model, **wrapper)
        scores: dict[str, Any] = harness.simple_evaluate(
            model=wrapped,
            tasks=list(tasks),
            batch_size=batch_size,  # for the record
            task_manager=manager,
            **options,
        )
    return scores


def _harness(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as err:
        raise ValueError(
            f"evaluate needs lm-eval ({one_line(err, 80)}): run `pip install lm-eval accelerate`"
        ) from None


def _tokenizer(model: nn.Module, tokenizer: Any) -> Any:
    """A copy: the harness adds a padding token to tokenizers without one."""
    if tokenizer is not None:
        return copy.deepcopy(tokenizer)
    from transformers import AutoTokenizer

    name = getattr(model, "name_or_path", "")
    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as err:  # from anywhere between the hub and a damaged file
        raise ValueError(
            f"no tokenizer found for {type(model).__name__} at {name!r} ({one_line(err, 80)}): "
            "pass tokenizer="
        ) from None


def _manager(tasks: Sequence[Any], manager: Any, include_path: Any, metadata: Any) -> Any:
    """The harness's index of tasks; misspelt names are refused before anything runs."""
    if isinstance(tasks, str) or not tasks:
        raise ValueError(f"tasks is {tasks!r}, expected a list of names such as ['arc_easy']")
    if manager is not None and include_path is not None:
        raise ValueError("give include_path or task_manager, not both")
    for path in [include_path] if isinstance(include_path, str | Path) else include_path or ():
        if not Path(path).is_dir():
            raise ValueError(f"include_path {path} is not a folder of task files")
    if manager is None:
        index = _harness("lm_eval.tasks")
        manager = index.TaskManager(include_path=include_path, metadata=metadata)
    known = set(manager.all_tasks)
    for task in tasks:
        if isinstance(task, str) and task not in known and not Path(task).exists():
            raise ValueError(
                f"unknown task {task}: see `lm-eval ls tasks`, or pass include_path= for your own"
            )
    return manager
