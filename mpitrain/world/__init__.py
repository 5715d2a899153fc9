"""Which ranks are one job."""
