"""What the tests of engines have their workers do; a module of its own, so that workers find it."""

from __future__ import annotations

import os
import signal

from kerasmem.datatools.converting import parts, running
from kerasmem.errors import DataError

write_part = parts._write_part


def die_once(flag):
    """End this process as the system does, the first time that any worker comes here."""
    try:
        os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def write_part_and_die(part, **settings):
    """Write a part; the process that has all of part 2 but its name dies once."""
    folder = os.path.dirname(part.output)
    if part.output.endswith("part-00002.h5"):
        place = running.ConversionRun.place

        def place_or_die(*arguments):
            die_once(os.path.join(os.path.dirname(folder), "died"))
            place(*arguments)

        running.ConversionRun.place = place_or_die
    return write_part(part, **settings)


def fail(number):
    raise DataError(f"x.h5: row {number} is damaged")


def crash(number):
    raise RuntimeError(f"no luck with {number}")


def square_and_die(task):
    number, flag = task
    if number == 3:
        die_once(flag)
    return number * number
