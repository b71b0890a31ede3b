"""Parse HDF5 metadata from its bytes, for data that the library reads without bounds or does not report.

Texts of variable length lie in heaps: an element names its heap, its number there and its length, so that a file of
4 MB can name one text of 4 MB any number of times, and HDF5 1.14 goes round for ever in a damaged heap. Here lengths
are added up before a text is read. The layout is that of the HDF5 File Format Specification, version 3.0.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import h5py

_SPACE, _LAYOUT, _ATTRIBUTE, _CONTINUATION = 0x01, 0x08, 0x0C, 0x10  # kinds of messages of an object's header
_SHARED = 2  # flag of a message that lies elsewhere
_MOST_HEADER = 4 << 20  # bytes of the messages of one object
_MOST_HEAP = 64 << 20  # bytes of heaps looked through in a file
_UNFILTERED_EDGES = 1  # flag of a chunked layout

MOST_TEXT = 64 << 20
"""Bytes of text that are read of a file."""


class RawError(ValueError):
    """The bytes violate the format or a limit. The text follows "cannot be read: "."""


@dataclass
class RawFile:
    """A file's bytes.

    Args:
        read: returns so many bytes from a place in the file.
        size: bytes of the file.
        base: where in the file places are counted from.
        address_size: bytes of a place as it is stored.
        length_size: bytes of a length as it is stored.
    """

    read: Callable[[int, int], bytes]
    size: int
    base: int = 0
    address_size: int = 8
    length_size: int = 8
    _heaps: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)
    _looked_through: int = 0
    _spent: int = 0

    def edges_are_unfiltered(self, header: int) -> bool:
        """Return whether the chunks of a dataset that reach beyond its edge are stored without its filters.

        Args:
            header: place of the dataset's header.

        Raises:
            RawError: If it is damaged.
        """
        layout = self.layout(header)
        if len(layout) < 3:
            raise RawError("its header says nothing of its layout")
        return layout[0] >= 4 and layout[1] == 2 and bool(layout[2] & _UNFILTERED_EDGES)

    def layout(self, header: int) -> bytes:
        """Return the layout message of an object's header; b"" if there is none.

        Args:
            header: place of the object's header.

        Raises:
            RawError: If it is damaged.
        """
        return next((data for kind, _, data in self._messages(header) if kind == _LAYOUT), b"")

    def extents(self, header: int) -> tuple[int, ...]:
        """Return the shape in a dataset's header; () if it lies elsewhere.

        Args:
            header: place of the dataset's header.

        Raises:
            RawError: If it is damaged.
        """
        for kind, flags, data in self._messages(header):
            if kind == _SPACE and not flags & _SHARED and len(data) >= 4:
                first, width = (8 if data[0] == 1 else 4), self.length_size
                return tuple(little(data[at : at + width]) for at in range(first, first + data[1] * width, width))
        return ()

    def compact(self, header: int) -> bytes:
        """Return the bytes of a dataset that lies in its header.

        Args:
            header: place of the dataset's header.

        Raises:
            RawError: If it is damaged, or does not lie there.
        """
        layout = self.layout(header)
        if len(layout) < 5 or layout[0] < 3 or layout[1] != 0:
            raise RawError("its header holds no data")
        return layout[4 : 4 + little(layout[2:4])]

    def attribute(self, header: int, name: str) -> bytes | None:
        """Return the bytes of an attribute's values, or None if they lie outside the object's header.

        Args:
            header: place of the object's header.
            name: the attribute.

        Raises:
            RawError: If the header is damaged.
        """
        wanted = name.encode("utf-8", "surrogateescape")
        for kind, flags, data in self._messages(header):
            if kind != _ATTRIBUTE or flags & _SHARED or len(data) < 8:
                continue
            version, sizes = data[0], [little(data[at : at + 2]) for at in (2, 4, 6)]
            at = 9 if version == 3 else 8
            if data[at : at + sizes[0]].split(b"\0")[0] == wanted:
                return data[at + sum(-(-size // 8) * 8 if version == 1 else size for size in sizes) :]
        return None

    def texts(self, elements: bytes, most: int = MOST_TEXT) -> list[bytes]:
        """Return texts of variable length.

        Args:
            elements: as they are stored: length, place of the heap and number in it, each.
            most: bytes of all texts together.

        Raises:
            RawError: If they take more, or a heap is damaged.
        """
        size = self.element_size
        found = [elements[at : at + size] for at in range(0, len(elements) - size + 1, size)]
        lengths = [little(one[:4]) for one in found]
        if sum(lengths) > most:
            raise RawError(f"its {len(found):,} texts take {sum(lengths):,} bytes together; {most:,} are read at most")
        self.spend(sum(lengths))
        known: dict[bytes, bytes] = {}
        for one, length in zip(found, lengths, strict=True):
            if one not in known:
                known[one] = self._text(little(one[4:-4]), little(one[-4:]), length)
        return [known[one] for one in found]

    def spend(self, size: int) -> None:
        """Count bytes of text that are read of this file.

        Raises:
            RawError: If they are more than are read of a file.
        """
        self._spent += size
        if self._spent > MOST_TEXT:
            raise RawError(f"the texts of this file take more than the {MOST_TEXT:,} bytes that are read at most")

    @property
    def element_size(self) -> int:
        """Bytes of a reference to an element of variable length."""
        return 8 + self.address_size

    def _text(self, heap: int, number: int, length: int) -> bytes:
        if not length:
            return b""
        if heap not in self._heaps:
            self._looked_through += little(self.bytes_at(heap, 8 + self.length_size)[8:])
            if self._looked_through > _MOST_HEAP:
                raise RawError("the heaps of its texts are too large")
        at, size = self.heap(heap).get(number, (0, 0))
        if length > size:
            raise RawError("a text lies outside its heap")
        return self.bytes_at(at, length)

    def heap(self, address: int) -> dict[int, tuple[int, int]]:
        """Return the places and sizes of the objects of a heap by their numbers.

        Args:
            address: place of the heap.

        Raises:
            RawError: If it is damaged: HDF5, which trusts the sizes in it, would go round for ever, or read what lies
                behind it.
        """
        if address in self._heaps:
            return self._heaps[address]
        header = 8 + self.length_size
        start = self.bytes_at(address, header)
        size = little(start[8:])
        if start[:4] != b"GCOL" or size < header:
            raise RawError("a heap is damaged")
        data, found, at = self.bytes_at(address, size), {}, header
        while at + header <= size:
            number, length = little(data[at : at + 2]), little(data[at + 8 : at + header])
            whole = header + -(-length // 8) * 8 if number else length  # 0 is what is free
            if not header <= whole <= size - at:
                raise RawError("a heap is damaged")
            if number:
                found[number] = (address + at + header, length)
            at += whole
        self._heaps[address] = found
        return found

    def _messages(self, header: int) -> Iterator[tuple[int, int, bytes]]:
        """Yield kind, flags and bytes of each message in an object's header."""
        if self.bytes_at(header, 4) == b"OHDR":
            flags = self.bytes_at(header, 6)[5]
            at = header + 6 + (16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0)
            width = 1 << (flags & 3)
            prefix, sizes, mark = (6 if flags & 4 else 4), (1, 3), b"OCHK"
            block = (at + width, little(self.bytes_at(at, width)))
        else:
            prefix, sizes, mark = 8, (2, 4), b""
            block = (header + 16, little(self.bytes_at(header, 12)[8:]))
        todo, total = [block], 0
        while todo:
            at, size = todo.pop(0)
            total += size
            if total > _MOST_HEADER:
                raise RawError("its header is damaged or too large")
            data, place = self.bytes_at(at, size), 0
            while place + prefix <= len(data):
                kind = little(data[place : place + sizes[0]])
                length = little(data[place + sizes[0] : place + sizes[1]])
                flags = data[place + sizes[1]]
                message = data[place + prefix : place + prefix + length]
                place += prefix + length
                if kind == _CONTINUATION and len(message) >= self.address_size + self.length_size:
                    where = little(message[: self.address_size])
                    room = little(message[self.address_size : self.address_size + self.length_size])
                    todo.append((where + len(mark), room - (len(mark) + 4 if mark else 0)))
                elif len(message) == length:
                    yield kind, flags, message

    def bytes_at(self, address: int, size: int) -> bytes:
        """Return so many bytes from a place in the file.

        Raises:
            RawError: If it ends before that, or they are more than anything that is looked at has.
        """
        if size < 0 or size > max(_MOST_HEAP, MOST_TEXT):
            raise RawError("its header is damaged")
        try:
            data = self.read(self.base + address, size)
        except (OSError, EOFError, OverflowError, ValueError) as error:
            raise RawError(f"it leads outside the file ({error})") from error
        if len(data) != size:
            raise RawError("it leads outside the file")
        return data


