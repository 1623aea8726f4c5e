"""What is left in the warehouse, and what has to be ordered."""
