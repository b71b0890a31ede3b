"""Logs and saved results as pages and tables, and the texts that `kerasmem explain` reads."""

from __future__ import annotations

import copy
import importlib.util
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

from cases import FINDS, Case, Door, Told, Verdict, judge_command, run_command
from mutation import NUMBERS, mutate, mutate_text

ROOT = Path(__file__).resolve().parents[2]
MARK = "<script>alert(4711)</script>"
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\x80-\x9f]")
ESCAPE = "\x1b]0;4711\x07"
_ATTACKS = (MARK, f'"><img src=x onerror="{MARK}', ESCAPE, "\x1b[2J", "'; alert(4711)//", "</script>" + MARK, "‮",
           "\r\n# 4711",
            "a\x00b", "{{4711}}", "javascript:alert(4711)", "=cmd|' /C calc'!A0", "x" * 5000, "\ud800")  # fmt: skip


class TextDoor(Door):
    """Texts of which nothing may be acted upon."""

    outputs: tuple[str, ...] = ()

    def attempt(self, case: Case, told: Told) -> Verdict:
        """Run each command, and look at what it prints and writes."""
        refused = ""
        for arguments in case.commands:
            told(" ".join(arguments[-2:]))
            done = run_command(arguments)
            verdict = judge_command(done, case)
            if verdict.kind in FINDS:
                return verdict
            # JSON may hold any character, as JSON has it
            for text in (done.out, done.err):
                if _CONTROLS.search(text):
                    return Verdict("unescaped", f"control characters printed by {' '.join(arguments)}")
            refused = refused or (verdict.detail if verdict.kind == "refused" else "")
        for name in self.outputs:
            if Path(name).exists() and MARK in Path(name).read_text(errors="replace"):
                return Verdict("unescaped", f"a script in {name}")
        return Verdict("refused", refused) if refused else Verdict("ok")


