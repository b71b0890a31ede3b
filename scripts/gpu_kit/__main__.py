#!/usr/bin/env python3
"""Pack TensorFlow, the CUDA libraries it opens and this checkout for a machine with a card and without a network.

    python scripts/gpu_kit pack --python 3.12 --out parts/ [--part-size 60MB] [--capability 7.5] [--capability 9.0]
    python scripts/gpu_kit check parts/ --with python3.12      # unpacks it elsewhere, imports and trains on the CPU
    python scripts/gpu_kit pack … --check                      # both

There: `python3.12 parts/unpack.py`, then `kit/run kit/kerasmem/scripts/bench/gpu_truth.py`.
Device code for other compute capabilities is zeroed, and so is all of it in libraries that TensorFlow only opens.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from packing import pack, requirements  # noqa: E402
from unpack import KitError  # noqa: E402

from kerasmem.units import parse_size  # noqa: E402

# Opens each CUDA library that is left, but those that link to the driver, and trains.
_TRAIN = """
import ctypes, pathlib, keras, numpy, kerasmem, tensorflow
libraries = sorted(pathlib.Path(tensorflow.__file__).parents[1].glob("nvidia/*/lib/*.so*"))
for library in libraries:
    try:
        ctypes.CDLL(str(library))
    except OSError as error:
        if "libcuda.so.1" not in str(error):
            raise
model = keras.Sequential([keras.layers.Input((28, 28, 1)), keras.layers.Conv2D(8, 3), keras.layers.Flatten(),
                          keras.layers.Dense(10)])
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
history = model.fit(numpy.ones((64, 28, 28, 1), "float32"), numpy.zeros(64), epochs=2, verbose=0,
                    callbacks=[kerasmem.MemoryLogger(verbose=0)])
assert history.history["loss"][-1] < history.history["loss"][0]
versions = f"TensorFlow {tensorflow.__version__} and Keras {keras.__version__}"
print(f"opened {len(libraries)} CUDA libraries and trained with {versions}")
"""


def capability(text: str) -> int:
    if not (found := re.fullmatch(r"(\d+)\.(\d)", text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no compute capability such as 9.0")
    return 10 * int(found[1]) + int(found[2])


def version(text: str) -> str:
    if not re.fullmatch(r"3\.\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no version of Python such as 3.12")
    return text


def size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def check(parts: Path, python: str) -> None:
    """Unpack a kit into a temporary folder and train with it, without the packages of this machine.

    Raises:
        KitError: it cannot be unpacked, imported or trained with.
    """
    found = shutil.which(python)
    if found is None:
        raise KitError(f"{python} is not here; `check PARTS --with PYTHON` takes another of the kit's version")
    with tempfile.TemporaryDirectory() as scratch:
        kit = Path(scratch, "kit")
        for command in ([found, str(parts / "unpack.py"), "--into", str(kit)], [str(kit / "run"), "-sSc", _TRAIN]):
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                cwd=scratch,
                env={"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "-1", "HOME": scratch},
            )
            if done.returncode:
                raise KitError(f"{' '.join(command[:2])} failed:\n{done.stderr.strip()[-2000:]}")
        print(done.stdout.strip())


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu_kit", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="write the parts of a kit")
    packing.add_argument("--python", type=version, required=True, help="version of the Python that will run it")
    packing.add_argument("--out", type=Path, default=Path("parts"), help="the folder to make (default: %(default)s)")
    packing.add_argument("--part-size", type=size, default="60MB", help="of a part at most (default: %(default)s)")
    packing.add_argument(
        "--capability", type=capability, action="append", help="of a card it is for; may be repeated (default: 9.0)"
    )
    packing.add_argument("--add", action="append", default=[], metavar="REQUIREMENT", help="such as 'jax[cuda12]'")
    packing.add_argument(
        "--preset", type=int, choices=range(10), default=6, help="lzma's; 1 is some five times as fast as %(default)s"
    )
    packing.add_argument("--check", action="store_true", help="then check it with the Python of that version")
    packing.add_argument("--wheels", type=Path, help="take wheels from this folder, not from the network")
    checking = commands.add_parser("check", help="unpack a kit into a temporary folder and train with it on the CPU")
    checking.add_argument("parts", type=Path)
    checking.add_argument("--with", dest="python", default=sys.executable, help="a Python of the kit's version")
    options = parser.parse_args()
    try:
        if options.command == "check":
            check(options.parts.absolute(), options.python)
        else:
            kit = pack(
                options.out.absolute(),
                python=options.python,
                capabilities=options.capability or [90],
                part_size=options.part_size,
                needs=requirements() + options.add,
                wheels=options.wheels,
                preset=options.preset,
            )
            large = {name: bytes for name, bytes in kit.sizes.items() if bytes > 1 << 20}
            print(json.dumps({**dataclasses.asdict(kit), "parts": len(kit.parts), "sizes": large}, indent=1))
            if options.check:
                check(options.out.absolute(), f"python{options.python}")
    except KitError as error:
        print(f"gpu_kit: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
