"""The costs of a mesh, a bundle or a job, before anything runs."""
