"""Every door by its name."""

from __future__ import annotations

from cases import Door
from codec_door import CodecDoor
from hdf5_doors import IndexDoor, WholeDoor
from links_door import LinksDoor
from model_door import ModelsDoor
from remote_door import RemoteDoor
from resume_door import ResumeDoor
from source_doors import CsvDoor, ImagesDoor, NpzDoor, ParquetDoor, RecordsDoor
from text_doors import ExplainDoor, LogsDoor

_ALL: tuple[type[Door], ...] = (
    WholeDoor, IndexDoor, CodecDoor, LinksDoor, RemoteDoor, CsvDoor, NpzDoor, ParquetDoor, ImagesDoor, RecordsDoor,
    LogsDoor, ExplainDoor, ModelsDoor, ResumeDoor,
)  # fmt: skip
DOORS: dict[str, type[Door]] = {door.name: door for door in _ALL}
