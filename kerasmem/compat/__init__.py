"""Private and undocumented parts of Keras, TensorFlow, fsspec and other packages. No other package uses them.

Each name is declared once, as a `Borrowed` at the top of the module for its subject, with the feature that needs it. It
can be called like the original function:

    stop_recording = Borrowed("tensorflow.python.eager.record:stop_recording", feature="kerasmem.recompute")

    with stop_recording(): ...

If the installed version lacks the name, the call raises `NotAvailableError` and only that feature is unavailable.
`kerasmem doctor` lists missing names, and `tests/compat` has a canary test for each. Prefer public functions, even if
they are slower.
"""
