"""Outputs of commands that the README and the manual show.

A block of text after `<!-- output: NAME -->` shows lines of what the scene NAME prints: the command itself (`$ …`), and
"…" for omitted parts. Each line is replaced by the next printed line that differs from it in numbers and units alone.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- output: (\w+) -->\n```text\n)(.*?)(^```)", re.DOTALL | re.MULTILINE)
_NUMBER = r"[−+-]?\d(?:[\d.,]*\d)?(?:e[+-]?\d+)?"
_UNIT = r"(?:[KMGT]i?)?B\b"
_TOKEN = re.compile(rf"{_NUMBER}|(?<=\d ){_UNIT}|\s+|…")

Scene = Callable[[Path], str]
SCENES: dict[str, Scene] = {}


def scene(function: Scene) -> Scene:
    SCENES[function.__name__] = function
    return function


def refreshed(shown: str, printed: str) -> tuple[str, list[str]]:
    """Return a block with the lines printed now, and those of its lines that are no longer printed.

    Example:
        >>> refreshed("in 2 s\\n…\\nof 9 B\\ngone\\n", "in 13 s\\nmore\\nof 1.5 KiB\\n")
        ('in 13 s\\n…\\nof 1.5 KiB\\ngone\\n', ['gone'])
    """
    lines, missing, left = [], [], printed.splitlines()
    for line in shown.splitlines():
        if line.strip() in ("", "…") or line.startswith(("$ ", ">>> ")):
            lines.append(line)
            continue
        for number, candidate in enumerate(left):
            new = as_printed(line, candidate.rstrip())
            if new is not None:
                lines.append(new)
                left = left[number + 1 :]
                break
        else:
            lines.append(line)
            missing.append(line)
    return "".join(f"{line}\n" for line in lines), missing


def as_printed(shown: str, printed: str) -> str | None:
    """Return a printed line with the omissions of the shown one, or None if more than numbers and units differ."""
    pattern, end = "", 0
    tokens = list(_TOKEN.finditer(shown))
    for token in tokens:
        pattern += re.escape(shown[end : token.start()])
        pattern += f"({_alternative(token[0])})"
        end = token.end()
    match = re.fullmatch(pattern + re.escape(shown[end:]), printed)
    if match is None:
        return None
    line, end = "", 0
    for number, token in enumerate(tokens, 1):
        line += shown[end : token.start()] + ("…" if token[0] == "…" else match[number])
        end = token.end()
    return line + shown[end:]


def _alternative(token: str) -> str:
    """Return the pattern of a token's possible replacements."""
    if token == "…":
        return ".*?"
    if token.isspace():
        return r"\s+"
    return _UNIT if token.endswith("B") else _NUMBER


