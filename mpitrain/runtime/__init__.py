"""What is this machine, this process? No MPI; TensorFlow in `gpus` and `keras_private` only, Keras in the latter."""
