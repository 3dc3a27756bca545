"""What clients send and get: requests as asks, replies in the form of each API. Nothing here has a state."""
