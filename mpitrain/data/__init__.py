"""Which samples are mine? Readers, validation split and sharding of training data."""