def little(data: bytes) -> int:
    """Return a number as the file has it, its lowest byte first."""
    return int.from_bytes(data, "little")


def raw_file(file: h5py.File) -> RawFile:
    """Return an open file's bytes as HDF5 counts them, a remote one's as they come."""
    remote = getattr(file, "remote", None)
    if file.id.get_intent() & h5py.h5f.ACC_RDWR:  # somebody in this process writes it
        file.flush()
    number = None if remote is not None or not hasattr(os, "pread") else _descriptor(file)

    def read(offset: int, size: int) -> bytes:
        if number is not None:
            return os.pread(number, size, offset)
        if remote is None:  # in memory, or in parts
            with open(file.filename, "rb") as stream:
                stream.seek(offset)
                return stream.read(size)
        remote.seek(offset)
        return bytes(remote.read(size))

    if remote is not None:
        length = int(remote.known.size)
    else:
        length = os.path.getsize(file.filename) if number is None else os.fstat(number).st_size
    address_size, length_size = file.id.get_create_plist().get_sizes()
    return RawFile(read, length, int(file.userblock_size), int(address_size), int(length_size))


def _descriptor(file: h5py.File) -> int | None:
    try:
        return int(file.id.get_vfd_handle())
    except (RuntimeError, ValueError, OSError):
        return None
