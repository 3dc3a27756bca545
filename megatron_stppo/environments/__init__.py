"""What the agent acts in."""
