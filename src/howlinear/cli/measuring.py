"""A profile from windows to a run folder: memory planned, progress shown, interruptions saved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import howlinear
from howlinear.cli.output import made_by
from howlinear.cli.progress import profile_bar, say
from howlinear.cli.sources import model_inputs, window_length
from howlinear.run import room

SMALLER = "lower --folds (2 at least) or measure fewer --blocks at a time"


def extent(net: Any, tokenizer: Any, at: Any, request: dict[str, Any]) -> tuple[int, int]:
    """Window length and number of tokens: those asked for, else those of the protocol."""
    from howlinear.models.corpus import default_tokens

    paper = request["protocol"] == "paper"
    length = window_length(net, tokenizer, request["max_length"] or (128 if paper else 512))
    tokens = 15_000 if paper else default_tokens(max(b.d_in for b in at))
    return length, request["tokens"] or tokens


def start_of(request: dict[str, Any]) -> str:
    """How windows begin (`--bos`). The paper's have no BOS."""
    paper = request["protocol"] == "paper" and request["bos"] == "auto"
    return "never" if paper else str(request["bos"])


@dataclass(frozen=True)
class Measurement:
    """A loaded model, its blocks to measure, what was asked for, and the processes that measure."""

    net: Any
    at: Any
    request: dict[str, Any]
    ranks: Any

    def run(
        self, ids: Any, folder: Path, text: Any, text_request: dict[str, Any], every: float
    ) -> Any:
        """Measure one text and write a run, or a shard of one; save every so many seconds."""
        from howlinear.models.loading import describe
        from howlinear.run.saving import Saves

        model = describe(self.net, self.request["model"], self.request["revision"])
        corpus = {"name": text.name, "part": text.parts[0], "fingerprint": text.fingerprint()}
        same = {"weights": model["weights"], "fingerprint": corpus["fingerprint"]}
        saves = Saves(
            folder,
            text_request | same | {"ranks": self.ranks.count, "howlinear": howlinear.__version__},
            every,
            self.ranks.rank,
        )
        self._check_same((*same.values(), ids.shape, int(ids.sum())))
        if saves.begun:
            say(f"resuming the interrupted profile in {folder}")
        saves.together, passes = self._plan(ids, folder, saves)
        try:
            result = self._measured(ids, saves, passes)
        except KeyboardInterrupt:
            if saves.begun:
                say(f"the same command resumes from the last save in {folder}")
            raise
        batch_size = self.request["batch_size"]
        result.settings.update(
            window=ids.shape[1], bos=start_of(self.request), batch_size=batch_size
        )
        result.about.update(model=model, **made_by(), corpus=corpus, asked=text_request)
        if self.ranks.rank == 0:
            result.save(folder)
        saves.close()
        return result

    def _check_same(self, values: tuple[Any, ...]) -> None:
        if any(other != values for other in self.ranks.gather(values)):
            raise ValueError(
                "the processes read different texts or models: start all with the same flags"
            )

    def _measured(self, ids: Any, saves: Any, passes: int) -> Any:
        """The profile, or the moments of a shard."""
        from howlinear.profiling.gathering import Scope
        from howlinear.profiling.passes import Course
        from howlinear.profiling.profiler import profile
        from howlinear.profiling.shards import profile_shard

        windows = model_inputs(self.net, ids, self.request["batch_size"])
        names = ("solver", "precision", "seed", "batch_size", "layerwise")
        options = {name: self.request[name] for name in names}
        part, parts = self.request["shard"]
        scope = Scope(*(self.request[name] for name in ("folds", "protocol", "experts")))
        tokens = passes * -(-ids.numel() // (parts * self.ranks.count))
        with profile_bar(tokens) as advance:
            course = Course(
                ranks=self.ranks,
                progress=lambda label, tokens: advance,
                shard=(part, parts),
                together=saves.together,
                saves=saves,
                **options,
            )
            if parts > 1:
                return profile_shard(self.net, windows, at=self.at, scope=scope, course=course)
            return profile(self.net, windows, at=self.at, course=course, **vars(scope))

    def _plan(self, ids: Any, folder: Path, saves: Any) -> tuple[int | None, int]:
        """Report what the profile takes and refuse too much.

        How many blocks fit into memory at a time (None: all), and how often each window is run.
        """
        from howlinear.profiling.gathering import with_experts
        from howlinear.profiling.needs import most_together, profile_needs

        solver, folds, layerwise = (self.request[k] for k in ("solver", "folds", "layerwise"))
        every, free = (
            with_experts(self.net, self.at, self.request["experts"]),
            room.available_memory(),
        )
        windows = -(-len(ids) // (self.request["shard"][1] * self.ranks.count))
        most: int | None = len(every)
        if free is not None and not layerwise:
            most = most_together(every, windows, folds, solver, free)
        if saves.begun:  # in the same groups as before the interruption
            most = saves.together or len(every)
        most = min(self.ranks.gather(most or 0)) or None  # all ranks read the same groups
        cost = profile_needs(
            self.net,
            every,
            windows=windows,
            length=ids.shape[1],
            batch_size=self.request["batch_size"],
            folds=folds,
            solver=solver,
            together=most or 1,
            layerwise=layerwise,
        )
        if windows < len(ids):
            say(f"{ids.numel()} tokens in all; here and of each process:")
        for line in cost.lines():
            say(line)
        check_room(cost.moments, cost.disk, folder)
        if most is None or most >= len(every):
            return None, cost.walks
        say(f"moments of all {len(every)} blocks do not fit into memory: {most} at a time")
        return most, cost.walks


def check_room(memory: int, disk: int, out: Path) -> None:
    """Refuse a profile that memory or disk cannot hold, before it starts."""
    room.check_memory(memory, "moments need", SMALLER)
    room.check_disk(disk, "the run needs", out, f"{SMALLER}, or name another place with -o")
