"""A callback that stops a run, as a kill would."""

import keras


class Stop(keras.callbacks.Callback):
    """Raises KeyboardInterrupt after a number of batches."""

    def __init__(self, batches):
        super().__init__()
        self.left = batches

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
