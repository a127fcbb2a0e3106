"""Text through a model: what a user passes becomes batches, and batches become rows of blocks.

    def receive(batch, block, rows):            # rows.x (n, d_in), rows.y (n, d_out)
        sums[block.index].update(rows.x, rows.y)

    run_rows(model, windows, receive, at=at, work=work, label="inputs")

`windows` may be anything that `as_windows` takes:

| passed | read as |
|---|---|
| tensor, numpy array or lists of ids, (n, length) | n windows of token ids, cut into batches |
| list or dataset column of windows, (length,) each | the same |
| dict of tensors, BatchEncoding | model inputs of n windows, cut into batches |
| list of dicts, one for each window | the same, if they are equally long |
| list, generator or DataLoader of the above | batches, as they come |

A batch of a DataLoader may be a tensor, a dict, a list of one tensor, or a pair (inputs, labels).
A dict may have an entry "document", (n,): the number of the document in which each window begins,
which folds and standard errors go by. The model does not get it.
The two halves also work alone: `as_windows(windows).batches(8)` gives batches, and `Forward(model)`
runs one; a hook that raises `StopForward` ends a forward early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from howlinear.linear.folds import CELL, Folds
from howlinear.linear.rows import Rows
from howlinear.models import bfloat16
from howlinear.models.families import Block, backbone, blocks, call_options, towers
from howlinear.models.hooks import evaluating, tap
from howlinear.models.naming import BlockNames
from howlinear.models.offload import check_weights, device_of
from howlinear.run.work import Work

IDS, MASK, DOCUMENT = "input_ids", "attention_mask", "document"
MOST_DOCUMENTS = 2**24  # sums are kept for each number up to the largest
EXPECTED = "expected token ids (windows, length), a dict of model inputs, or batches of either"

# -- windows and batches --------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Batch:
    """Some windows as model inputs, and their place in the text."""

    number: int  # of the batch, from 0
    first: int  # number of its first window
    inputs: dict[str, Tensor]  # each (windows, ...)
    offsets: list[int]  # of each window, in tokens from the beginning of the text
    tokens: int
    document: Tensor | None = None  # (windows,) the document in which each begins, where known

    def __len__(self) -> int:
        """Number of windows."""
        return len(self.offsets)

    @property
    def clusters(self) -> Tensor:
        """(windows,) numbers of what standard errors take as independent: documents, else windows."""
        numbers = torch.arange(self.first, self.first + len(self))
        return numbers if self.document is None else self.document.cpu()


@dataclass(frozen=True, eq=False)
class Windows:
    """Windows in memory (`inputs`), or batches that are read as they come (`source`)."""

    inputs: dict[str, Tensor] | None = None
    source: Iterable[Any] = ()
    document: Tensor | None = None  # (n,) of windows in memory, where known

    @property
    def ids(self) -> Tensor | None:
        """(n, length) where all windows are in memory and nothing but token ids."""
        return self.inputs[IDS] if self.inputs is not None and set(self.inputs) == {IDS} else None

    @property
    def all_ids(self) -> Tensor:
        """(n, length), of batches too; ValueError for other inputs, and where windows are padded."""
        inputs = self.read().inputs or {}
        if set(inputs) - {"labels"} != {IDS}:
            raise ValueError("expected token ids (n, length) without padding and other inputs")
        return inputs[IDS]

    @property
    def tokens(self) -> int:
        """How many tokens there are; 0 where only reading would tell, or masks leave some out."""
        counted = self.inputs is not None and set(self.inputs) <= {IDS, "labels"}
        return self.inputs[IDS].numel() if counted and self.inputs else 0

    @property
    def length(self) -> int | None:
        """Tokens of a window, where all are in memory."""
        return None if self.inputs is None or IDS not in self.inputs else self.inputs[IDS].shape[1]

    def read(self) -> Windows:
        """The same with all batches in memory, joined where their windows are equally long."""
        if self.inputs is not None:
            return self
        parts = [_inputs(batch) for batch in self.source]
        if not parts:
            raise ValueError("the text is empty: there is no window to read")
        whole = all(len({len(value) for value in part.values()}) == 1 for part in parts)
        shapes = {tuple((n, part[n].shape[1:]) for n in sorted(part)) for part in parts}
        if not whole or len(shapes) != 1:
            return Windows(source=parts)
        return as_windows({name: torch.cat([part[name] for part in parts]) for name in parts[0]})

    def __len__(self) -> int:
        """How many windows are in memory."""
        return 0 if self.inputs is None else len(next(iter(self.inputs.values())))

    @property
    def repeatable(self) -> bool:
        """Does reading twice give the same batches? A generator ends, a DataLoader may shuffle."""
        return self.inputs is not None or isinstance(self.source, Sequence)

    def folds(self, groups: int) -> Folds:
        """Folds of these windows: by documents where they are known, in cells of a stream."""
        if not self.repeatable:
            return Folds(groups)
        batches = list(self.batches())
        offsets = [offset for batch in batches for offset in batch.offsets]
        return Folds.over(groups, offsets, sum(batch.tokens for batch in batches), self._numbers())

    @property
    def documents(self) -> int | None:
        """How many documents the windows begin in, where all know theirs and can be read again."""
        numbers = self._numbers() if self.repeatable else None
        return None if numbers is None else len(set(numbers))

    def _numbers(self) -> list[int] | None:
        known = [batch.document for batch in self.batches()]
        numbers = [number for part in known if part is not None for number in part.tolist()]
        return None if any(part is None for part in known) else numbers

    def batches(self, batch_size: int = 8) -> Iterator[Batch]:
        """In order. `batch_size` is for windows in memory; others come in batches."""
        if batch_size < 1:
            raise ValueError(f"batch size must be at least 1, got {batch_size} (`batch_size`)")
        first = tokens = 0
        for number, inputs in enumerate(self._parts(batch_size)):
            document = inputs.pop(DOCUMENT, None)
            main = inputs.get(IDS, next(iter(inputs.values())))
            # Images and audio have no tokens: each counts as a cell, the unit that folds keep whole.
            length = main.shape[1] if IDS in inputs else CELL
            offsets = [tokens + i * length for i in range(len(main))]
            yield Batch(number, first, inputs, offsets, len(main) * length, document)
            first += len(main)
            tokens += len(main) * length

    def _parts(self, batch_size: int) -> Iterator[dict[str, Tensor]]:
        if self.inputs is None:
            yield from map(_inputs, self.source)
            return
        named = self.inputs if self.document is None else {**self.inputs, DOCUMENT: self.document}
        names, values = named.keys(), named.values()
        for parts in zip(*(value.split(batch_size) for value in values), strict=True):
            yield dict(zip(names, parts, strict=True))


WindowsLike = Windows | Tensor | Iterable[Any]  # see the table above


def as_windows(windows: WindowsLike) -> Windows:
    """The one place that tells apart what a user may pass; ValueError in one line otherwise."""
    if isinstance(windows, Windows):
        return windows
    windows = _unpacked(windows)
    if isinstance(windows, str | bytes) or not isinstance(windows, Iterable):
        raise ValueError(f"{EXPECTED}; got {type(windows).__name__}")
    if _is_window(windows):
        raise ValueError(f"{EXPECTED}; got one stream of tokens: cut it into windows first")
    if not (isinstance(windows, Mapping) or _is_array(windows) or _is_windows(windows)):
        return Windows(source=windows)
    inputs = _inputs(windows)
    if len({len(value) for value in inputs.values()}) > 1:
        return Windows(source=[inputs])  # image patches: not to be cut
    document, mask = inputs.pop(DOCUMENT, None), inputs.get(MASK)
    if mask is not None and IDS in inputs and mask.shape == inputs[IDS].shape and bool(mask.all()):
        del inputs[MASK]  # nothing is padded: token ids alone
    return Windows(inputs, document=document)


def as_stream(ids: WindowsLike) -> Tensor | None:
    """Token ids (n,) where one stream of them was passed, as tensor, numpy array or list."""
    return _tensor(IDS, ids) if _is_window(_unpacked(ids)) else None


def _unpacked(value: Any) -> Any:
    """A column of windows as a list: of a dataset, a data frame, or a numpy array of arrays.

    Rows of a dataset, a dict for each window, become a dict of columns if all are equally long.
    """
    of_objects = str(getattr(value, "dtype", "")) == "object"
    sequence = isinstance(value, Sequence) and not isinstance(value, list | tuple | str | bytes)
    if of_objects or (sequence and len(value) and _is_window(value[0])):
        return list(value)
    if _is_list(value) and all(
        isinstance(row, Mapping) and _is_window(row.get(IDS)) for row in value
    ):
        names, lengths = {tuple(row) for row in value}, {len(row[IDS]) for row in value}
        if len(names) == len(lengths) == 1:
            return {name: [row[name] for row in value] for name in value[0]}
    return value


def _is_array(value: Any) -> bool:
    """A tensor, or a numpy array: anything else that knows its number of dimensions."""
    return hasattr(value, "ndim")


def _is_window(value: Any) -> bool:
    """Token ids of one window: one dimension, or a list of whole numbers."""
    if _is_array(value):
        return bool(value.ndim == 1)
    return _is_list(value) and all(type(v) is int for v in value)


def _is_windows(value: Any) -> bool:
    return _is_list(value) and _is_window(value[0])


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0


def _inputs(batch: Any) -> dict[str, Tensor]:
    """Model inputs of some windows, (windows, ...) each."""
    if _is_list(batch) and not _is_window(batch) and not _is_windows(batch):
        if any(getattr(other, "ndim", 0) > 1 for other in batch[1:]):
            raise ValueError(
                f"a batch has {len(batch)} tensors without names: give a dict, such as "
                "{'input_ids': ..., 'attention_mask': ...}"
            )
        batch = batch[0]  # labels follow
    named = dict(batch) if isinstance(batch, Mapping) else {IDS: batch}
    inputs = {name: _tensor(name, value) for name, value in named.items() if value is not None}
    if not inputs:
        raise ValueError(f"{EXPECTED}; got a dict without inputs")
    if IDS in inputs:
        if inputs[IDS].ndim == 1:  # one window
            inputs = {name: value[None] for name, value in inputs.items()}
        ids = inputs[IDS]
        if ids.ndim != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
            raise ValueError(
                f"{EXPECTED}; got {ids.dtype} of shape {tuple(ids.shape)} as token ids. Images and "
                "audio need the name of the model's argument: {'pixel_values': ...}"
            )
        inputs[IDS] = ids.long()
    if (number := inputs.get(DOCUMENT)) is not None:
        windows = len(next(value for name, value in inputs.items() if name != DOCUMENT))
        odd = number.is_floating_point() or number.shape != (windows,) or bool((number < 0).any())
        if odd or bool((number > MOST_DOCUMENTS).any()):
            raise ValueError(
                f"document numbers the documents of {windows} windows: whole numbers from 0, one for "
                f"each window; got {number.dtype} of shape {tuple(number.shape)}"
            )
    return inputs


def _tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    value = _unpacked(value)
    try:
        if _is_windows(value) and _is_array(value[0]):
            return torch.stack([torch.as_tensor(v) for v in value])
        return torch.tensor(value)  # a copy: numpy arrays may be read-only
    except (ValueError, TypeError, RuntimeError):
        unequal = _is_windows(value) and len({len(window) for window in value}) > 1
        cause = "windows of different lengths: pad them" if unequal else type(value).__name__
        raise ValueError(f"{EXPECTED}; {name} is {cause}") from None


# -- one forward, and the loop over all -----------------------------------------------------------


class StopForward(Exception):  # noqa: N818
    """Raised in a hook: the rest of this forward is not needed."""


class Forward:
    """Runs a model on model inputs: without its head, in eval mode, without gradients.

    Moves inputs to where the model runs. An encoder-decoder that is given one text reads it on both
    sides. Refuses bfloat16 where its products would end the process.
    """

    def __init__(self, model: nn.Module, *, head: bool = False) -> None:
        self.model, self.net = model, model if head else backbone(model)
        check_weights(model)
        self.device = device_of(model)
        bfloat16.check(next(model.parameters()).dtype, self.device)
        config: Any = getattr(model, "config", None)
        self.two_sided = bool(getattr(config, "is_encoder_decoder", False))
        self.options = call_options(self.net)

    def __call__(self, inputs: Mapping[str, Tensor]) -> Any:
        """The net's output; None after a StopForward."""
        if IDS in inputs:
            check_ids(self.model, inputs)
        here = {k: v.to(self.device) for k, v in inputs.items() if k != "labels"}
        if self.two_sided and IDS in here and not any(k.startswith("decoder_") for k in here):
            here["decoder_input_ids"] = here[IDS]
        # not inference mode: what a model in training caches, it must train with
        with torch.no_grad(), evaluating(self.model), suppress(StopForward):
            return self._reader(here)(**here, **self.options)

    def _reader(self, inputs: Mapping[str, Tensor]) -> nn.Module:
        """The model; of one with several towers, the only one that has inputs."""
        parts = [part for name, part in towers(self.net).items() if name in inputs]
        return parts[0] if len(parts) == 1 else self.net


