"""Training that survives running out of memory and being killed.

A call of `kerasmem.fit`, in the order of its steps:

- `fitting`: checks the arguments, and calls `model.fit` with replaced functions.
- `trainer`: the function that Keras calls for each step, and the callbacks around those of the user.
- `steps`: one step, whole or in micro-batches, in this process or a separate one, and its repetition.
  `driver` is the loop, `splitting` chooses smaller pieces.

The position of a run:

- `run_state`: the position in Keras's epochs; weights, optimizer, metrics and random generators.
- `sources`, `indexed_sources`: the position in the data.
- `checkpoint`: one file with all of it, and the callback that saves and resumes.

Other entry points:

- `resume`: `ResumeTraining`, for Keras's `fit`, and the common point of several workers.
- `supervising`: `kerasmem run`, and the process in which it runs the user's script.
- `recompute`: `kerasmem.recompute`.
- `isolation`: `kerasmem.run_isolated`.
- `batch_size`: `kerasmem.find_executable_batch_size` and `kerasmem.require_fit`.
"""
