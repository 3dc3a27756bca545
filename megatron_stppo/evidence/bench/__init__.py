"""What the checks measure with: episodes and engine of a run, models, scores."""
