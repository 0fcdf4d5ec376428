"""What is kept of a sequence's tokens beside their ids: log-probabilities of a prompt, experts."""
