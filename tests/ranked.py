"""What several ranks do together, for test_ranks: `ranked.py OUT COUNT ARGS`, or in one process.

Before that, two ranks run the command with ARGS, and the second is killed. Ranks are forks of one
process, with the environment that torchrun gives: its imports take longer than the work.
"""

import json
import multiprocessing
import os
import socket
import sys
from pathlib import Path

import torch

import tiny
from howlinear import blocks, profile
from howlinear.cli import app
from howlinear.compression.compress import compress_model
from howlinear.compression.plan import Budget
from howlinear.controls.cross_feed import cross_feed
from howlinear.controls.matched import matched
from howlinear.controls.random_init import random_init
from howlinear.losses.sweeps import map_errors
from howlinear.profiling.passes import Course
from howlinear.records.files import clean
from howlinear.run.saving import Saves
from howlinear.run.work import Ranks, Work
from howlinear.swapping.swaps import SwapOptions, measure_swaps

LENGTH = 32


def ids(windows, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, tiny.VOCABULARY, (windows, LENGTH), generator=g)


def everything(ranks, folder):
    """One number after another, by name. Three ranks have 4, 4 and 3 batches."""
    torch.manual_seed(0)
    model, other = tiny.model("llama"), tiny.model("gpt2")
    windows, found = ids(75, 0), {}
    for solver in ("moments", "tsqr"):
        run = folder / solver
        saves = Saves(run, {}, 1e9, ranks.rank)
        course = Course(ranks=ranks, together=2, saves=saves, solver=solver)
        result = profile(model, windows, batch_size=7, course=course)
        found[solver] = [b.to_dict() for b in result.blocks]
        if ranks.rank == 0:
            result.save(run)
            found[f"{solver}-maps"] = [m.weight.tolist() for m in result.maps.values()]
        ranks.share(None)  # the run is there
    held = {"choose": ids(9, 1), "report": ids(13, 2)}
    for weighting in ("none", "stream"):
        swaps = measure_swaps(
            model,
            folder / "moments",
            **held,
            fit=windows,
            options=SwapOptions(weighting=weighting, positions=4),
            work=Work(ranks, batch_size=2),
        )
        found[f"swap-{weighting}"] = swaps.to_dict()
    batches = windows.split(7)
    maps = [(b, result_map(b)) for b in blocks(model)]
    errors = map_errors(model, maps, batches, Work(ranks))
    small = compress_model(
        model, folder / "moments", Budget(parameters=0.2), fit=windows, **held, work=Work(ranks, 7)
    )
    found["compress"] = small.to_dict() | {"maps": [str(m) for m in small.maps.values()]}
    found["errors"] = [[e.cosine, e.rmse, e.stream_error] for e in errors]
    work = Work(ranks, batch_size=7)
    found["random"] = random_init(model, windows, seeds=1, work=work).to_dict()
    found["matched"] = matched(model, windows, work=work).to_dict()
    crossed = cross_feed(model, other, windows, windows, pairs="0:1,2:0", work=work)
    found["cross"] = crossed.to_dict()
    return clean(found)


def result_map(block):
    return lambda x: 0.5 * x[..., : block.d_out]


def like_torchrun(rank, count, port):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "TORCHELASTIC_RUN_ID": "x"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def together(rank, count, port, folder):
    like_torchrun(rank, count, port)
    here = Ranks.start()
    assert (here.rank, here.count) == (rank, count)
    told = everything(here, folder)
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(told))
    here.stop()


def command(rank, count, port, said, args):
    """The last rank reads window by window, so that it is not done too soon."""
    like_torchrun(rank, count, port)
    os.dup2(said[rank], 2)
    for end in said:
        os.close(end)
    sys.argv = ["howlinear", *args, "--batch-size", "1" if rank else "128"]
    app.main()


def started(target, count, *args):
    """The ranks of one job, as forks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=target, args=(r, count, port, *args)) for r in range(count)]
    for process in ranks:
        process.start()
    return ranks


def bereaved(args):
    """What the first of two ranks says whose peer is killed, and its exit code."""
    heard, *said = os.pipe()
    said.append(os.open(os.devnull, os.O_WRONLY))
    first, second = started(command, 2, said, args)
    for end in said:
        os.close(end)
    with open(heard) as lines:
        for line in lines:
            if "tokens to run" in line:
                break
        second.kill()
        told = lines.read()
    first.join(60)
    return {"said": told, "code": first.exitcode}


def main(folder, count, args):
    tiny.model("llama"), tiny.model("gpt2")  # imported before the fork
    (folder / "bereaved.json").write_text(json.dumps(bereaved(args)))
    ranks = started(together, count, folder)
    for process in ranks:
        process.join()
    return max(abs(process.exitcode) for process in ranks)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
