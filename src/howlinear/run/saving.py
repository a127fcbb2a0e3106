"""Saves of a profile under way: what it resumes from when it is interrupted.

    saves = Saves(folder, asked, every=600)     # seconds between saves
    begun = saves.resume(stores)                # batches that are in the stores already
    saves.tick(stores, done)                    # writes the stores when a save is due
    saves.finish(store)                         # a block has seen all rows: its moments are final
    saves.close()                               # the run is complete

A save is a folder of its own in `partial/`, complete when its pass.json is there; the older save is
removed when the newer one is complete. progress.json says what was asked for and which blocks are
done.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from howlinear.linear.stores import BlockStore, name_of
from howlinear.records.files import SCHEMA, clean, read_json, write_json
from howlinear.run.folder import RunFolder
from howlinear.run.tensors import fill_store, save_moments

FIRST = 60.0  # seconds until the first save, where saves are further apart


class Saves:
    """What is on disk of a profile under way.

    `asked` is what must be the same to resume: an unfinished profile of something else in the folder
    is refused with what differs. `every` is in seconds. Each rank saves its own part of the pass;
    rank 0 finishes blocks. A run that is in the folder already is refused, or with `overwrite`
    removed, with all that was derived from it, when the first block is finished.
    """

    def __init__(
        self,
        folder: str | Path,
        asked: Mapping[str, Any],
        every: float,
        rank: int = 0,
        overwrite: bool = False,
    ) -> None:
        self.run, self.every, self.rank = RunFolder(folder), every, rank
        self.asked, self.done = dict(asked), set[str]()
        self._last, self._saved = time.monotonic(), False
        self.together: int | None = None  # blocks at a time, as the pass began
        self.overwrite = overwrite
        if rank == 0:
            for name in (".", "moments", "maps"):  # left by writes that were interrupted
                for path in (self.folder / name).glob(".*.tmp"):
                    path.unlink(missing_ok=True)
        if self.begun:
            before = self.run.read("progress")
            self.run.check_resumable(before.get("asked"), self.asked)
            done, together = before.get("done"), before.get("together")
            self.together = together if type(together) is int and together > 0 else None
            self.done = {n for n in done if isinstance(n, str)} if isinstance(done, list) else set()
            self.overwrite = overwrite or before.get("overwrite") is True
        elif rank == 0 and not overwrite:
            self.run.check_unmeasured()

    @property
    def folder(self) -> Path:
        return self.run.folder

    @property
    def begun(self) -> bool:
        """Is there an unfinished profile to resume?"""
        return self.run.has("progress")

    @property
    def partial(self) -> Path:
        """This rank's folder for saves, removed when the run is complete."""
        return self.folder / "partial" / str(self.rank)

    @property
    def due(self) -> bool:
        """Have `every` seconds passed since the last save? The first one comes after a minute."""
        wait = self.every if self._saved else min(self.every, FIRST)
        return time.monotonic() - self._last >= wait

    def _write_progress(self) -> None:
        about = {"kind": "progress", "schema": SCHEMA, "asked": self.asked}
        about |= {"together": self.together, "overwrite": self.overwrite}
        self.run.write({**about, "done": sorted(self.done)})

    def resume(self, stores: Sequence[BlockStore]) -> int:
        """Fill fresh stores from the last save of a pass over the same blocks; batches done."""
        paths = [store.block.path for store in stores]
        for save, about in self._complete():
            # a rank may have saved before rank 0 wrote progress.json: compare the request again
            if about.get("blocks") == paths and about.get("asked") == clean(self.asked):
                for store in stores:
                    fill_store(save, store)
                return int(about["batches"])
        return 0

    def tick(self, stores: Sequence[BlockStore], batches: int) -> bool:
        """Write the stores, which hold so many batches, if a save is due."""
        if not self.due:
            return False
        if not self.begun and self.rank == 0:
            self._write_progress()
        older = [save for save, _ in self._complete()]
        save = self.partial / str(batches)
        if save in older:
            return False
        shutil.rmtree(save, ignore_errors=True)  # half of a save that was interrupted
        for store in stores:
            save_moments(save, store)
        paths = [store.block.path for store in stores]
        about = {"kind": "pass", "schema": SCHEMA, "asked": self.asked, "batches": batches}
        write_json(save / "pass.json", {**about, "blocks": paths})
        for old in older:
            (old / "pass.json").unlink(missing_ok=True)  # first: half a save must not look complete
            shutil.rmtree(old, ignore_errors=True)
        self._last, self._saved = time.monotonic(), True
        return True

    def finish(self, store: BlockStore) -> None:
        """A block has seen all rows: write its moments. The first one removes a run to overwrite."""
        if not self.done:
            self._write_progress()
            if self.overwrite:
                self.run.remove_results()
        save_moments(self.folder, store)
        self.done.add(name_of(store.block))
        self._write_progress()

    def close(self) -> None:
        """The run is complete: each rank removes its saves, rank 0 whatever is left."""
        shutil.rmtree(self.partial, ignore_errors=True)
        if self.rank == 0:
            self.run.remove_progress()

    def _complete(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Complete saves of this rank, the latest first."""
        folders = self.partial.iterdir() if self.partial.is_dir() else ()
        numbered = [save for save in folders if save.name.isdecimal()]
        for save in sorted(numbered, key=lambda save: -int(save.name)):
            with suppress(ValueError):
                about = read_json(save / "pass.json", "pass")
                if type(about.get("batches")) is int:
                    yield save, about
