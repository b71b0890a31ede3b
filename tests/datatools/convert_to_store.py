"""Run by test_parts.py in a process of its own: convert to a store, a folder under a scheme of its own.

    convert_to_store.py SOURCES OUTPUT KILL

KILL: the part before whose upload this process ends as the system ends one; -1 for none. Prints the parts written.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import fsspec
from fsspec.implementations.local import LocalFileSystem


class DiskStore(LocalFileSystem):
    """A store that outlives the process."""

    protocol = "disk"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("disk://"))


def main(sources: str, output: str, kill: str) -> None:
    from kerasmem.datatools.converting import conversion, parts

    fsspec.register_implementation("disk", DiskStore)
    written, put_file = [], parts.put_file

    def put_or_die(path, url, access):
        name = os.path.basename(url)
        if name.startswith("part-"):
            if len(written) == int(kill):
                os.kill(os.getpid(), signal.SIGKILL)
            written.append(name)
        put_file(path, url, access)

    parts.put_file = put_or_die
    done = conversion.convert(sources, output, part_size="20KB")
    print(json.dumps({"written": written, "resumed": done.resumed_rows, "crc": [each.crc32 for each in done.datasets]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
