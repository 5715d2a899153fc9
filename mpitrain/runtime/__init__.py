"""Who am I, on what? Place among the ranks, launcher, threads, devices. No MPI; TensorFlow in `gpus` only."""
