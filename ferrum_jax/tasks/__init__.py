"""What can be asked of a model, as tasks: requests to an engine, and a function from their outputs to the answer."""
