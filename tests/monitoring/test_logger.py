"""MemoryLogger in real training; the runs are in scenarios.py."""

import csv
import io
import json

import pytest

MIB = 2**20
QUERIES = 4 + 3  # of one card at the beginning and end of run and epoch; the other is lost at the third
NO_GPU = "driver: not read, because training uses no GPU"


def batches(rows, phase="train", **wanted):
    chosen = [row for row in rows if row["phase"] == phase]
    return [row for row in chosen if all(row[name] == value for name, value in wanted.items())]


def numbers(rows, *names):
    return [[row[name] for name in names] for row in rows]


# ------------------------------------------------------------------ peaks


def test_a_batchs_peak_is_its_own_and_the_runs_maximum_stays(scenario):
    found = scenario("peaks")
    for epoch in (0, 1):
        peaks = [row["peak_bytes"] for row in batches(found["rows"], epoch=epoch)]
        for peak, activation in zip(peaks, found["activation"], strict=True):
            # The hidden activation lives in it, its gradient often beside it, and nothing of larger batches.
            assert activation <= peak < 2 * activation + MIB
    assert found["run_peak"] == max(row["peak_bytes"] for row in batches(found["rows"]))
    assert found["run_peaks"] == {"CPU:0": found["run_peak"]}
    assert found["largest"]["batch"] == 1


def test_resets_cost_only_what_tensorflow_says_itself(scenario):
    found = scenario("peaks")
    assert found["left"] < MIB, "what get_memory_info says after the run is the peak since the last reading"
    assert found["run_peak"] < 32 * MIB, "the peak before the run is none of it"


def test_in_use_is_what_stays_after_the_batch(scenario):
    rows = batches(scenario("peaks")["rows"])
    assert all(row["in_use_bytes"] < MIB for row in rows)
    assert all(row["in_use_bytes"] <= row["peak_bytes"] for row in rows)


# ------------------------------------------------------- Keras's dialect


def test_history_csv_and_tensorboard_have_the_epochs_maxima(scenario):
    found = scenario("history_and_csv")
    keys = ["memory_in_use_bytes", "memory_peak_bytes", "memory_rss_bytes", "memory_swap_bytes", "memory_tree_bytes"]
    assert sorted(found["history"]) == sorted(["loss", "val_loss", *keys])
    assert {tuple(types) for types in found["types"].values()} == {("float",)}
    for row, peak, rss in zip(
        batches(found["rows"], "epoch"),
        found["history"]["memory_peak_bytes"],
        found["history"]["memory_rss_bytes"],
        strict=True,
    ):
        assert (row["peak_bytes"], row["rss_bytes"]) == (peak, rss)
    table = list(csv.DictReader(io.StringIO(found["csv"])))
    assert [float(row["memory_peak_bytes"]) for row in table] == found["history"]["memory_peak_bytes"]
    assert found["board"] == [[epoch, peak] for epoch, peak in enumerate(found["history"]["memory_peak_bytes"])]
    assert found["without"] == ["loss"]
    assert sorted(found["short"]) == ["loss", "memory_mib"]
    assert all(0 < size < 10**5 for size in found["short"]["memory_mib"])


def test_an_epochs_maxima_cover_its_batches_and_validation(scenario):
    rows = scenario("history_and_csv")["rows"]
    for row in batches(rows, "epoch"):
        inside = [other for other in rows if other["epoch"] == row["epoch"] and other["phase"] != "epoch"]
        for size in ("in_use_bytes", "peak_bytes", "between_peak_bytes", "rss_bytes"):
            assert row[size] >= max(other[size] for other in inside)
        assert row["steps"] == 5 and row["batch"] is None
    assert numbers(batches(rows, "validation"), "epoch", "batch") == [[1, 0], [1, 1]]


def test_what_is_not_known_is_null_with_a_reason(scenario):
    found = scenario("history_and_csv")
    assert all(row["reserved_bytes"] is None and row["driver_used_bytes"] is None for row in found["rows"])
    assert found["notes"][0].startswith("reserved_bytes: TensorFlow does not report")
    assert [note for note in found["notes"][1:] if not note.startswith("host:")] == [NO_GPU]
    assert found["growth"] == "no gpu"


def test_json_lines_carry_version_clock_and_notes(scenario):
    found = scenario("history_and_csv")
    lines = [json.loads(line) for line in found["file"].splitlines()]
    kinds = [line["kind"] for line in lines]
    assert kinds.count("sample") == len(found["rows"]) and kinds[0] == "run" and kinds[-1] == "cost"
    assert set(kinds) == {"run", "sample", "phase", "cost"}
    assert lines[0]["format_version"] == 1 and lines[0]["notes"] == found["notes"]
    assert lines[0]["started"].endswith("+00:00")
    assert [{**row, "kind": "sample"} for row in found["rows"]] == [line for line in lines if line["kind"] == "sample"]
    cost = found["cost"]
    assert lines[-1]["batches"] == cost["batches"] and 0 < cost["batch_seconds"] <= cost["total_seconds"]
    assert cost["per_batch_seconds"] == pytest.approx(cost["batch_seconds"] / cost["batches"])