def check_ids(model: nn.Module, inputs: Mapping[str, Tensor]) -> None:
    """ValueError for token ids that the model has no embedding for.

    Beside images or audio, ids may also name places that the model fills itself.
    """
    size, ids = getattr(token_embedding(model), "num_embeddings", None), inputs[IDS]
    if size is None or not ids.numel() or any(v.is_floating_point() for v in inputs.values()):
        return
    low, high = (int(v) for v in torch.aminmax(ids))
    if low < 0 or high >= size:
        raise ValueError(
            f"token id {low if low < 0 else high} is not in the vocabulary of "
            f"{type(model).__name__}, 0 to {size - 1}: is the tokenizer another model's?"
        )


def token_embedding(model: nn.Module) -> nn.Module | None:
    """The table of token embeddings, where the model has one; of a contrastive model its text tower's."""
    reader: Any = towers(backbone(model)).get("input_ids", model)
    try:
        table: nn.Module | None = reader.get_input_embeddings()
        return table
    except (AttributeError, NotImplementedError):
        return None


Receive = Callable[[Batch, Block, Rows], None]


def run_rows(
    model: nn.Module,
    windows: WindowsLike,
    receive: Receive,
    *,
    at: BlockNames = None,
    units: Mapping[int, Tensor | None] | None = None,
    work: Work | None = None,
    label: str = "",
) -> None:
    """Run the windows through the model: `receive(batch, block, rows)` once a batch and block.

    `at` and `units` are those of `tap`. Of several ranks each runs some of the batches. A forward
    ends when every block of `at` has run, except one, which runs to its end: `tap` refuses a
    block that runs twice. With a label, progress is reported in tokens.
    """
    work, text, forward = work or Work(), as_windows(windows), Forward(model)
    chosen = blocks(model, at)
    ran_once = _ran_once(forward, chosen, text)
    advance = work.begin(label, text.tokens) if label else None
    batch: Batch
    missing: set[Block] = set()

    def take(block: Block, rows: Rows) -> None:
        receive(batch, block, rows)
        missing.discard(block)
        if ran_once and not missing:
            raise StopForward

    with tap(model, take, at=chosen, units=units):
        for batch in text.batches(work.batch_size):
            if work.ranks.mine(batch.number):
                missing.update(chosen)
                forward(batch.inputs)
                ran_once = True
            if advance is not None:
                advance(batch.tokens)


def _ran_once(forward: Forward, at: Sequence[Block], text: Windows) -> bool:
    """Run one window to its end where that is shorter than to do so with the first batch."""
    ids = text.ids
    if ids is None or len(ids) < 2 or blocks(forward.model)[-1] in at:
        return False
    with tap(forward.model, lambda *_: None, at=at):
        forward({IDS: ids[:1]})
    return True
