"""How do host buffers travel? Communicators, and the process's place among them. No TensorFlow."""