def change_json(value: Any, draw: random.Random, odd: tuple[Any, ...] = ()) -> Any:
    """Return JSON with one node changed: another number, type, text, or more or fewer entries."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, inner in items:
            places.append((node, key))
            walk(inner)

    walk(value)
    if not places:
        return draw.choice((*odd, None, [], {}, 1))
    node, key = draw.choice(places)
    deep: Any = 1
    for _ in range(draw.choice((3, 300))):
        deep = [deep] if draw.random() < 0.5 else {"a": deep}
    kind = draw.randrange(8)
    if kind == 0 and isinstance(node, dict):
        del node[key]
    elif kind == 1 and isinstance(node, list):
        node.extend([node[key]] * draw.choice((1, 2, 40)))
    elif kind == 2:
        other, place = draw.choice(places)
        node[key] = json.loads(json.dumps(other[place]))
    elif kind == 3:
        node[key] = draw.choice((-1, 0, 1, 2, 3, 1 << 31, 1 << 40, 1 << 63, 1 << 70, -(1 << 63), 0.5, 1e308, -1e308,
                                 float("nan"), float("inf")))  # fmt: skip
    elif kind == 4 and odd:
        node[key] = copy.deepcopy(draw.choice(odd))
    elif kind == 5:
        node[key] = draw.choice((*_ATTACKS, *NUMBERS))
    elif kind == 6:
        node[key] = draw.choice((None, True, False, [], {}, "", deep, [None], {"": None}, [[]]))
    elif isinstance(node[key], int) and not isinstance(node[key], bool):
        node[key] = draw.choice((node[key] + 1, node[key] - 1, -node[key], node[key] * 1000, float(node[key])))
    else:
        node[key] = [node[key]]
    return value


def changed_json(data: bytes, draw: random.Random, odd: tuple[Any, ...] = ()) -> bytes:
    """Return a JSON text with some nodes changed."""
    value = json.loads(data)
    for _ in range(1 + int(draw.expovariate(0.8))):
        value = change_json(value, draw, odd)
    return json.dumps(value, ensure_ascii=draw.random() < 0.8).encode("utf-8", "surrogatepass")


class LogsDoor(TextDoor):
    """Logs and saved results in `kerasmem report`."""

    name = "logs"
    packages = ("numpy",)
    outputs = ("page.html", "memory.svg")
    endings = (("-o", "page.html"), ("--json",), ("--json",), (), (), ("-o", "page.html"), ("--plot", "memory.svg"), (),
               ("-o", "page.html", "--ranks"))  # fmt: skip

    def prepare(self, folder: Path) -> None:
        """Write a log and a report as kerasmem does."""
        import kerasmem.cli.report_command
        import kerasmem.monitoring.rank_logs
        import kerasmem.rendering.page
        import kerasmem.rendering.plot
        import kerasmem.rendering.runs_table  # noqa: F401

        sound = _logs(folder)
        for ending in self.endings:  # loads what reads and draws
            run_command(("report", str(folder / "run.jsonl"), *ending))
        self.seeds = sound | {"estimate.json": json.dumps(_ESTIMATE).encode()}

    def make(self, draw: random.Random) -> Case:
        """Return a changed log or report, now and then with a sound one beside it."""
        seed = draw.choice(list(self.seeds))
        data = self.seeds[seed]
        if seed.endswith(".jsonl") and draw.random() < 0.6:
            lines = data.splitlines()
            for _ in range(draw.choice((1, 2, 4))):
                line = draw.randrange(len(lines))
                try:
                    lines[line] = changed_json(lines[line], draw)
                except ValueError:
                    continue
            data = b"\n".join(lines)
        elif seed.endswith(".json") and draw.random() < 0.7:
            data = changed_json(data, draw)
        else:
            words = (b",", b"nan", b"1e999", MARK.encode(), ESCAPE.encode(), b'"', b"\n", b"null", b"{", b"}")
            data = mutate_text(data, draw, words)
        name = seed if draw.random() < 0.9 else f"{MARK.replace('/', '')}{seed}"
        files, names = {name: data}, [name]
        if draw.random() < 0.2:
            other = draw.choice(list(self.seeds))
            if other not in files:
                files[other] = self.seeds[other]
                names.append(other)
        return Case(files, (("report", *names, *draw.choice(self.endings)),), {}, seed)


_ESTIMATE = {
    "format_version": 1, "model": {"name": "net"}, "device": {"name": "t4", "verdict": "fits", "usable_bytes": 10**10},
    "settings": {"batch_size": 32, "method": "graph", "optimizer": "Adam", "mode": "train", "execution": "graph"},
    "bytes": {"total": 10 << 20, "low": 9 << 20, "high": 12 << 20, "weights": 4 << 20, "activations": 5 << 20},
    "layers": [{"name": f"dense_{n}", "class": "Dense", "bytes_at_peak": n << 20} for n in range(4)],
    "unmodelled": ["cuDNN"], "notes": ["a note"],
}  # fmt: skip


def _logs(folder: Path) -> dict[str, bytes]:
    """Return logs of two runs, as MemoryLogger writes them."""
    from kerasmem.monitoring.logfile import LogFile
    from kerasmem.monitoring.timeline import Sample

    found = {}
    for name in ("run.csv", "run.jsonl", "run.rank0.jsonl", "run.rank1.csv"):
        log = LogFile(folder / name, False)
        for run in range(2):
            log.start_run(run, "2026-01-01T10:00:00+00:00", ["a note"], rank=int("rank1" in name), ranks=2)
            for each in range(12):
                last = each % 6 == 5
                known = dict(zip(Sample._fields, (run, each / 10, "epoch" if last else "train", each // 6,
                                 None if last else each % 6, 1, "GPU:0", 100 << 20, (200 + each) << 20),
                                 strict=False))  # fmt: skip
                log.add([Sample(**{**dict.fromkeys(Sample._fields), **known, "rss_bytes": 500 << 20})])
            log.add_object("note", text="another note")
        log.close()
        found[name] = (folder / name).read_bytes()
    return found


class ExplainDoor(TextDoor):
    """Texts for `kerasmem explain`."""

    name = "explain"

    def prepare(self, folder: Path) -> None:
        """Take the texts that the tests have."""
        import kerasmem.cli.explain_command
        import kerasmem.diagnosis.explaining
        import kerasmem.rendering.diagnosis_text  # noqa: F401

        place = importlib.util.spec_from_file_location("corpus", ROOT / "tests" / "diagnosis" / "corpus.py")
        assert place is not None and place.loader is not None
        corpus = importlib.util.module_from_spec(place)
        sys.modules["corpus"] = corpus  # its dataclasses look there
        place.loader.exec_module(corpus)
        texts = set(_texts(vars(corpus)))
        self.texts = sorted(text for text in texts if len(text) > 40)
        run_command(("explain", "/dev/null"))  # compiles the patterns

    def make(self, draw: random.Random) -> Case:
        """Return one or several texts put together and changed."""
        text = "\n".join(draw.choices(self.texts, k=draw.choice((1, 1, 2, 5))))
        data = text.encode()
        if draw.random() < 0.2:
            data = data * draw.choice((10, 200))
        words = (*(each.encode("utf-8", "surrogatepass") for each in _ATTACKS), b"[" * 3000, b"9" * 5000, b"9,9" * 2000)
        data = mutate(data, draw) if draw.random() < 0.2 else mutate_text(data, draw, words)
        return Case({"train.log": data}, (("explain", "train.log", *draw.choice(((), ("--json",)))),), {}, "")


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for key, inner in value.items() if not str(key).startswith("__") for text in _texts(inner)]
    if isinstance(value, (list, tuple)):
        return [text for inner in value for text in _texts(inner)]
    return _texts(vars(value)) if hasattr(value, "__dict__") and not callable(value) else []
