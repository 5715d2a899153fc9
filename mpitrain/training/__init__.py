"""What does Keras see? Optimizers, tapes, callbacks, and the trainer behind the command line."""
