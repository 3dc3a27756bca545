"""check-invariance: the same step under every layout that fits the ranks at hand."""
