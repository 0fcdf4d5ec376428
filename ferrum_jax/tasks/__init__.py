"""From texts to vectors: encoders and their executables, and pooling. No pools, no scheduler."""
