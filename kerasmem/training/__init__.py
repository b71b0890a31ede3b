"""RUNS THAT GO ON: fit, run, resume, recompute, isolated processes; one notion of where a run stands.

A call of `kerasmem.fit`, in the order in which it comes to them:

- `fitting`: the arguments, and `model.fit` with our functions in the place of Keras's.
- `trainer`: what Keras calls for each step, and the callbacks around those of the user.
- `steps`: one step: whole, in micro-batches, and once more after it ran out; here or in a process of its own.
- `saving`: the callback that counts what was trained on and saves, for `kerasmem.fit` and `ResumeTraining`.

Where a run stands, for all of them:

- `run_state`: the place in Keras's epochs, with history and micro-batches.
- `sources`, `array_source`, `dataset_sources`: the place in the data.
- `model_state`: weights, optimizer, metrics and random generators.
- `checkpoint`: all of these in one file.

What else goes on:

- `resume`: `ResumeTraining`, for a `fit` of Keras's own, and where several workers go on from.
- `supervising`: `kerasmem run`; `script`: the process in which it runs the user's script.
- `segments`: `kerasmem.recompute`.
- `isolation`: `kerasmem.run_isolated`; `requiring`: `kerasmem.require_fit`.
"""
