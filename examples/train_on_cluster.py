"""Train on several workers, started by Ray, Slurm or torchrun. Killed workers resume at the next batch.

    python examples/train_on_cluster.py --ray 2 [--kill]
    srun -n 4 python examples/train_on_cluster.py --folder /shared/run
    torchrun --nproc-per-node 2 examples/train_on_cluster.py --folder run
    KERAS_BACKEND=jax torchrun --nproc-per-node 2 examples/train_on_cluster.py --folder run

Each worker reads its rank from the launcher, and `shard="auto"` gives it its share of the rows. With TensorFlow,
workers train under `MultiWorkerMirroredStrategy`, with JAX under `keras.distribution`. `ResumeTraining` saves during
training: if workers are killed and restarted, by Ray or by the same command, they end with the weights of an
undisturbed run. With `--kill`, worker 1 kills itself once in the first epoch.

Ray Train and Slurm give TensorFlow the addresses of all machines. torchrun gives only the first one, so with TensorFlow
it works on one machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import zlib
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

ROWS, FEATURES, BATCH, EPOCHS = 6_000, 32, 64, 2
KILLED_AT = 20  # batches
LAUNCHERS = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))


def main() -> int:
    """Train as one worker, or start the workers with Ray."""
    arguments = read_arguments()
    folder = Path(arguments.folder or tempfile.mkdtemp(prefix="kerasmem-cluster-")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    config = {"folder": str(folder), "kill": arguments.kill}
    if find_rank()[0] == 0:
        write_file(folder / "train.h5")
    if arguments.ray:
        train_by_ray(config, arguments.ray)
        print((folder / "weights.txt").read_text())
    else:
        summary = train(config)
        if find_rank()[0] == 0:
            print(summary)
    return 0


def train_by_ray(config: dict, workers: int) -> None:
    """Start the workers with Ray, which restarts all of them if one is lost."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.tensorflow import TensorflowTrainer

    TensorflowTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(storage_path=config["folder"], failure_config=FailureConfig(max_failures=3)),
    ).fit()


def train(config: dict) -> str:
    """Train as one worker and return a summary."""
    import keras

    from kerasmem import H5ChunkSequence, ResumeTraining

    on_jax = keras.backend.backend() == "jax"
    scope, rank = join_jax() if on_jax else join_tensorflow()
    folder = Path(config["folder"])
    keras.utils.set_random_seed(1)
    with scope:
        settings = {"batch_size": BATCH, "memory_budget": "1MB", "remainder": "drop"}
        data = H5ChunkSequence(folder / "train.h5", shard="auto", **settings)
        model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    callbacks = [kill(folder / "killed")] if config["kill"] and rank == 1 else []
    callbacks.append(ResumeTraining(folder / "run.resume", data, save_freq=5))
    model.fit(data, epochs=EPOCHS, callbacks=callbacks, verbose=0)
    values = b"".join(keras.ops.convert_to_numpy(weight).tobytes() for weight in model.weights)
    summary = (
        f"worker {data.shard[0]} of {data.shard[1]}, {len(data)} batches an epoch, weights {zlib.crc32(values):08x}"
    )
    if rank == 0:
        (folder / "weights.txt").write_text(summary)
    return summary


def join_tensorflow():
    """Return the scope of the strategy and the rank of this worker."""
    import tensorflow as tf

    rank, size = find_rank()
    resolver = None
    if "SLURM_STEP_NUM_TASKS" in os.environ:
        port = int(os.environ.get("MASTER_PORT", "8888"))
        # Slurm assigns the cards; the resolver cannot count them on a machine without cards.
        resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(
            port_base=port, gpus_per_node=size, gpus_per_task=1, auto_set_gpu=False
        )
    elif "RANK" in os.environ:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        workers = [f"{address}:{port + 1 + number}" for number in range(size)]
        os.environ["TF_CONFIG"] = json.dumps(
            {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
        )
    if "TF_CONFIG" in os.environ:  # Ray sets it too
        rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    several = resolver is not None or "TF_CONFIG" in os.environ
    strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver) if several else None
    return (strategy or tf.distribute.get_strategy()).scope(), rank


def join_jax():
    """Join the processes of JAX; return an empty scope and the rank of this worker."""
    import contextlib

    import keras

    rank, size = find_rank()
    if size > 1:
        host = os.environ.get("MASTER_ADDR") or os.environ["SLURM_LAUNCH_NODE_IPADDR"]
        keras.distribution.initialize(f"{host}:{os.environ.get('MASTER_PORT', '8888')}", size, rank)
        keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
    return contextlib.nullcontext(), rank


def find_rank() -> tuple[int, int]:
    """Return the rank of this worker and the number of workers, from the launcher."""
    for rank, size in LAUNCHERS:
        if rank in os.environ and size in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1


def kill(mark: Path):
    """Return a callback that kills this process once."""
    import keras

    class Kill(keras.callbacks.Callback):
        batches = 0

        def on_train_batch_end(self, batch, logs=None):
            self.batches += 1
            if self.batches == KILLED_AT and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    return Kill()


def write_file(path: Path) -> None:
    import h5py
    import numpy as np

    if path.exists():
        return
    random = np.random.default_rng(0)
    x = random.standard_normal((ROWS, FEATURES), dtype="f4")
    with h5py.File(f"{path}.part", "w") as file:
        file.create_dataset("x", data=x, chunks=(128, FEATURES))
        file["y"] = x[:, :4].sum(axis=1)
    os.replace(f"{path}.part", path)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ray", type=int, metavar="N", help="start N workers with Ray")
    parser.add_argument("--folder", help="shared folder for data and checkpoints (default: a new one)")
    parser.add_argument("--kill", action="store_true", help="kill worker 1 once")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
