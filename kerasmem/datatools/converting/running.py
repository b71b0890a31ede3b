"""A conversion carried out: sort into buckets, write, sum up, verify, move; each step can be resumed after a kill."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import h5py
import numpy as np

from kerasmem.datatools.converting.bucket_file import BucketFile
from kerasmem.datatools.converting.casting import Caster
from kerasmem.datatools.converting.chunk_store import PackedStore, PlainStore
from kerasmem.datatools.converting.fields import Piece, join_piece
from kerasmem.datatools.converting.job import Job
from kerasmem.datatools.converting.planning import Progress, WritePlan, keys_of
from kerasmem.datatools.converting.settings import WriteSettings
from kerasmem.datatools.converting.sources.protocol import RowSource, even_pieces
from kerasmem.datatools.converting.writing import ChunkWriter
from kerasmem.datatools.inspecting.checksum import checksum
from kerasmem.datatools.inspecting.listing import CHECKSUM
from kerasmem.errors import KerasmemError
from kerasmem.hdf5.layout import shown

_BUCKETS, _PLACES = 2, 3  # which of the random streams


class ConversionRun:
    """One conversion, carried out in its job's folder.

    Args:
        source: what is read.
        plan: what is written.
        settings: order and compression.
        job: where it comes about, and how far it is.
        threads: that compress.
        progress: told how far things are.
    """

    def __init__(
        self, source: RowSource, plan: WritePlan, settings: WriteSettings, job: Job, *, threads: int, progress: Progress
    ) -> None:
        self.source, self.plan, self.settings = source, plan, settings
        self._job, self._threads, self._progress = job, threads, progress
        self.caster = Caster(source.label, plan.read, plan.cast)
        files = max(target.file for target in plan.targets) + 1
        self.paths = [job.path(f"{number}.h5") for number in range(files)]
        self.resumed_rows = 0
        self._flushed: dict[str, Any] = {}  # what the next checkpoint has to know of the rows in the bucket file

    def write(self) -> list[int]:
        """Write the files into the job's folder; return the checksum of each dataset."""
        state, plan = self._job.state, self.plan
        if state.get("phase") == "placing":
            self.resumed_rows = plan.rows
            return list(state["sums"])
        self.caster.inexact = dict(state.get("inexact", {}))
        if not self.settings.shuffle:
            return self._write_rows(None)
        runs = state.get("runs", 0)
        buckets = BucketFile(self._job.folder, plan.fields, sum(plan.buckets), plan.sizes.run_bytes, runs)
        try:
            self._fill(buckets)
            return self._write_rows(buckets)
        finally:
            buckets.close()

    def verify(self, sums: Sequence[int]) -> None:
        """Read the files back and compare.

        Raises:
            KerasmemError: what is read is not what was written.
        """
        done = 0
        for number, path in enumerate(self.paths):
            for target, expected in zip(self.plan.targets, sums, strict=True):
                if target.file == number:
                    found = checksum(path, target.name)
                    if found != expected:
                        raise KerasmemError(
                            f"{shown(target.name)}: reads back as {found:08x} and was written as {expected:08x}; the "
                            "disk or its memory is at fault; nothing was kept"
                        )
                    done += target.rows
                    self._progress("verifying", min(done // len(self.plan.joins), self.plan.rows), self.plan.rows)

    def place(self, outputs: Sequence[str], sums: Sequence[int]) -> None:
        """Move the files to where they belong, all that are not there yet."""
        if self._job.state.get("phase") != "placing":
            self._job.checkpoint({"phase": "placing", "sums": list(sums)})
        mask = os.umask(0)
        os.umask(mask)
        for path, output in zip(self.paths, outputs, strict=True):
            if os.path.exists(path):
                os.chmod(path, 0o666 & ~mask)
                os.replace(path, output)

    # ---- rows

    def _fill(self, buckets: BucketFile) -> None:
        """Deal all rows out to buckets."""
        state, plan = self._job.state, self.plan
        if state.get("phase") in ("write", "sums"):
            buckets.end_filling()
            return
        first = state.get("piece", 0)
        if first:
            plan.assignment.restore(state["assignment"])
            self.resumed_rows = min(first * plan.sizes.piece_rows, plan.rows)
        bases = np.cumsum([0, *plan.buckets[:-1]])
        counts = np.array(plan.buckets)
        for number, piece, parts in self._pieces(first):
            rows = len(parts)
            if not buckets.has_room(rows):
                self._flush(buckets)
            drawn = np.random.default_rng((self.settings.seed, _BUCKETS, number)).integers(0, counts[parts])
            buckets.add(piece, (bases[parts] + drawn).astype(np.int32))
            # a checkpoint has to know how things stand after the last piece that is on disk by then
            self._flushed = {"piece": number + 1, "assignment": plan.assignment.state(), **self._inexact()}
            self._progress("reading", min((number + 1) * plan.sizes.piece_rows, plan.rows), plan.rows)
        buckets.flush()
        buckets.end_filling()
        self._job.checkpoint({"phase": "write", "runs": buckets.runs, **self._inexact()})

    def _flush(self, buckets: BucketFile) -> None:
        if self._job.due(buckets.flush()):
            buckets.sync()
            self._job.checkpoint({"phase": "buckets", "runs": buckets.runs, **self._flushed})

    def _write_rows(self, buckets: BucketFile | None) -> list[int]:
        state, plan = self._job.state, self.plan
        if state.get("phase") == "sums":  # killed while HDF5 was at the file: what it left cannot be relied on
            state = {key: state[key] for key in ("runs", "inexact") if key in state} | {"phase": "write"}
        before = state.get("write")
        store: PlainStore | PackedStore
        if self.settings.compression.packs:
            kept = before["store"] if before else {}
            store = PackedStore(self._job.folder, self.paths, plan.targets, self.settings.compression, kept)
        else:
            store = PlainStore(self.paths, plan.targets, fresh=before is None)
        writer = ChunkWriter(store, plan.targets, self.settings.compression, self._threads)
        try:
            first = 0
            if before:
                writer.restore(self._job.folder, before)
                first = state["next"]
            if buckets is None:
                if first:
                    plan.assignment.restore(state["assignment"])
                self._write_pieces(writer, first)
            else:
                self._write_buckets(writer, buckets, first)
            writer.finish()
        finally:
            writer.close()
        kept = {key: self._job.state[key] for key in ("runs",) if key in self._job.state}
        self._job.checkpoint({"phase": "sums", **self._inexact(), **kept})
        for target, value in zip(plan.targets, writer.sums, strict=True):
            with h5py.File(self.paths[target.file], "r+") as file:
                file[target.name].attrs[CHECKSUM] = np.uint32(value)
        return writer.sums

    def _write_pieces(self, writer: ChunkWriter, first: int) -> None:
        plan = self.plan
        self.resumed_rows = min(first * plan.sizes.piece_rows, plan.rows)
        for number, piece, parts in self._pieces(first):
            for part in range(len(plan.parts)):
                mine = slice(None) if len(plan.parts) == 1 else np.flatnonzero(parts == part)
                for place, join in enumerate(plan.joins):
                    writer.append(part * len(plan.joins) + place, piece[join.field.name][mine])
            self._progress("writing", min((number + 1) * plan.sizes.piece_rows, plan.rows), plan.rows)
            if self._job.due(len(parts) * plan.row_bytes):
                self._checkpoint(writer, number + 1, {"assignment": plan.assignment.state()})

    def _write_buckets(self, writer: ChunkWriter, buckets: BucketFile, first: int) -> None:
        plan = self.plan
        part_of = np.repeat(np.arange(len(plan.parts)), plan.buckets).tolist()
        done = int(buckets.bucket_rows[:first].sum())
        if first:
            self.resumed_rows = plan.rows
        for bucket in range(first, len(part_of)):
            rows = buckets.load(bucket)
            order = np.random.default_rng((self.settings.seed, _PLACES, bucket)).permutation(len(rows))
            for at in range(0, len(rows), plan.sizes.piece_rows):
                some = rows[order[at : at + plan.sizes.piece_rows]]
                for place in range(len(plan.joins)):
                    writer.append(part_of[bucket] * len(plan.joins) + place, some[f"f{place}"])
            done += len(rows)
            self._progress("writing", done, plan.rows)
            if self._job.due(rows.nbytes):
                self._checkpoint(writer, bucket + 1, {"runs": buckets.runs})

    def _checkpoint(self, writer: ChunkWriter, done: int, more: dict[str, object]) -> None:
        written = writer.state(self._job.folder, self._job.next_name())
        self._job.checkpoint({"phase": "write", "next": done, "write": written, **self._inexact(), **more})

    def _inexact(self) -> dict[str, Any]:
        return {"inexact": dict(self.caster.inexact)}

    def _pieces(self, first: int) -> Iterator[tuple[int, Piece, np.ndarray]]:
        """Yield number, rows as written and parts of each piece from the first on."""
        plan = self.plan
        size, key = plan.sizes.piece_rows, plan.key
        names = list(dict.fromkeys([field.name for field in plan.read] + ([key] if key else [])))
        stream = even_pieces(self.source.pieces(first * size, size, names), size)
        for number, piece in zip(itertools.count(first), stream, strict=False):
            rows = len(next(iter(piece.values())))
            keys = keys_of(piece[key], key) if key else None
            parts = plan.assignment.deal(number, keys, rows)
            read = {field.name: piece[field.name] for field in plan.read}
            yield number, join_piece(self.caster.cast(read, number * size), plan.joins), parts
