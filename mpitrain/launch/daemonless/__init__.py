"""Ranks on several hosts without a daemon of an MPI there: each is started by ssh, and lost like a rank."""
