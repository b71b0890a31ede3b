"""A conversion carried out: sort into buckets, write, sum up, verify, move; each step can be resumed after a kill."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np

from kerasmem.datatools.converting.bucket_file import BucketFile
from kerasmem.datatools.converting.casting import Caster
from kerasmem.datatools.converting.chunk_store import PackedStore, PlainStore, copy_attributes
from kerasmem.datatools.converting.fields import Rows, join_columns
from kerasmem.datatools.converting.job import Job
from kerasmem.datatools.converting.planning import WritePlan, check_space, fingerprint
from kerasmem.datatools.converting.settings import WriteSettings, output_paths, refuse_outputs
from kerasmem.datatools.converting.sources.row_source import RowSource, even_pieces, rows_in
from kerasmem.datatools.converting.writing import ChunkWriter
from kerasmem.datatools.inspecting.listing import CHECKSUM, checksums
from kerasmem.datatools.progress import Progress
from kerasmem.errors import KerasmemError
from kerasmem.hdf5.layout import shown

_BUCKETS, _PLACES = 2, 3  # which of the random streams


@dataclass(frozen=True)
class Outcome:
    """What a conversion turned out to have written, apart from what was planned.

    Args:
        sums: the checksum of each dataset.
        stored: bytes that each takes.
        size: bytes of the files.
        inexact: whole numbers that were rounded, by column.
        losses: images that lost something, by what it was.
        resumed_rows: rows that an interrupted run had done before.
        most_rows: of a dataset in one file.
    """

    sums: Sequence[int]
    stored: Sequence[int]
    size: int
    inexact: Mapping[str, int]
    losses: Mapping[str, int]
    resumed_rows: int
    most_rows: int


@dataclass(frozen=True)
class Ways:
    """How a conversion is carried out, on which its result does not depend.

    Args:
        verify: read the files back and compare.
        force: overwrite outputs, and discard what an interrupted conversion with other settings left.
        progress: told how far things are.
        attributes_from: the HDF5 file whose attributes are copied.
    """

    verify: bool
    force: bool
    progress: Progress
    attributes_from: str | None = None


def write_files(
    source: RowSource, plan: WritePlan, settings: WriteSettings, threads: int, target: str, ways: Ways
) -> Outcome:
    """Write a source's rows to files, whole or not at all.

    Args:
        source: what is read.
        plan: what is written.
        settings: order, split and compression.
        threads: that compress.
        target: the file, from whose name those of several are made.
        ways: how.
    """
    outputs = output_paths(target, settings)
    job = Job(target, fingerprint(source, plan, settings), discard=ways.force)
    with job.ending():
        placing = job.state.get("phase") == "placing"
        refuse_outputs(outputs, source.paths, force=ways.force or placing)
        if not job.state:
            check_space(plan, os.path.dirname(target), shuffle=settings.shuffle, packs=settings.compression.packs)
        run = ConversionRun(source, plan, settings, job, threads=threads, progress=ways.progress)
        sums = run.write()
        if ways.attributes_from is not None and not placing:
            pairs = [(field.columns[0], field.name) for field in plan.datasets if len(field.columns) == 1]
            copy_attributes(ways.attributes_from, run.paths[0], pairs)
        if ways.verify and not placing:
            run.verify(sums)
        run.place(outputs, sums)
        stored = [_stored_bytes(outputs[each.file], each.name) for each in plan.targets]
        size = sum(os.path.getsize(path) for path in outputs)
        most = max(each.rows for each in plan.targets)
        return Outcome(sums, stored, size, run.caster.inexact, run.losses, run.resumed_rows, most)


def _stored_bytes(path: str, name: str) -> int:
    with h5py.File(path, "r") as file:
        return int(file[name].id.get_storage_size())


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
        self.paths = [job.path(f"{number}.h5") for number in range(plan.targets[-1].file + 1)]
        self.resumed_rows = 0
        self._before = Counter(job.state.get("losses", {})) - source.losses

    @property
    def losses(self) -> Counter[str]:
        """How many images lost something as they were written, by what it was, also before a kill."""
        return self._before + self.source.losses

    def write(self) -> list[int]:
        """Write the files into the job's folder; return the checksum of each dataset."""
        state, plan = self._job.state, self.plan
        if state.get("phase") == "placing":
            self.resumed_rows = plan.rows
            return list(state["sums"])
        self.caster.inexact = dict(state.get("inexact", {}))
        if not self.settings.shuffle:
            return self._write_rows(None)
        run_rows = max(plan.sizes.run_bytes // plan.row_bytes, plan.sizes.piece_rows)
        runs = state.get("runs", 0)
        with closing(BucketFile(self._job.folder, plan.datasets, sum(plan.buckets), run_rows, runs)) as buckets:
            self._fill(buckets)
            return self._write_rows(buckets)

    def verify(self, sums: Sequence[int]) -> None:
        """Read the files back and compare.

        Raises:
            KerasmemError: what is read is not what was written.
        """
        done = 0
        for number, path in enumerate(self.paths):
            wanted = {
                target.name: (expected, target.rows)
                for target, expected in zip(self.plan.targets, sums, strict=True)
                if target.file == number
            }
            for same_rows in {rows for _, rows in wanted.values()}:
                found = checksums(path, [name for name, (_, rows) in wanted.items() if rows == same_rows])
                for name, value in found.items():
                    if value != wanted[name][0]:
                        raise KerasmemError(
                            f"{shown(name)}: reads back as {value:08x} and was written as {wanted[name][0]:08x}; the "
                            "disk or its memory is at fault; nothing was kept"
                        )
                done += same_rows
                self._progress("verifying", min(done, self.plan.rows), self.plan.rows)

    def place(self, outputs: Sequence[str], sums: Sequence[int]) -> None:
        """Move the files to where they belong, all that are not there yet."""
        if self._job.state.get("phase") != "placing":
            self._job.checkpoint({"phase": "placing", "sums": list(sums)})
        for path, output in zip(self.paths, outputs, strict=True):
            if os.path.exists(path):
                os.replace(path, output)

    # ---- rows

    def _fill(self, buckets: BucketFile) -> None:
        """Deal all rows out to buckets."""
        state, plan = self._job.state, self.plan
        if state.get("phase") in ("write", "sums"):
            buckets.end_filling()
            return
        bases = np.cumsum([0, *plan.buckets[:-1]])
        counts = np.array(plan.buckets)
        for number, rows, parts in self._pieces(state):
            drawn = np.random.default_rng((self.settings.seed, _BUCKETS, number)).integers(0, counts[parts])
            buckets.add(rows, (bases[parts] + drawn).astype(np.int32))
            self._progress("reading", min((number + 1) * plan.sizes.piece_rows, plan.rows), plan.rows)
            if not buckets.has_room(plan.sizes.piece_rows) and self._job.due(buckets.flush()):
                buckets.sync()
                self._checkpoint("buckets", buckets, next=number + 1, assignment=plan.assignment.state())
        buckets.end_filling()
        buckets.sync()
        self._checkpoint("write", buckets)

    def _write_rows(self, buckets: BucketFile | None) -> list[int]:
        job, plan = self._job, self.plan
        # one that was killed while HDF5 was at the file has no such state: what it left cannot be relied on
        before = job.state.get("write")
        make_store: type[PackedStore | PlainStore] = PackedStore if self.settings.compression.packs else PlainStore
        kept = before["store"] if before else None
        store = make_store(job.folder, self.paths, plan.targets, self.settings.compression, kept)
        with closing(ChunkWriter(store, plan.targets, self.settings.compression, self._threads)) as writer:
            if before:
                writer.restore(job.path(before["tails"]), before)
            if buckets is None:
                self._write_pieces(writer)
            else:
                self._write_buckets(writer, buckets)
            writer.finish()
        self._checkpoint("sums", buckets)
        for target, value in zip(plan.targets, writer.sums, strict=True):
            with h5py.File(self.paths[target.file], "r+") as file:
                file[target.name].attrs[CHECKSUM] = np.uint32(value)
        return writer.sums

    def _write_pieces(self, writer: ChunkWriter) -> None:
        plan = self.plan
        for number, rows, parts in self._pieces(self._job.state):
            for part in range(len(plan.buckets)):
                mine = slice(None) if len(plan.buckets) == 1 else np.flatnonzero(parts == part)
                for place, field in enumerate(plan.datasets):
                    writer.append(part * len(plan.datasets) + place, rows[field.name][mine])
            self._progress("writing", min((number + 1) * plan.sizes.piece_rows, plan.rows), plan.rows)
            if self._job.due(len(parts) * plan.row_bytes):
                written = self._written(writer)
                self._checkpoint("write", None, next=number + 1, write=written, assignment=plan.assignment.state())

    def _write_buckets(self, writer: ChunkWriter, buckets: BucketFile) -> None:
        plan, first = self.plan, self._job.state.get("next", 0)
        part_of = np.repeat(np.arange(len(plan.buckets)), plan.buckets).tolist()
        done = int(buckets.bucket_rows[:first].sum())
        self.resumed_rows = plan.rows if first else self.resumed_rows
        for bucket in range(first, len(part_of)):
            rows = buckets.load(bucket)
            order = np.random.default_rng((self.settings.seed, _PLACES, bucket)).permutation(len(rows))
            for at in range(0, len(rows), plan.sizes.piece_rows):
                some = rows[order[at : at + plan.sizes.piece_rows]]
                for place in range(len(plan.datasets)):
                    writer.append(part_of[bucket] * len(plan.datasets) + place, some[f"f{place}"])
            done += len(rows)
            self._progress("writing", done, plan.rows)
            if self._job.due(rows.nbytes):
                self._checkpoint("write", buckets, next=bucket + 1, write=self._written(writer))

    def _written(self, writer: ChunkWriter) -> dict[str, Any]:
        """Have what is written reach the disk, beside what the last checkpoint needs; return how far it is."""
        last = self._job.state.get("write", {}).get("tails")
        tails = "tails-1.npz" if last == "tails-0.npz" else "tails-0.npz"
        return {"tails": tails, **writer.state(self._job.path(tails))}

    def _checkpoint(self, phase: str, buckets: BucketFile | None, **more: Any) -> None:
        runs = 0 if buckets is None else buckets.runs
        told = {"inexact": dict(self.caster.inexact), "losses": self.losses}
        self._job.checkpoint({"phase": phase, "runs": runs, **told, **more})

    def _pieces(self, state: dict[str, Any]) -> Iterator[tuple[int, Rows, np.ndarray]]:
        """Yield number, rows as written and parts of each piece, from the first that a state says is still to do."""
        plan, first = self.plan, state.get("next", 0)
        size = plan.sizes.piece_rows
        if first:
            plan.assignment.restore(state["assignment"])
            self.resumed_rows = min(first * size, plan.rows)
        names = [field.name for field in plan.read]
        stream = even_pieces(self.source.pieces(first * size, size, names), size)
        for number, piece in zip(itertools.count(first), stream, strict=False):
            parts = plan.assignment.deal(number, rows_in(piece))
            read = {field.name: piece[field.name] for field in plan.read}
            yield number, join_columns(self.caster.cast(read, number * size), plan.datasets), parts
