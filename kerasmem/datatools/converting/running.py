"""A conversion carried out: spool, write, sum up, verify, move; each step can be gone on with after a kill."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence

import h5py
import numpy as np

from kerasmem.datatools.converting.casting import Caster
from kerasmem.datatools.converting.chunk_store import PackedStore, PlainStore
from kerasmem.datatools.converting.encoding import Compression
from kerasmem.datatools.converting.fields import Piece, join_piece
from kerasmem.datatools.converting.job import Job
from kerasmem.datatools.converting.planning import Progress, WritePlan, keys_of
from kerasmem.datatools.converting.sources.protocol import RowSource, even_pieces
from kerasmem.datatools.converting.spool import Spool
from kerasmem.datatools.converting.writing import ChunkWriter
from kerasmem.datatools.inspecting.checksum import checksum
from kerasmem.datatools.inspecting.listing import CHECKSUM
from kerasmem.errors import KerasmemError
from kerasmem.hdf5.layout import shown

_BUCKETS, _PLACES = 2, 3  # which of the random streams


class Run:
    """One conversion on its way.

    Args:
        source: what is read.
        plan: what is written.
        job: where it comes about, and how far it is.
        shuffle: whether rows are written in random order.
        seed: of that order.
        compression: what is done to chunks.
        threads: that compress.
        progress: told how far things are.
    """

    def __init__(
        self,
        source: RowSource,
        plan: WritePlan,
        job: Job,
        *,
        shuffle: bool,
        seed: int,
        compression: Compression,
        threads: int,
        progress: Progress,
    ) -> None:
        self._source, self._plan, self._job = source, plan, job
        self._shuffle, self._seed, self._compression, self._threads = shuffle, seed, compression, threads
        self._progress = progress
        self.caster = Caster(source.label, plan.read, plan.cast)
        files = max(target.file for target in plan.targets) + 1
        self.paths = [job.path(f"{number}.h5") for number in range(files)]
        self.resumed_rows = 0

    def write(self) -> list[int]:
        """Write the files into the job's folder; return the checksum of each dataset."""
        state = self._job.state
        phase = state.get("phase")
        if phase == "placing":
            self.resumed_rows = self._plan.rows
            return list(state["sums"])
        self.caster.inexact = dict(state.get("inexact", {}))
        if self._shuffle:
            spool = Spool(
                self._job.folder,
                self._plan.fields,
                sum(self._plan.buckets),
                self._plan.sizes.run_bytes,
                state.get("runs", 0),
            )
            try:
                self._fill(spool)
                sums = self._write_rows(spool)
            finally:
                spool.close()
        else:
            sums = self._write_rows(None)
        return sums

    def verify(self, sums: Sequence[int]) -> None:
        """Read the files back and compare.

        Raises:
            KerasmemError: what is read is not what was written.
        """
        done = 0
        for number, path in enumerate(self.paths):
            for target, expected in zip(self._plan.targets, sums, strict=True):
                if target.file == number:
                    found = checksum(path, target.name)
                    if found != expected:
                        raise KerasmemError(
                            f"{shown(target.name)}: reads back as {found:08x} and was written as {expected:08x}; the "
                            "disk or its "
                            "memory is at fault; nothing was kept"
                        )
                    done += target.rows
                    self._progress("verifying", min(done // len(self._plan.joins), self._plan.rows), self._plan.rows)

    # ---- rows

    def _fill(self, spool: Spool) -> None:
        """Deal all rows out to buckets."""
        state, plan = self._job.state, self._plan
        if state.get("phase") in ("write", "sums"):
            spool.end_filling()
            return
        first = state.get("piece", 0)
        if first:
            plan.assignment.restore(state["assignment"])
            self.resumed_rows = min(first * plan.sizes.piece_rows, plan.rows)
        bases = np.cumsum([0, *plan.buckets[:-1]])
        counts = np.array(plan.buckets)
        for number, piece, parts in self._pieces(first):
            rows = len(parts)
            if not spool.has_room(rows):
                self._flush(spool, number)
            drawn = np.random.default_rng((self._seed, _BUCKETS, number)).integers(0, counts[parts])
            spool.add(piece, (bases[parts] + drawn).astype(np.int32))
            # the state that the next checkpoint will need is that of the pieces flushed
            self._pending = (number + 1, plan.assignment.state(), dict(self.caster.inexact))
            self._progress("reading", min((number + 1) * plan.sizes.piece_rows, plan.rows), plan.rows)
        self._flush(spool, -1)
        spool.end_filling()
        self._job.checkpoint({"phase": "write", "runs": spool.runs, "inexact": dict(self.caster.inexact)})

    def _flush(self, spool: Spool, number: int) -> None:
        size = spool.flush()
        if number >= 0 and self._job.due(size):
            spool.sync()
            piece, assignment, inexact = self._pending
            state = {"phase": "spool", "runs": spool.runs, "piece": piece, "assignment": assignment, "inexact": inexact}
            self._job.checkpoint(state)

    def _write_rows(self, spool: Spool | None) -> list[int]:
        state, plan = self._job.state, self._plan
        if state.get("phase") == "sums":  # killed while HDF5 was at the file: what it left cannot be relied on
            state = {key: state[key] for key in ("runs", "inexact") if key in state} | {"phase": "write"}
        before = state.get("write")
        store: PlainStore | PackedStore
        if self._compression.packs:
            kept = before["store"] if before else {}
            store = PackedStore(self._job.folder, self.paths, plan.targets, self._compression, kept)
        else:
            store = PlainStore(self.paths, plan.targets, fresh=before is None)
        writer = ChunkWriter(store, plan.targets, self._compression, self._threads)
        try:
            first = 0
            if before:
                writer.restore(self._job.folder, before)
                first = state["next"]
            if spool is None:
                if first:
                    plan.assignment.restore(state["assignment"])
                self._write_pieces(writer, first)
            else:
                self._write_buckets(writer, spool, first)
            writer.finish()
        finally:
            writer.close()
        kept = {key: self._job.state[key] for key in ("runs",) if key in self._job.state}
        self._job.checkpoint({"phase": "sums", "inexact": dict(self.caster.inexact), **kept})
        for target, value in zip(plan.targets, writer.sums, strict=True):
            with h5py.File(self.paths[target.file], "r+") as file:
                file[target.name].attrs[CHECKSUM] = np.uint32(value)
        return writer.sums

    def _write_pieces(self, writer: ChunkWriter, first: int) -> None:
        plan = self._plan
        self.resumed_rows = min(first * plan.sizes.piece_rows, plan.rows)
        for number, piece, parts in self._pieces(first):
            for part in range(len(plan.parts)):
                mine = slice(None) if len(plan.parts) == 1 else np.flatnonzero(parts == part)
                for place, join in enumerate(plan.joins):
                    writer.append(part * len(plan.joins) + place, piece[join.field.name][mine])
            self._progress("writing", min((number + 1) * plan.sizes.piece_rows, plan.rows), plan.rows)
            if self._job.due(len(parts) * plan.row_bytes):
                self._checkpoint(writer, number + 1, {"assignment": plan.assignment.state()})

    def _write_buckets(self, writer: ChunkWriter, spool: Spool, first: int) -> None:
        plan = self._plan
        part_of = np.repeat(np.arange(len(plan.parts)), plan.buckets).tolist()
        done = int(spool.bucket_rows[:first].sum())
        if first:
            self.resumed_rows = plan.rows
        for bucket in range(first, len(part_of)):
            rows = spool.load(bucket)
            order = np.random.default_rng((self._seed, _PLACES, bucket)).permutation(len(rows))
            for at in range(0, len(rows), plan.sizes.piece_rows):
                some = rows[order[at : at + plan.sizes.piece_rows]]
                for place in range(len(plan.joins)):
                    writer.append(part_of[bucket] * len(plan.joins) + place, some[f"f{place}"])
            done += len(rows)
            self._progress("writing", done, plan.rows)
            if self._job.due(rows.nbytes):
                self._checkpoint(writer, bucket + 1, {"runs": spool.runs})

    def _checkpoint(self, writer: ChunkWriter, done: int, more: dict[str, object]) -> None:
        written = writer.state(self._job.folder, self._job.next_name())
        state = {"phase": "write", "next": done, "write": written, "inexact": dict(self.caster.inexact), **more}
        self._job.checkpoint(state)

    def _pieces(self, first: int) -> Iterator[tuple[int, Piece, np.ndarray]]:
        """Yield number, rows as written and parts of each piece from the first on."""
        plan = self._plan
        size, key = plan.sizes.piece_rows, plan.key
        names = list(dict.fromkeys([field.name for field in plan.read] + ([key] if key else [])))
        stream = even_pieces(self._source.pieces(first * size, size, names), size)
        for number, piece in zip(itertools.count(first), stream, strict=False):
            rows = len(next(iter(piece.values())))
            keys = keys_of(piece[key], key) if key else None
            parts = plan.assignment.deal(number, keys, rows)
            read = {field.name: piece[field.name] for field in plan.read}
            yield number, join_piece(self.caster.cast(read, number * size), plan.joins), parts


def place(job: Job, paths: Sequence[str], outputs: Sequence[str], sums: Sequence[int]) -> None:
    """Move the files to where they belong, all that are not there yet."""
    if job.state.get("phase") != "placing":
        job.checkpoint({"phase": "placing", "sums": list(sums)})
    mask = os.umask(0)
    os.umask(mask)
    for path, output in zip(paths, outputs, strict=True):
        if os.path.exists(path):
            os.chmod(path, 0o666 & ~mask)
            os.replace(path, output)
