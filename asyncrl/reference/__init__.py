"""Reference processes: log-probabilities of the frozen start model, asked for over ZeroMQ. No torch in this room."""
