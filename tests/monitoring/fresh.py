"""Python under TensorFlow's real BFC allocator."""

import os
import subprocess
from pathlib import Path

from loaded_python import NEW_PYTHON, executable

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def environment(**environ):
    """Return the variables for a Python with the BFC allocator on the CPU, with `environ` (None unsets) on top."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TF_", "CUDA_VISIBLE"))}
    settings = {
        "CUDA_VISIBLE_DEVICES": "-1",
        "KERAS_BACKEND": "tensorflow",
        "TF_CPU_ALLOCATOR_USE_BFC": "true",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, HERE, HERE.parent / "support"))),
    }
    return {name: value for name, value in {**clean, **settings, **environ}.items() if value is not None}


def python(*args, cwd, check=True, new=False, **environ):
    """Run Python on `args` in `cwd`, with the BFC allocator on the CPU and `environ` on top: a fork, or a new one."""
    command = [NEW_PYTHON if new else executable(), *map(str, args)]
    done = subprocess.run(
        command, cwd=cwd, env=environment(**environ), capture_output=True, text=True, timeout=300, check=False
    )
    if check and done.returncode:
        raise AssertionError(f"exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    return done
