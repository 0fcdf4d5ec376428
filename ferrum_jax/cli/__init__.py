"""The commands of `ferrum-jax`: a file for each, whose `add` gives the parser its flags and says what runs it."""
