"""Checkpoints: what a run writes down so that another run can go on from there."""
