#!/usr/bin/env python3
"""Try doors of kerasmem with changed files: what crashes, hangs, leaks or is silently wrong is kept as a file.

    python scripts/fuzz --door hdf5 [--door codecs] [--seconds 60] [--seed 0] [--keep DIR] [--turns DIR] [--record]
    python scripts/fuzz --replay DIR/hdf5-wrong-0-417 …

Each case is tried in a forked process with a limit of time and memory. A find is tried once more by itself, made
smaller, and kept with its seed, five of a kind and place at most. --record puts the counts into
scripts/bench/results/fuzz.json, beside those of other seeds.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"):
    os.environ[_name] = "1"  # a process with threads cannot be forked safely
os.environ.update(CUDA_VISIBLE_DEVICES="-1", TF_CPP_MIN_LOG_LEVEL="3")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

from common import RESULTS, ROOT, environment, write_results  # noqa: E402

sys.path.insert(0, str(ROOT))

from cases import FINDS, Case, Door  # noqa: E402
from doors import DOORS  # noqa: E402
from running import Runner, Tried, draw_of, lay_out_secrets  # noqa: E402

_KEPT_OF_A_KIND = 5
_TURN, _REST = 8.0, 1.0  # seconds; whoever rests lets another one have the next turn
_BUSY = 3.0  # processes that want to run, on average of a minute


class Finds:
    """Finds kept in a folder: a few of each kind and place.

    Args:
        folder: where; None for nowhere.
        door: of the finds.
        seed: of the cases.
    """

    def __init__(self, folder: Path | None, door: Door, seed: int) -> None:
        self._folder, self._door, self._seed = folder, door, seed
        self._seen: Counter[str] = Counter()
        self._kinds: dict[str, str] = {}
        self.places: dict[str, set[str]] = defaultdict(set)

    def take(self, found: Tried, number: int, runner: Runner) -> str:
        """Look at a find, keep it where it is one of the first of its kind and place, and return what it counts as."""
        place = self._place(found)
        if self._seen[place] < _KEPT_OF_A_KIND:
            self._seen[place] += 1
            confirmed = runner.confirmed(found)
            if confirmed is None:
                self.keep(found, number)
                return f"{found.verdict.kind}, not repeated"
            self._kinds[place] = confirmed.verdict.kind
            if confirmed.verdict.kind in FINDS:
                self.keep(confirmed, number)
        kind = self._kinds.get(place, found.verdict.kind)
        if kind in FINDS:
            self.places[kind].add(place)
        return kind

    def keep(self, found: Tried, number: int) -> None:
        """Write a find's files, and what is needed to try it again."""
        name = f"{self._door.name}-{found.verdict.kind}-{self._seed}-{number}"
        print(f"{name}: {found.stage}: {found.verdict.detail[:300]}", file=sys.stderr, flush=True)
        if self._folder is None:
            return
        folder = self._folder / name
        shutil.rmtree(folder, ignore_errors=True)
        for file, data in found.case.files.items():
            (folder / "files" / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / "files" / file).write_bytes(data)
        folder.mkdir(parents=True, exist_ok=True)
        story: dict[str, Any] = {"door": self._door.name, "seed": self._seed, "number": number, "stage": found.stage}
        story |= {"kind": found.verdict.kind, "detail": found.verdict.detail, "note": found.case.note}
        story |= {"commands": found.case.commands, "options": found.case.options}
        (folder / "case.json").write_text(json.dumps(story, indent=1) + "\n")

    def _place(self, found: Tried) -> str:
        filters = re.match(r"filters [0-9+]*", found.verdict.detail)
        rest = found.verdict.detail[filters.end() if filters else 0 :]
        return f"{found.verdict.kind}: {filters[0] if filters else ''}{re.sub('0x[0-9a-f]+|[0-9]+', '0', rest)[:120]}"


def run(
    door: Door, folder: Path, seconds: float, seed: int, keep: Path | None, turns: Path | None = None
) -> dict[str, Any]:
    """Try cases of a door for so long; return counts."""
    began = time.monotonic()
    runner, outcomes, finds, number = Runner(door, folder), Counter[str](), Finds(keep, door, seed), 0
    active = 0.0
    while time.monotonic() - began < seconds:
        with turn(turns):
            started = time.monotonic()
            while (now := time.monotonic()) - started < _TURN and now - began < seconds:
                cases = [door.make(draw_of(door.name, seed, number + each)) for each in range(door.batch)]
                for each, tried in enumerate(list(runner.tried(cases))):
                    kind = tried.verdict.kind
                    outcomes[finds.take(tried, number + each, runner) if kind in FINDS else kind] += 1
                number += len(cases)
            active += time.monotonic() - started
        time.sleep(0 if turns is None else _REST)
    return {
        "seed": seed, "seconds": round(time.monotonic() - began, 1), "active_seconds": round(active, 1),
        "cases": number,
        "outcomes": dict(sorted(outcomes.items())),
        "finds": {kind: len(places) for kind, places in sorted(finds.places.items())},
    }  # fmt: skip


