"""What a mesh, a bundle or a job would take, before anything runs."""
