"""Models: what a checkpoint is (spec), the layers it is made of, and how both lie on a mesh."""
