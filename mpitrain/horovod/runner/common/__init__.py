"""Where Horovod has what its launchers have in common."""
