#!/usr/bin/env python3
"""Try changed files in forked processes, and keep those that crash, hang, leak or are read wrongly.

    python scripts/fuzz [--target hdf5 …] [--seconds 60] [--seed 0] [--keep DIR]
    python scripts/fuzz --replay DIR/hdf5-wrong-0-417 …

Each case runs with a limit of time and memory. A find is tried again by itself, reduced, and kept with its seed, at
most five of a kind and place.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"):
    os.environ[_name] = "1"  # a process with threads cannot be forked safely
os.environ.update(CUDA_VISIBLE_DEVICES="-1", TF_CPP_MIN_LOG_LEVEL="3")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from cases import FINDS, Case, Target  # noqa: E402
from codec_target import CodecTarget  # noqa: E402
from hdf5_targets import IndexTarget, WholeTarget  # noqa: E402
from links_target import LinksTarget  # noqa: E402
from remote_target import RemoteTarget  # noqa: E402
from resume_target import ResumeTarget  # noqa: E402
from running import Runner, Tried, draw_of, lay_out_secrets  # noqa: E402

TARGETS: dict[str, type[Target]] = {
    target.name: target for target in (WholeTarget, IndexTarget, CodecTarget, LinksTarget, RemoteTarget, ResumeTarget)
}
KEPT_OF_A_KIND = 5


class Finds:
    """Confirmed finds of one target, a few of each kind and place."""

    def __init__(self, folder: Path | None, target: Target, seed: int) -> None:
        self._folder, self._target, self._seed = folder, target, seed
        self._seen: Counter[str] = Counter()
        self._kinds: dict[str, str] = {}

    def take(self, find: Tried, number: int, runner: Runner) -> str:
        """Confirm and keep a find if it is one of the first of its kind and place, and return its kind."""
        place = f"{find.verdict.kind}: {re.sub('0x[0-9a-f]+|[0-9]+', '0', find.verdict.detail)[:120]}"
        if self._seen[place] < KEPT_OF_A_KIND:
            self._seen[place] += 1
            confirmed = runner.confirmed(find)
            if confirmed is None:
                self._keep(find, number)
                return f"{find.verdict.kind}, not repeated"
            self._kinds[place] = confirmed.verdict.kind
            if confirmed.verdict.kind in FINDS:
                self._keep(confirmed, number)
        return self._kinds.get(place, find.verdict.kind)

    def _keep(self, find: Tried, number: int) -> None:
        """Write the files of a find and the description for a replay."""
        name = f"{self._target.name}-{find.verdict.kind}-{self._seed}-{number}"
        print(f"{name}: {find.stage}: {find.verdict.detail[:300]}", file=sys.stderr, flush=True)
        if self._folder is None:
            return
        folder = self._folder / name
        shutil.rmtree(folder, ignore_errors=True)
        for file, data in find.case.files.items():
            (folder / "files" / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / "files" / file).write_bytes(data)
        folder.mkdir(parents=True, exist_ok=True)
        story = {
            "target": self._target.name, "kind": find.verdict.kind, "detail": find.verdict.detail, "stage": find.stage,
            "note": find.case.note, "commands": find.case.commands, "options": find.case.options,
        }  # fmt: skip
        (folder / "case.json").write_text(json.dumps(story, indent=1) + "\n")


def run(target: Target, folder: Path, seconds: float, seed: int, keep: Path | None) -> dict[str, Any]:
    """Try cases of a target until the time is over and return counts of outcomes."""
    ends = time.monotonic() + seconds
    runner, outcomes, finds, number = Runner(target, folder), Counter[str](), Finds(keep, target, seed), 0
    while time.monotonic() < ends:
        cases = [target.make(draw_of(target.name, seed, number + offset)) for offset in range(target.batch)]
        for offset, tried in enumerate(list(runner.tried(cases))):
            kind = tried.verdict.kind
            outcomes[finds.take(tried, number + offset, runner) if kind in FINDS else kind] += 1
        number += len(cases)
    return {"seed": seed, "cases": number, "outcomes": dict(sorted(outcomes.items()))}


def replay(folders: list[Path]) -> int:
    """Try kept cases again and return the number of those that are still finds."""
    still = 0
    for folder in folders:
        story = json.loads((folder / "case.json").read_text())
        inside = folder / "files"
        files = {str(path.relative_to(inside)): path.read_bytes() for path in inside.rglob("*") if path.is_file()}
        case = Case(files, tuple(map(tuple, story["commands"])), {}, story["note"], story["options"])
        with prepared(story["target"]) as (target, work):
            tried = Runner(target, work).alone(case)
        still += tried.verdict.kind in FINDS
        print(f"{folder.name}: {tried.verdict.kind}: {tried.stage}: {tried.verdict.detail[:400]}", flush=True)
    return still


@contextlib.contextmanager
def prepared(name: str) -> Iterator[tuple[Target, Path]]:
    """Yield a prepared target and its temporary working folder."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=memory if os.access(memory, os.W_OK) else None))
    target = TARGETS[name]()
    try:
        lay_out_secrets(folder)
        os.chdir(folder)
        target.prepare(folder)
        gc.collect()
        gc.freeze()
        yield target, folder
    finally:
        os.chdir(ROOT)
        shutil.rmtree(folder, ignore_errors=True)


def _absolute(path: str) -> Path:
    return Path(path).absolute()


def main() -> int:
    """Return 1 if there were finds."""
    parser = argparse.ArgumentParser("scripts/fuzz", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--target", action="append", choices=sorted(TARGETS), help="input to fuzz; may be repeated. Defaults to all"
    )
    parser.add_argument("--seconds", type=float, default=60, help="time for each target. Defaults to 60")
    parser.add_argument("--seed", type=int, default=0, help="seed of the cases. Defaults to 0")
    parser.add_argument("--keep", type=_absolute, metavar="DIR", help="folder for finds. Defaults to keeping none")
    parser.add_argument("--replay", type=_absolute, nargs="+", metavar="FOLDER", help="try kept finds again")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves nothing behind
    if options.replay:
        return int(replay(options.replay) > 0)
    results = {}
    for name in options.target or sorted(TARGETS):
        with prepared(name) as (target, folder):
            results[name] = run(target, folder, options.seconds, options.seed, options.keep)
    print(json.dumps(results, indent=1))
    return int(any(kind in FINDS for result in results.values() for kind in result["outcomes"]))


if __name__ == "__main__":
    sys.exit(main())
