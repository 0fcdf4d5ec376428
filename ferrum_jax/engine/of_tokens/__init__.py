"""Values kept for a sequence's tokens beside their ids: log-probabilities of a prompt, experts."""