def test_several_steps_an_execution_are_counted_right(scenario):
    found = scenario("steps_per_execution")
    for epoch in (0, 1):
        train = numbers(batches(found["rows"], epoch=epoch), "batch", "steps")
        assert train == [[0, 4], [4, 4], [8, 4]]
        assert numbers(batches(found["rows"], "validation", epoch=epoch), "batch", "steps") == [[0, 4], [4, 4]]
    assert numbers(batches(found["rows"], "epoch"), "steps") == [[12], [12]], "Keras counts the last step as full"
    for phase in ("evaluate", "predict"):
        assert numbers(batches(found["rows"], phase), "batch", "steps") == [[0, 4], [4, 4]]
    assert numbers(batches(found["sparse"]), "batch") == [[0], [8], [16]]


def test_data_of_unknown_length(scenario):
    rows = scenario("unknown_length")["rows"]
    assert numbers(rows, "epoch", "phase", "batch") == [
        [epoch, phase, batch]
        for epoch in (0, 1)
        for phase, batch in [("train", 0), ("train", 1), ("train", 2), ("epoch", None)]
    ]


def test_hooks_called_by_hand(scenario):
    found = scenario("custom_loop")
    assert numbers(found["rows"], "run", "phase") == [
        [0, phase] for phase in ["train", "train", "validation", "epoch"] * 2
    ]
    assert found["careless"] == 0 and "on_train_begin" in found["warnings"][0]


# ------------------------------------------------------------ many runs


def test_a_fit_inside_a_fit_is_not_logged(scenario):
    found = scenario("fit_inside_fit")
    phases = [("train", 0), ("train", 1), ("validation", 0), ("epoch", None)]
    outer = [[0, phase, epoch, batch] for epoch in (0, 1) for phase, batch in phases]
    assert found["rows"] == [*outer, [1, "train", 0, 0], [1, "epoch", 0, None]]
    assert "memory_rss_bytes" in found["keys"]
    assert len(found["warnings"]) == 1 and "another MemoryLogger" in found["warnings"][0]


def test_a_fit_in_another_thread_is_not_mixed_into_the_run(scenario):
    found = scenario("fits_in_two_threads")
    epochs = [[*([0, "train", e, batch] for batch in range(4)), [0, "epoch", e, None]] for e in (0, 1)]
    assert found["rows"] == [*epochs[0], *epochs[1], [1, "train", 0, 0], [1, "epoch", 0, None]]
    assert len(found["warnings"]) == 1 and "in another thread" in found["warnings"][0]
    assert found["keys"] == 6


def test_a_logger_can_be_used_again(scenario):
    found = scenario("reuse")
    assert found["first"] == 6
    runs = numbers(found["rows"], "run", "phase", "epoch")
    assert runs[0] == [0, "train", 0] and runs[6] == [1, "train", 2] and runs[-1] == [2, "evaluate", None]
    times = [row["time"] for row in found["rows"]]
    assert times == sorted(times) and times[0] >= 0
    assert found["runs_in_file"] == [0, 1, 2, 3] and found["runs_of_again"] == [3]
    assert found["after_overwriting"] == 6


def test_after_an_exception_the_file_is_whole_and_the_next_run_is_a_new_one(scenario):
    found = scenario("broken_off")
    first = [[0, "train", batch] for batch in range(4)]
    assert found["interrupt"] == first
    assert found["exception"] == [
        *first, [0, "validation", 0], [0, "validation", 1], *([1, "train", batch] for batch in range(4)),
    ]  # fmt: skip
    assert found["rows"][-4:] == [
        [1, "validation", 0, 0], [1, "validation", 0, 1], [2, "train", 0, 0], [2, "epoch", 0, None],
    ]  # fmt: skip
    assert found["same"] and found["open_files"] == 0


def test_evaluate_inside_fit_is_labelled_and_does_not_spoil_the_batch_around_it(scenario):
    found = scenario("evaluate_inside_fit")
    assert numbers(found["rows"], "run", "phase", "batch") == [
        [0, "train", 0], [0, "train", 1], [0, "validation", 0], [0, "validation", 1], [0, "predict", 0],
        [0, "train", 2], [0, "train", 3], [0, "epoch", None],
    ]  # fmt: skip
    assert all(row["peak_bytes"] > found["big"] for row in batches(found["rows"], "validation"))
    train = [row["peak_bytes"] for row in batches(found["rows"])]
    assert max(train) < MIB, "the batch's peak is that of its own step"
    assert min(train) > 130_000, "and not of what came after it"
    assert found["run_peak"] > found["big"]


