"""What went wrong, on which rank: found, told once, and the end of the job. No MPI, no TensorFlow."""
