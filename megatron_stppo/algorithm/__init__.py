"""The mathematics, in plain torch."""