def test_copies_have_the_settings_and_add_to_the_file(scenario):
    found = scenario("copies")
    assert found["no_model"] and found["timeline"]
    runs = [[[run, "train", 0, batch] for batch in range(5)] + [[run, "epoch", 0, None]] for run in range(3)]
    assert found["rows"] == runs
    assert (found["before"], found["file"]) == (6, 18), "a copy adds to the file that the original began"


# ------------------------------------------------------- things that fail


def test_growth_that_came_too_late_is_said_once_at_the_users_line(scenario):
    found = scenario("growth_too_late")
    assert found["warnings"] == [["MemoryLogger: Too late. Call it first.", "scenarios.py"]]
    assert found["asked"] == 1 and found["notes"][0].startswith("memory growth: Too late")


# --------------------------------------------------------- GPUs, driver


def test_two_gpus_have_a_row_each_and_a_lost_one_becomes_unknown(scenario):
    found = scenario("two_gpus")
    rows = batches(found["rows"])
    assert numbers(rows, "batch", "device") == [[b, f"GPU:{g}"] for b in range(3) for g in (0, 1)]
    assert {row["time"] for row in rows if row["batch"] == 0} == {rows[0]["time"]}
    assert {row["device"]: row["driver_used_bytes"] for row in rows} == {"GPU:0": 500 * MIB, "GPU:1": 700 * MIB}
    assert [row["driver_used_bytes"] for row in batches(found["rows"], "epoch")] == [500 * MIB, 700 * MIB]
    lost = "driver: GPU:1: Tesla T4: the driver has lost this GPU (GPU is lost); it needs a reset"
    assert lost in found["notes"]
    assert found["history"]["memory_driver_used_bytes"] == [700.0 * MIB], "the fullest device"
    assert found["run_peak"] == found["run_peaks"]["GPU:1"] > found["run_peaks"]["GPU:0"]
    assert found["still_open"] == 0, "the connection is closed with the run"
    assert found["in_batches"] == 1, "no batch asks the driver"
    assert found["queries"] == QUERIES, "a lost card is not asked again"
    assert found["same"]


def test_an_absent_driver_is_silent_unless_it_was_insisted_on(scenario):
    found = scenario("absent_driver")
    note = "driver: no NVIDIA driver here: its library libnvidia-ml.so.1 is not found"
    assert found == {"auto": [0, [note]], "True": [1, [note]], "False": [0, []]}


# --------------------------------------------------------------- outputs


def test_one_tidy_line_an_epoch_or_silence(scenario):
    found = scenario("printed")
    assert found["0"] == ""
    lines = found["1"].splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("memory, epoch 1 (CPU:0): peak ") and ", host " in lines[0]
    bar = found["with_bar"].splitlines()
    assert [line.split()[0] for line in bar] == ["Epoch", "5/5", "memory,"] * 2, "after the bar's line, not in it"


# ------------------------------------------------------ between the batches


def test_host_peaks_outside_batches_are_found_and_named(scenario):
    found = scenario("phases")
    for epoch in (0, 1):
        peaks = {p["phase"]: p["rss_bytes"] - found["least"] for p in found["phases"] if p["epoch"] == epoch}
        for phase, size in (("validation", 160), ("epoch end", 240)):
            assert size * MIB < peaks[phase] < (size + 70) * MIB, (epoch, phase, peaks)
        loading = max(peaks.get("between", 0), peaks.get("train batch", 0))
        assert 80 * MIB < loading < 150 * MIB, (epoch, peaks)
    assert found["same"] and found["thawed"]
    assert set(found["off"]) <= {"between", "train batch", "epoch end"}, "read at the ends of epochs alone"


def test_the_epochs_logs_have_the_peaks_between_batches(scenario):
    found = scenario("phases")
    assert all(size - found["least"] > 160 * MIB for size in found["history"]["memory_rss_bytes"])
    tree = zip(found["history"]["memory_tree_bytes"], found["history"]["memory_rss_bytes"], strict=True)
    assert all(with_workers >= alone for with_workers, alone in tree)


def test_processes_under_this_one_count(scenario):
    found = scenario("process_tree")
    (workers,) = found["with"]["memory_tree_bytes"]
    assert 100 * MIB < workers - found["with"]["memory_rss_bytes"][0] < 130 * MIB
    assert found["alone"]["memory_tree_bytes"] == found["alone"]["memory_rss_bytes"]


@pytest.mark.parametrize("end", ["after fit", "exception", "interrupt", "deleted", "evaluate and predict", "broken"])
def test_no_thread_is_left_behind(scenario, end):
    assert scenario("threads")[end] == 0
    assert scenario("threads")["during"] == [1, 1, 1]
