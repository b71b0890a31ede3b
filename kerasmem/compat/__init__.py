"""The only package that touches private or undocumented parts of Keras, TensorFlow, h5py, fsspec and others.

One module per subject, one plain function per borrowed name. Each name is declared once, as a
`Borrowed` at the top of its module, with the feature that needs it:

    STOP_RECORDING = Borrowed("tensorflow.python.eager.record:stop_recording", feature="kerasmem.recompute")

    def stop_recording():
        return STOP_RECORDING.get()()

If the installed version does not have it, `get` raises `NotAvailableError`, and that one feature is off;
everything else works. `kerasmem doctor` lists what works, and `tests/compat` has a canary test for each.
A public way, even a slower one, is preferred to anything in here.
"""
