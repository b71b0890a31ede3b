#!/usr/bin/env python3
"""Compare estimates for named cards with public readings of real GPUs: `gpu_facts.csv`, one reading a line.

    python scripts/bench/gpu_facts.py [--only TEXT] [--seconds 900]

A reading says that a batch size trained ("fits"), that it ran out of memory ("oom"), or the peak that a profiler saw
("peak_bytes"). `why` says why the network compares with one that Keras 3 builds, `limit_mib` is the allocator's limit
in the log of that run (the catalogue's if there is none), and `reason` explains a disagreement. The readings of one
network are estimated in graph mode by one process with a time limit.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common import MIB, environment, read_results, run_python, write_results

Fact = dict[str, Any]
FACTS = Path(__file__).with_suffix(".csv")
NETWORK = ("model", "policy", "optimizer")
STEP = (*NETWORK, "card", "batch")


def wide_resnet() -> Any:
    """Build WRN-28-10 for images of 32 × 32."""
    import keras
    from keras import layers

    x = inputs = keras.Input((32, 32, 3))
    x = layers.Conv2D(16, 3, padding="same", use_bias=False)(x)
    for width, block in itertools.product((160, 320, 640), range(4)):
        strides = 2 if width > 160 and block == 0 else 1
        y = layers.ReLU()(layers.BatchNormalization()(x))
        if block == 0:
            x = layers.Conv2D(width, 1, strides, use_bias=False)(y)
        y = layers.Conv2D(width, 3, strides, padding="same", use_bias=False)(y)
        y = layers.ReLU()(layers.BatchNormalization()(y))
        x = x + layers.Conv2D(width, 3, padding="same", use_bias=False)(y)
    x = layers.GlobalAveragePooling2D()(layers.ReLU()(layers.BatchNormalization()(x)))
    return keras.Model(inputs, layers.Dense(10, activation="softmax")(x))


def efficientnet_v2s() -> Any:
    from keras.applications import EfficientNetV2S

    return EfficientNetV2S(weights=None, input_shape=(300, 300, 3))


def frozen(application: str) -> Any:
    """Build a frozen network with a new head."""
    import keras

    base = getattr(keras.applications, application)(weights=None, include_top=False, input_shape=(299, 299, 3))
    base.trainable = False
    head = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10, activation="softmax")]
    return keras.Sequential([keras.Input((299, 299, 3)), base, *head])


def frozen_inception() -> Any:
    return frozen("InceptionV3")


def frozen_mobilenet() -> Any:
    return frozen("MobileNetV2")


def estimates(facts: list[Fact]) -> list[dict[str, int]]:
    """Estimate the steps of one network, each on its card."""
    from kerasmem.estimation.estimating import EstimateSession
    from kerasmem.models.spec import StepSpec

    model, policy, optimizer = (facts[0][name] for name in NETWORK)
    spec = StepSpec(
        model if ":" in model else f"{__file__}:{model}",
        method="graph", dtype_policy=policy, optimizer=optimizer, loss="sparse_categorical_crossentropy",
    )  # fmt: skip
    rows = []
    with EstimateSession(spec) as session:
        for fact in facts:
            report = session.estimate(batch_size=int(fact["batch"]), device=fact["card"])
            assert report.device is not None
            sizes = {name: getattr(report.bytes, name) for name in ("total", "low", "most_needed", "high")}
            rows.append({**sizes, "available": report.device.available_bytes})
    return rows


def compare(fact: Fact, sizes: dict[str, int]) -> Fact:
    """Add the estimate to a reading, and whether the two agree."""
    from kerasmem.devices.catalogue import find_card
    from kerasmem.estimation.report import DOES_NOT_FIT, FITS, TOO_CLOSE, interval_verdict

    limit, own = sizes["available"], int(fact["limit_mib"] or 0) * MIB
    limits = (own, own) if own else find_card(fact["card"]).limits
    if fact["fact"] == "peak_bytes":
        agreement = "yes" if sizes["low"] <= int(fact["value"]) <= sizes["high"] else "no"
    else:
        agreement = {{"fits": FITS, "oom": DOES_NOT_FIT}[fact["fact"]]: "yes", TOO_CLOSE: "too close"}.get(
            interval_verdict(sizes["low"], sizes["most_needed"], *limits), "no"
        )
    return {**fact, "sizes": sizes, "limit": own or limit, "agreement": agreement}


def values(fact: Fact, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(fact[name] for name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="estimate readings whose line contains TEXT", metavar="TEXT")
    parser.add_argument("--seconds", type=float, default=900.0, help="time limit of a network. Defaults to 900")
    parser.add_argument("--estimate", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.estimate:
        print(json.dumps(estimates(options.estimate)))
        return
    with FACTS.open(newline="") as file:
        facts = list(csv.DictReader(file))
    data = read_results("gpu_facts")
    sizes = {values(row, STEP): row["sizes"] for row in data.get("rows", ())}
    failures = data.get("failures", {})
    networks: dict[tuple[str, ...], list[Fact]] = {}
    for fact in facts:
        if options.only in ",".join(fact.values()):
            networks.setdefault(values(fact, NETWORK), []).append(fact)
    for network, members in networks.items():
        ended = run_python(__file__, "--estimate", json.dumps(members), environ={}, timeout=options.seconds)
        failures.pop(" ".join(network), None)
        if ended.code == 0:
            sizes |= {values(fact, STEP): row for fact, row in zip(members, ended.answer, strict=True)}
        else:
            failures[" ".join(network)] = ended.error[-500:]
        rows = [compare(fact, sizes[values(fact, STEP)]) for fact in facts if values(fact, STEP) in sizes]
        head = environment("tensorflow", "keras")
        write_results("gpu_facts", {"environment": head, "failures": failures, "rows": rows})


if __name__ == "__main__":
    main()
