"""The table of a profile: complete, adding up, and safe to print."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kerasmem.models.op_names import Instant
from kerasmem.models.sizes import ModelFacts
from kerasmem.profiling.results import (
    LiveChunk,
    PeakBytes,
    PeakShare,
    ProfiledLayer,
    ProfileSettings,
    StepProfile,
    TimelinePoint,
)
from kerasmem.rendering.estimate_tables import profile_table
from kerasmem.rendering.formatting import plain_text

MIB = 2**20


def profiled(name, kind, shape, parameters, elements, size, parts):
    return ProfiledLayer(
        name=name, class_name=kind, output_shape=shape, parameters=parameters, activation_elements=elements,
        bytes_at_peak=size, parts=parts,
    )  # fmt: skip


@pytest.fixture
def profile():
    layers = [
        profiled(f"dense_{number}", "Dense", (None, 8), 100, 8, number * MIB, {"activations": number * MIB})
        for number in range(1, 6)
    ]
    layers.append(profiled("evil\x1b[2J", "Layer", None, 0, None, 5 * MIB, {"weights": 5 * MIB}))
    return StepProfile(
        ModelFacts("net\x1b[1m", "m.keras", 6, 600, 600),
        ProfileSettings(32, "adam", "mse", "float32", "train", "graph", None),
        PeakBytes(24 * MIB, 20 * MIB, 25 * MIB, 5 * MIB, 0, 0, 15 * MIB, 0, 0, 3 * MIB, MIB),
        tuple(layers),
        (PeakShare("waste in chunks", 3 * MIB), PeakShare("not known", MIB)),
        Instant("while computing dense_5", "net/dense_5/MatMul", "dense_5", "forward"),
        tuple(TimelinePoint(float(time), time * MIB, "") for time in (1, 24, 2)),
        (LiveChunk(6 * MIB, 5 * MIB, "weights", "evil\x1b[2J", "x/kernel\x1b", "[8,8]"),),
        12,
        MIB,
        21 * MIB,
        99,
        ("a note",),
        ({"what": "something", "why": "a reason", "bytes": None},),
    )


def test_notes_are_shown_and_names_steer_nothing(profile):
    text = plain_text(profile_table(profile))
    assert "Not seen: something: a reason." in text and "Note: a note." in text
    assert "\x1b" not in text


def test_the_largest_come_first(profile):
    text = plain_text(profile_table(profile, top=2))
    assert text.index("dense_5 (Dense)") < text.index("4 more layers")
    assert "dense_1" not in text


@pytest.mark.parametrize("width", [80, 200])
def test_it_fits_the_terminal(profile, width):
    buffer = io.StringIO()
    Console(file=buffer, width=width, force_terminal=False, emoji=False, markup=False).print(
        profile_table(profile, width)
    )
    lines = buffer.getvalue().splitlines()
    assert max(len(line) for line in lines) <= width
    assert "dense_5" in buffer.getvalue()
