"""Other projects' implementations of the operator, as variants."""
