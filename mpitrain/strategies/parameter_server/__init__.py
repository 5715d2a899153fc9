"""Some ranks host the parameters, the others compute gradients."""