@contextlib.contextmanager
def turn(folder: Path | None) -> Iterator[None]:
    """Wait until fewer than two others that name the same folder are at work; fewer than one on a busy machine."""
    if folder is None:
        yield
        return
    folder.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        places = [stack.enter_context(open(folder / name, "w")) for name in ("first", "second")]
        while True:
            for place in places[: 1 if os.getloadavg()[0] >= _BUSY else 2]:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    yield
                    return
            time.sleep(random.uniform(0.05, 0.3))


def record(name: str, counts: dict[str, Any], packages: tuple[str, ...]) -> None:
    """Put a door's counts among the results, in place of those of the same seed."""
    folder = os.open(RESULTS, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        path = RESULTS / "fuzz.json"
        data = json.loads(path.read_text()) if path.exists() else {"doors": {}}
        counts["versions"] = environment(*packages)
        data["doors"][name] = [*(run for run in data["doors"].get(name, []) if run["seed"] != counts["seed"]), counts]
        data["doors"] = dict(sorted(data["doors"].items()))
        write_results("fuzz", data)
    finally:
        os.close(folder)


def replay(folders: list[Path]) -> int:
    """Try kept cases again; return how many are still finds."""
    stories = {folder: json.loads((folder / "case.json").read_text()) for folder in folders if folder.is_dir()}
    still = 0
    for name in dict.fromkeys(story["door"] for story in stories.values()):
        with prepared(name) as (door, work):
            runner = Runner(door, work)
            for folder in (each for each, story in stories.items() if story["door"] == name):
                tried = runner.alone(_kept_case(folder, stories[folder]))
                still += tried.verdict.kind in FINDS
                print(f"{folder.name}: {tried.verdict.kind}: {tried.stage}: {tried.verdict.detail[:400]}", flush=True)
    return still


def _kept_case(folder: Path, story: dict[str, Any]) -> Case:
    inside = folder / "files"
    files = {str(path.relative_to(inside)): path.read_bytes() for path in inside.rglob("*") if path.is_file()}
    return Case(files, tuple(map(tuple, story["commands"])), {}, story["note"], story["options"])


class prepared:
    """A door ready for use, and its folder of work, which is removed afterwards."""

    def __init__(self, name: str) -> None:
        self._door = DOORS[name]()

    def __enter__(self) -> tuple[Door, Path]:
        memory = Path("/dev/shm")
        self._folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=memory if os.access(memory, os.W_OK) else None))
        lay_out_secrets(self._folder)
        os.chdir(self._folder)
        self._door.prepare(self._folder)
        gc.collect()
        gc.freeze()
        return self._door, self._folder

    def __exit__(self, *error: object) -> None:
        os.chdir(ROOT)
        shutil.rmtree(self._folder, ignore_errors=True)


def _absolute(path: str) -> Path:
    return Path(path).absolute()


def main() -> int:
    """Return 1 where there were finds."""
    parser = argparse.ArgumentParser("scripts/fuzz", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--door", action="append", choices=sorted(DOORS), help="which; several one after another")
    parser.add_argument("--seconds", type=float, default=60, help="for each door")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=_absolute, metavar="DIR", help="where finds are kept")
    parser.add_argument("--turns", type=_absolute, metavar="FOLDER", help="take turns with other runs that name it")
    parser.add_argument("--record", action="store_true", help="put the counts into scripts/bench/results/fuzz.json")
    parser.add_argument("--replay", type=_absolute, nargs="+", metavar="FOLDER", help="try kept finds again")
    wanted = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves nothing behind
    if wanted.replay:
        return int(replay(wanted.replay) > 0)
    results = {}
    for name in wanted.door or sorted(DOORS):
        with prepared(name) as (door, folder):
            results[name] = run(door, folder, wanted.seconds, wanted.seed, wanted.keep, wanted.turns)
        if wanted.record:
            record(name, results[name], door.packages)
    print(json.dumps(results, indent=1))
    return int(any(each["finds"] for each in results.values()))


if __name__ == "__main__":
    sys.exit(main())
