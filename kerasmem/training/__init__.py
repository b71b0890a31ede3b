"""Runs that survive: fit, run, resume, recompute, isolated processes; one representation of a run's position.

A call of `kerasmem.fit`, in the order of its steps:

- `fitting`: the arguments, and `model.fit` with our functions in place of Keras's.
- `trainer`: the function that Keras calls for each step, and the callbacks around those of the user.
- `steps`: one step: whole, in micro-batches, and repeated after it ran out; here or in a process of its own.
  `driver` is the loop, `splitting` chooses smaller pieces.

The position of a run, for all of them:

- `run_state`: the position in Keras's epochs; weights, optimizer, metrics and random generators.
- `sources`: the position in the data.
- `checkpoint`: all of these in one file, and the callback that saves it.

Other entry points:

- `resume`: `ResumeTraining`, for Keras's own `fit`, and the common point of several workers.
- `supervising`: `kerasmem run`, and the process in which it runs the user's script.
- `recompute`: `kerasmem.recompute`.
- `isolation`: `kerasmem.run_isolated`.
- `batch_size`: `kerasmem.find_executable_batch_size` and `kerasmem.require_fit`.
"""
