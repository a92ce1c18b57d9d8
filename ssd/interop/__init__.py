"""Other projects: their implementations of the operator as variants, and patches that put this one into them."""
