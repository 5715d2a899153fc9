"""How fast is it? Measurements that return plain records; the command line prints them."""
