"""The job without a script."""
