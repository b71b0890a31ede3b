"""The only package that touches private or undocumented parts of Keras, TensorFlow, h5py, fsspec and others.

One module per subject. Each name is declared once, as a `Borrowed` at the top of its module, with the feature that
needs it. It is called like the function that it stands for:

    stop_recording = Borrowed("tensorflow.python.eager.record:stop_recording", feature="kerasmem.recompute")

    with stop_recording(): ...

If the installed version does not have it, this raises `NotAvailableError`, and that one feature is off;
everything else works. `kerasmem doctor` lists what works, and `tests/compat` has a canary test for each.
A public way, even a slower one, is preferred to anything in here.
"""
