"""Indexes of chunks, and lists of sources, looked through before HDF5 goes through them: none is without end.

HDF5 goes through as many places as an index says that it has, down every branch of a tree, also where a damaged one
leads to the same branch again and again, and through a heap by the sizes that it finds there, also if one is 0.
The layout is that of the HDF5 File Format Specification, version 3.0.
"""

from __future__ import annotations

from math import prod

from kerasmem.hdf5.direct.chunks import MOST_CHUNKS
from kerasmem.hdf5.direct.raw import RawError, RawFile, little

_CHUNKED, _VIRTUAL = 2, 3
_IMPLICIT, _FIXED, _EXTENSIBLE, _TREE = 2, 3, 4, 5  # kinds of indexes
_FEW = 1 << 20  # places, gone through in a tenth of a second
_MOST_LEVELS = 40  # of a tree: each has at least twice the nodes of the one above
_NODE_PREFIX = 6  # bytes of a node of a version 2 tree before its records
_CHECKSUM = 4
_TWICE = "its chunk index is damaged: it leads to one place twice"


def refuse_endless_sources(raw: RawFile, header: int) -> None:
    """Refuse a virtual dataset with a damaged list of sources, on which HDF5 loops without end.

    Args:
        raw: the file.
        header: place of the object's header; of another object nothing is looked at.

    Raises:
        RawError: If the list has no end, or the header is damaged.
    """
    layout = raw.layout(header)
    if len(layout) > 2 + raw.address_size and layout[0] >= 4 and layout[1] == _VIRTUAL:
        heap = little(layout[2 : 2 + raw.address_size])
        if heap and not _is_nowhere(raw, heap):
            raw.heap(heap)


def refuse_endless_index(raw: RawFile, header: int) -> None:
    """Refuse a dataset with a damaged index of chunks, on which HDF5 loops without end.

    Args:
        raw: the file.
        header: place of the object's header; of an object without chunks nothing is looked at.

    Raises:
        RawError: If the index has no end, is damaged, or has far more places than the file has room for.
    """
    layout, size = raw.layout(header), raw.address_size
    if len(layout) < 8 + size:
        return
    if layout[0] >= 4 and layout[1] == _CHUNKED:
        _refuse_index(raw, header, layout)
        return
    kind, axes, at = (layout[2], layout[1], 8) if layout[0] < 3 else (layout[1], layout[2], 3)
    address = little(layout[at : at + size])
    if kind == _CHUNKED and layout[0] < 4 and not _is_nowhere(raw, address):
        _refuse_old_tree(raw, address, 8 + 8 * axes)


def _refuse_index(raw: RawFile, header: int, layout: bytes) -> None:
    axes, width = layout[3], layout[4]
    at = 5 + axes * width
    kind, address = layout[at : at + 1], little(layout[-raw.address_size :])
    if not kind or _is_nowhere(raw, address):
        return
    if kind[0] == _TREE:
        _refuse_tree(raw, address)
        return
    chunk = [little(layout[each : each + width]) for each in range(5, at, width)]
    if 0 in chunk:
        raise RawError("its chunks have no size")
    # The last of a chunk's extents is the size of an element.
    needed = prod(-(-extent // each) for extent, each in zip(raw.extents(header), chunk, strict=False))
    places = needed if kind[0] == _IMPLICIT else 0
    if kind[0] == _FIXED:
        places = little(raw.bytes_at(address, 8 + raw.length_size)[8:])
    elif kind[0] == _EXTENSIBLE:
        places = little(raw.bytes_at(address, 12 + 5 * raw.length_size)[-raw.length_size :])
    # A dataset may have few of its chunks written, or may have had more rows.
    most = max(_FEW, min(needed, MOST_CHUNKS), raw.size // raw.address_size)
    if places > most:
        raise RawError(
            f"its chunk index has {places:,} places, and {most:,} at most are gone through for a dataset of "
            f"{needed:,} chunks in a file of {raw.size:,} bytes"
        )


def _refuse_old_tree(raw: RawFile, root: int, key: int) -> None:
    """Refuse a version 1 B-tree that leads to a node twice, or to one of another level."""
    size = raw.address_size
    seen, todo = {root}, [(root, -1)]
    while todo:
        at, level = todo.pop()
        head = raw.bytes_at(at, 8 + 2 * size)
        if head[:4] != b"TREE" or level not in (head[5], -1):
            raise RawError("its chunk index is damaged")
        if not head[5]:
            continue
        entries = raw.bytes_at(at + len(head), little(head[6:8]) * (key + size))
        children = [little(entries[each + key : each + key + size]) for each in range(0, len(entries), key + size)]
        _note(children, seen)
        todo += [(child, head[5] - 1) for child in children]


def _refuse_tree(raw: RawFile, address: int) -> None:
    """Refuse a version 2 B-tree that leads to a node twice."""
    size = raw.address_size
    head = raw.bytes_at(address, 18 + size)
    node, record, depth = little(head[6:10]), little(head[10:12]), little(head[12:14])
    root, records = little(head[16 : 16 + size]), little(head[16 + size : 18 + size])
    if head[:4] != b"BTHD" or not record or depth > _MOST_LEVELS or node < _NODE_PREFIX + _CHECKSUM + record:
        raise RawError("its chunk index is damaged")
    if _is_nowhere(raw, root):
        return
    most = total = (node - _NODE_PREFIX - _CHECKSUM) // record
    count, widths = _width(most), [0]  # bytes of the number of a child's records, and of those of all below it
    for _ in range(depth):
        pointer = size + count + widths[-1]
        inner = (node - _NODE_PREFIX - _CHECKSUM - pointer) // (record + pointer)
        total = (inner + 1) * total + inner
        widths.append(_width(total))
    seen, todo = {root}, [(root, records, depth)]
    while todo:
        at, records, level = todo.pop()
        if not level:
            continue
        pointer = size + count + widths[level - 1]
        skipped = _NODE_PREFIX + records * record
        data = raw.bytes_at(at, skipped + (records + 1) * pointer)
        pointers = [data[each : each + pointer] for each in range(skipped, len(data), pointer)]
        children = [little(each[:size]) for each in pointers]
        _note(children, seen)
        if level > 1:
            counts = [little(each[size : size + count]) for each in pointers]
            todo += [(child, held, level - 1) for child, held in zip(children, counts, strict=True)]


def _note(children: list[int], seen: set[int]) -> None:
    before = len(seen)
    seen.update(children)
    if len(seen) != before + len(children):
        raise RawError(_TWICE)


def _width(most: int) -> int:
    """Return how many bytes HDF5 gives a number that is so large at most."""
    return (most.bit_length() - 1) // 8 + 1


def _is_nowhere(raw: RawFile, address: int) -> bool:
    return address == (1 << 8 * raw.address_size) - 1
