"""Users' inputs: parameters, prompts, images and sounds, and the sizes of an engine."""
