"""`scripts/fuzz` tries cases, and tells a crash, an endless loop, a leak and a defect from a harmless outcome."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FUZZ = ROOT / "scripts" / "fuzz"
KINDS = """
import json, os, sys, tempfile, time
from pathlib import Path
sys.path[:0] = sys.argv[1:]
from cases import SECRET, Case, Done, Door, Verdict, judge_command
from running import Runner, lay_out_secrets

def tried(case, told):
    kind = case.note
    if kind == "crash":
        os.kill(os.getpid(), 11)
    while kind == "hang":
        pass
    if kind == "memory":
        kept = [b"x" * (32 << 20) for _ in range(8)]
        time.sleep(30)
    if kind == "outside":
        Path("out").write_bytes(Path("../private/secret.txt").read_bytes())
    error = KeyError(1)
    texts = {"defect": "Error: unexpected KeyError: 1\\nThis is a defect in kerasmem", "refused": "Error: no"}
    return judge_command(Done(int(kind in texts), "", texts.get(kind, ""), error), case)

class Some(Door):
    name, seconds, waiting, memory = "some", 0.5, 5.0, 100 << 20
    attempt = staticmethod(tried)

folder = Path(tempfile.mkdtemp())
lay_out_secrets(folder)
runner = Runner(Some(), folder)
kinds = ["ok", "crash", "refused", "hang", "outside", "defect", "memory", "ok"]
found = {each.case.note: each.verdict.kind for each in runner.tried([Case({"in": b"x"}, note=kind) for kind in kinds])}
print(json.dumps(found))
"""


def run(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout, done.stderr


def test_each_kind_of_outcome_is_told_apart():
    code, out, err = run("-c", KINDS, ROOT, FUZZ)
    assert code == 0, err
    found = json.loads(out)
    assert found == {kind: kind for kind in found} and len(found) == 7


def test_checksums_of_a_changed_file_are_put_right(monkeypatch):
    monkeypatch.syspath_prepend(str(FUZZ))
    from hdf5_checksums import find_sums, put_sums
    from hdf5_seeds import index_files

    sound = index_files()["fixed gzip"]
    places = find_sums(sound)
    assert {sound[start : start + 4] for start, _ in places} >= {b"OHDR", b"FAHD", b"FADB"}
    at = sound.index(b"FADB") + 20
    changed = sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :]
    assert put_sums(changed, sound, places) != changed and put_sums(sound, bytes(len(sound)), places) == sound


def test_a_door_is_tried_and_what_came_of_it_counted(tmp_path):
    pytest.importorskip("pyarrow")
    code, out, err = run(FUZZ, "--door", "csv", "--seconds", "1", "--seed", "3", "--keep", tmp_path / "finds")
    counts = json.loads(out)["csv"]
    assert code == 0 and not counts["finds"], err
    assert counts["cases"] == sum(counts["outcomes"].values()) >= 20 and counts["outcomes"]["refused"]
