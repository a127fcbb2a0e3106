"""What the documentation says is what the code does: examples run, fields are all listed."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from howlinear.records import (
    KINDS,
    SAFETY,
    BlockCompression,
    BlockExpert,
    BlockPlan,
    BlockProbe,
    BlockProfile,
    BlockSwap,
    ExpertSwap,
    kind_of,
    safety_of,
)

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_readme_commands_exist():
    from typer.testing import CliRunner

    from howlinear.cli import app

    lines = re.findall(r"^howlinear (control [\w-]+|\w+) (.*?)(?:#.*)?$", README, re.M)
    kinds = {f"control {kind}" for kind in ("random-init", "cross-feed", "matched", "checkpoints")}
    plain = {"profile", "swap", "probe", "compress", "bench", "compare", "merge"}
    assert {command for command, _ in lines} == plain | kinds
    for command, rest in lines:
        known = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "200"}).output
        assert all(flag in known for flag in re.findall(r"(?<!\S)--?[a-z-]+", rest)), rest


def test_every_field_and_kind_is_documented():
    text = (ROOT / "docs" / "fields.md").read_text()
    records = (BlockProfile, BlockSwap, BlockProbe, BlockPlan, BlockCompression)
    records += (BlockExpert, ExpertSwap)
    assert all(f"`{f.name}`" in text for record in records for f in fields(record))
    assert all(word in text for word in (*KINDS, *SAFETY))


@pytest.mark.parametrize(
    ("numbers", "kind"),
    [  # r2, r2_body, median feature, first_share, effective rank / d_out
        ((0.98, 0.38, 0.8, 0.93, 0.002), "first-position only"),
        ((0.88, 0.88, 0.74, 0.0, 0.25), "broadly linear"),
        ((0.93, 0.91, 0.84, 0.3, 0.01), "broadly linear"),
        ((0.77, 0.73, 0.37, 0.2, 0.1), "outlier-concentrated"),
        ((0.77, 0.73, 0.45, 0.2, 0.002), "outlier-concentrated"),
        ((0.55, 0.55, 0.50, 0.0, 0.3), "partly linear"),
        ((0.35, 0.35, 0.30, 0.0, 0.3), "nonlinear"),
        ((-0.1, -0.1, -0.1, 0.0, float("inf")), "nonlinear"),
        ((0.99, float("nan"), 0.9, 1.0, 0.3), "broadly linear"),
    ],
)
def test_kinds_follow_the_documented_rules(numbers, kind):
    assert kind_of(*numbers) == kind
    assert kind in KINDS


@pytest.mark.parametrize(
    ("numbers", "safety"),
    [  # swap_signal, first_share, sink_shares
        ((0.02, 0.0, [0.1, 0.1]), "likely safe"),
        ((0.02, 0.9, [0.9, 0.1]), "likely safe"),
        ((0.03, 0.9, [0.9, 0.1]), "some cost"),
        ((0.1, 0.0, [0.1, 0.1]), "costly"),
        ((3.0, 0.9, [0.9, 0.1]), "sink"),
        ((3.0, 0.9, None), "costly"),
        ((3.0, 0.3, [0.9, 0.1]), "costly"),
        ((3.0, 0.9, [0.1, 0.1]), "costly"),
        ((None, 0.9, [0.9]), "unknown"),
        ((float("nan"), 0.9, [0.9]), "unknown"),
    ],
)
def test_safety_follows_the_documented_rules(numbers, safety):
    assert safety_of(*numbers) == safety
    assert safety in SAFETY
