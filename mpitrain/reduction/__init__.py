"""How do gradients become their mean?"""