def run(command: str, folder: Path, **environment: str) -> str:
    """Run a shell command with this checkout's `kerasmem` and return both of its output streams."""
    programs = folder / ".programs"
    programs.mkdir(exist_ok=True)
    for name, words in {"python": "", "kerasmem": "-m kerasmem"}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        (programs / name).chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    settings = {
        "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "160", "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "-1", "TF_ENABLE_ONEDNN_OPTS": "1",  # wherever it runs, the kernels are the same
    }  # fmt: skip
    done = subprocess.run(
        command, shell=True, cwd=folder, env={**os.environ, **settings, **environment}, text=True, timeout=900,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.stdout


def example(name: str, **environment: str) -> Scene:
    return lambda folder: run(f"python {ROOT}/examples/{name}.py", folder, **environment)


SCENES["logger"] = example("train_with_logger", TF_CPU_ALLOCATOR_USE_BFC="true")
SCENES["large_file"] = example("train_from_large_file")
SCENES["recover"] = example("recover_from_oom", TF_ENABLE_ONEDNN_OPTS="0")


def script(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(textwrap.dedent(text))


def models(folder: Path) -> None:
    """Write the network of the first example, as model.h5 and model.keras."""
    script(
        folder,
        "models.py",
        f"""
        import sys
        sys.path.insert(0, {str(ROOT / "scripts" / "bench")!r})
        import keras
        from zoo import mnist_cnn
        for name in ("model.h5", "model.keras"):
            keras.backend.clear_session()  # names are counted from the start
            model = keras.Sequential([keras.Input((28, 28, 1)), *mnist_cnn().layers], name="mnist_cnn")
            model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            model.save(name)
        """,
    )
    output = run("python models.py", folder)
    if not (folder / "model.keras").exists():
        raise RuntimeError(output)


def estimate_of_resnet50(options: str) -> Scene:
    return lambda folder: run(f"kerasmem estimate keras.applications:ResNet50 {options}", folder)


SCENES["estimate"] = estimate_of_resnet50("--batch-size 32 --optimizer adam --device 16GB --top 4")
SCENES["estimate_all"] = estimate_of_resnet50("--batch-size 32 --optimizer adam --top 3 -v")
SCENES["replicas"] = estimate_of_resnet50("--batch-size 64 --optimizer adam --top 1 --replicas 4 -v")


def draw_estimate(path: Path) -> None:
    """Draw the terminal output of the README's first command."""
    from io import StringIO

    from rich.console import Console
    from rich.text import Text

    from kerasmem import estimate
    from kerasmem.rendering.estimate_tables import estimate_table

    width = 110
    report = estimate("keras.applications:ResNet50", batch_size=32, device="t4")
    console = Console(width=width, record=True, file=StringIO())
    console.print(Text("$ kerasmem estimate keras.applications:ResNet50 --batch-size 32 --device t4"))
    console.print(estimate_table(report, width))
    path.write_text(console.export_svg(title="kerasmem"))


@scene
def max_batch(folder: Path) -> str:
    models(folder)
    return run(
        "kerasmem max-batch model.h5 --device 2GB; "
        "kerasmem max-batch model.keras --device 64MB --confirm --margin 0.05",
        folder,
    )


@scene
def many(folder: Path) -> str:
    script(
        folder,
        "nets.py",
        """
        import keras
        def tower(width=1024, depth=8):
            dense = [keras.layers.Dense(width, "gelu") for _ in range(depth)]
            model = keras.Sequential([keras.Input((64,)), *dense, keras.layers.Dense(10)])
            model.compile("adam", "mse")
            return model
        if __name__ == "__main__":
            tower(256, 1).save("small.keras")
            open("broken.keras", "w").write("no model")
        """,
    )
    return run(
        "python nets.py; kerasmem estimate small.keras broken.keras nets.py:tower --grid batch_size=256,4096 "
        "--device 500MB --workers 2",
        folder,
    )


@scene
def profile(folder: Path) -> str:
    models(folder)
    return run("kerasmem profile model.keras --batch-size 64", folder)


@scene
def shuffling(folder: Path) -> str:
    script(
        folder,
        "describe.py",
        """
        import h5py, numpy as np
        from kerasmem import H5ChunkSequence
        with h5py.File("sorted.h5", "w") as file:
            images = np.zeros((20_000, 28, 28, 1), "u1")
            file.create_dataset("images", data=images, chunks=(256, 28, 28, 1), compression="gzip")
            file["labels"] = np.repeat(np.arange(10), 2000)
        train = H5ChunkSequence("sorted.h5", "images", "labels", batch_size=32, memory_budget="10MiB")
        print(train.describe())
        """,
    )
    return run("python describe.py", folder)


@scene
def convert(folder: Path) -> str:
    script(
        folder,
        "arrays.py",
        """
        import numpy as np
        random = np.random.default_rng(0)
        np.save("x.npy", random.random((20_000, 28, 28)))
        np.save("y.npy", random.integers(0, 10, 20_000))
        """,
    )
    return run("python arrays.py; kerasmem data convert x.npy y.npy -o train.h5 --shuffle", folder)


@scene
def explain(folder: Path) -> str:
    script(
        folder,
        "train.py",
        """
        import os
        os.environ.update(TF_CPU_ALLOCATOR_USE_BFC="true", TF_CPU_BFC_MEM_LIMIT_IN_MB="64", TF_ENABLE_ONEDNN_OPTS="0")
        import keras, numpy as np
        layers = keras.layers
        model = keras.Sequential([
            keras.Input((64, 64, 3)), layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.Conv2D(16, 3, padding="same", activation="relu"), layers.GlobalAveragePooling2D(), layers.Dense(10),
        ])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.fit(np.zeros((66, 64, 64, 3), "f4"), np.zeros(66), batch_size=66)
        """,
    )
    return run("python train.py 2>&1 | kerasmem explain -", folder, TF_CPP_MIN_LOG_LEVEL="0")


@scene
def supervise(folder: Path) -> str:
    script(
        folder,
        "train.py",
        """
        import os, signal
        import keras, numpy as np
        class Killed(keras.callbacks.Callback):
            def on_train_batch_begin(self, batch, logs=None):
                if batch == 5 and not os.path.exists("killed"):
                    open("killed", "w").close()
                    os.kill(os.getpid(), signal.SIGKILL)
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        x, y = np.ones((640, 8), "f4"), np.ones((640, 1), "f4")
        model.fit(x, y, verbose=0)
        model.fit(x, y, epochs=2, verbose=0, callbacks=[Killed()])
        """,
    )
    return run("kerasmem run --checkpoint runs train.py", folder)


# ---------------------------------------------------------------- tutorials

_FILE = re.compile(r'^```\w+ title="([\w.]+)"\n(.*?)^```', re.DOTALL | re.MULTILINE)
_EXPORT = re.compile(r"^export (.+)$", re.MULTILINE)


@cache
def tutorial(page: Path) -> dict[str, str]:
    """Write the files of a tutorial, run its commands in order, and return their outputs by name."""
    text, printed = page.read_text(), {}
    settings = dict(pair.split("=") for line in _EXPORT.findall(text) for pair in line.split())
    parts = sorted([*_FILE.finditer(text), *BLOCK.finditer(text)], key=re.Match.start)
    with tempfile.TemporaryDirectory() as folder:
        for part in parts:
            if part.re is _FILE:
                (Path(folder) / part[1]).write_text(part[2])
            else:
                commands = [line[2:] for line in part[3].splitlines() if line.startswith("$ ")]
                printed[part[2]] = "".join(run(command, Path(folder), **settings) for command in commands)
    return printed


def follow(page: Path, name: str, folder: Path) -> str:
    return tutorial(page)[name]


for tutorial_page in sorted((ROOT / "docs" / "tutorials").glob("*.md")):
    for block in BLOCK.findall(tutorial_page.read_text()):
        SCENES[block[1]] = partial(follow, tutorial_page, block[1])
