"""What does Keras see? The hooks in optimizers and models, tapes, callbacks, logs, metrics, compiled steps."""
