"""What Horovod's modules for several frameworks have in common, as far as scripts and tests import it."""
